"""Files of embeddings: formats, order, windows, several processes, and input that is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

import cpuft.train.write_embeddings
from cpuft.api import Run
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError
from cpuft.train.embedder import Embedder
from cpuft.train.embedding_form import EmbeddingForm, read_form, write_form
from cpuft.train.write_embeddings import (
    Window,
    choose_prompt,
    list_cores,
    open_npy,
    start_computing,
    write_embeddings,
)
from tests.records import make_record
from tests.report.test_comparison import write_record
from tests.train.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("plain_processes")
TEXTS = [f"a cat number {number} " * (number % 5) for number in range(20)]


@pytest.fixture
def request_(tmp_path: Path) -> PredictConfig:
    """Of a tiny model with prompts, and a file of texts."""
    save_tiny(tmp_path / "tiny")
    form = EmbeddingForm("mean", True, prompts={"query": "ask: ", "passage": "say: "}, max_length=40)
    write_form(tmp_path / "tiny", form, 32)
    (tmp_path / "texts.csv").write_text("name,text\n" + "".join(f"n{n},{text}\n" for n, text in enumerate(TEXTS)))
    return PredictConfig(model="tiny", file="texts.csv", output="out/vectors.npy", precision="fp32")


def test_rows_are_in_the_order_of_the_file_whatever_the_windows(
    request_: PredictConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpuft.train.write_embeddings, "_WINDOW_TEXTS", 7)
    write_embeddings(request_)
    said = capsys.readouterr()
    assert said.out == "embeddings: out/vectors.npy (20 texts, 32 dimensions)\n"
    assert said.err.startswith("20 texts embedded, ")
    found = np.load("out/vectors.npy")
    assert found.dtype == np.float32
    assert np.abs(found - Embedder("tiny", "fp32").embed(TEXTS)).max() < 1e-6
    with pytest.raises(CpuftError, match=r"vectors.npy exists: give another --output, or replace the file with --over"):
        write_embeddings(request_)
    write_embeddings(replace(request_, overwrite=True, prompt="document", dimensions=8))
    cut = np.load("out/vectors.npy")
    assert np.abs(np.linalg.norm(cut, axis=1) - 1).max() < 1e-6
    wanted = Embedder("tiny", "fp32").embed(TEXTS, "say: ")[:, :8]
    assert np.abs(cut - wanted / np.linalg.norm(wanted, axis=1, keepdims=True)).max() < 1e-6
    assert os.listdir("out") == ["vectors.npy"]


def test_parquet_has_ids(request_: PredictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpuft.train.write_embeddings, "_WINDOW_TEXTS", 7)
    wanted = Embedder("tiny", "fp32").embed(TEXTS)
    for id_column, ids in (("name", [f"n{n}" for n in range(20)]), ("", list(range(20)))):
        write_embeddings(replace(request_, output="v.parquet", id_column=id_column, overwrite=True))
        table = parquet.read_table("v.parquet")
        assert table["id"].to_pylist() == ids
        assert np.abs(np.stack(table["embedding"].to_numpy()) - wanted).max() < 1e-6
    with pytest.raises(CpuftError, match=r"v.parquet is one of the files that are read: give another --output"):
        write_embeddings(replace(request_, file="v.parquet", output="./v.parquet", text_columns="id", overwrite=True))


def test_processes_return_the_windows_in_their_order(request_: PredictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """More windows than processes, each with one text. One process chooses the precision, here fp32, for all."""
    monkeypatch.setattr("cpuft.train.write_embeddings._find_precision", partial(dict.get, {"auto": "fp32"}))
    request = replace(request_, np=min(2, len(list_cores())), precision="auto")
    windows = [Window([text], [text]) for text in TEXTS[:5]]
    with start_computing(request) as (dimensions, compute):
        found = list(compute(iter(windows)))
    assert dimensions == 32
    assert [window.texts for window, _ in found] == [window.texts for window in windows]
    wanted = Embedder("tiny", "fp32").embed(TEXTS[:5])
    assert np.abs(np.concatenate([embeddings for _, embeddings in found]) - wanted).max() < 1e-6
    with (
        pytest.raises(CpuftError, match="the embeddings of tiny have 32 dimensions: give at most as many"),
        start_computing(replace(request, dimensions=33)),
    ):
        pass


@pytest.mark.parametrize(
    "options, message",
    [
        ({"output": "x.txt"}, "x.txt has the ending '.txt': give an --output that ends in .npy or .parquet"),
        ({"output": ""}, "--model needs --output: name a file for the embeddings that ends in .npy or .parquet"),
        ({"id_column": "name"}, "vectors.npy has no room for the ids of --id-column: give an --output that ends in .p"),
        ({"output": "texts.npy"}, "texts.npy exists and holds no embeddings: give another --output"),
        ({"dimensions": 33}, "the embeddings of tiny have 32 dimensions: give at most as many"),
        ({"prompt": "querry"}, "tiny has no prompt 'querry': did you mean query?"),
        ({"text_columns": "name,text"}, "--text-columns 'name,text': name one column, as each text is taken by itself"),
        ({"text_columns": "txt"}, "texts.csv has no column 'txt': did you mean text?"),
        ({"file": "none.csv"}, "there is no file none.csv: check --file"),
        ({"file": "empty.csv"}, "empty.csv has no rows: give a file with texts"),
        (
            {"file": "late.jsonl"},
            "late.jsonl, line 9 has no text in the column 'text': correct or remove that row",
        ),
        (
            {"file": "other.csv"},
            "other.csv has no column 'text' (it has a, b): name the one of the texts with --text-columns",
        ),
        (
            {"model": "other"},
            "the pooling of other is pooling_mode_max_tokens (1_Pooling/config.json): replace it by --pooling ",
        ),
        ({"np": 4096}, "--np 4096: this host gives cpuft "),
    ],
)
def test_wrong_input_is_refused(
    request_: PredictConfig, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that is wrong comes after others have been written."""
    monkeypatch.setattr(cpuft.train.write_embeddings, "_WINDOW_TEXTS", 3)
    Path("late.jsonl").write_text('{"text": "a", "b": "c"}\n' * 8 + '{"b": "c"}\n')
    Path("empty.csv").write_text("text\n")
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("texts.npy").write_text("my notes")
    write_form(Path(save_tiny(Path("other"))), EmbeddingForm(), 32)
    Path("other/1_Pooling/config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(CpuftError) as error:
        write_embeddings(replace(request_, **options))
    assert message in str(error.value)
    assert not Path("out").exists() or not os.listdir("out")


def test_a_run_in_python_returns_the_array(request_: PredictConfig) -> None:
    write_record(make_record(1, task="pairs"), Path("run"))
    Path("tiny").rename("run/model")
    found = Run(Path("run")).predict(TEXTS, precision="fp32", dimensions=8)
    form = replace(read_form("run/model"), dimensions=8)
    embedder = Embedder("run", "fp32")
    embedder.form = form
    assert np.abs(found - embedder.embed(TEXTS)).max() < 1e-6


def test_prompts_are_names_or_texts() -> None:
    form = EmbeddingForm(prompts={"query": "q: ", "corpus": "d: ", "sts": "s: ", "Retrieval-query": "r: "})
    names = ("", "query", "document", "sts", "Retrieval-query", "say this: ")
    assert [choose_prompt(form, name, "m") for name in names] == ["", "q: ", "d: ", "s: ", "r: ", "say this: "]
    with pytest.raises(CpuftError, match="m has no prompt 'query': leave --prompt out, or give the text of the prompt"):
        choose_prompt(EmbeddingForm(), "query", "m")


@pytest.mark.parametrize("rows", [0, 1, 12])
def test_an_array_has_the_rows_that_were_written(rows: int, tmp_path: Path) -> None:
    with open_npy(tmp_path / "x.npy", 384) as write:
        for _ in range(rows):
            write(np.ones((1, 384), np.float32), [])
    assert np.load(tmp_path / "x.npy", mmap_mode="r").shape == (rows, 384)
    assert (tmp_path / "x.npy").stat().st_size == 128 + rows * 384 * 4
