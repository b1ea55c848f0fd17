"""Embeddings on several ranks: the file of one process, whatever the number of ranks, and errors that end all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

import cpuft.train.write_embeddings
from cpuft.config.fields import format_arguments
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError
from cpuft.train.embed_on_hosts import CHECK, check_request, refuse_other_models
from cpuft.train.embedding_form import EmbeddingForm, write_form
from cpuft.train.write_embeddings import write_embeddings
from tests.comm.ranks import fork_ranks
from tests.train.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("plain_processes")
TEXTS = [f"a cat number {number} \u00e9 " * (number % 5) for number in range(5000)]


@pytest.fixture
def request_(tmp_path: Path) -> PredictConfig:
    save_tiny(tmp_path / "tiny")
    write_form(tmp_path / "tiny", EmbeddingForm("mean", True, prompts={"query": "ask: "}, max_length=40), 32)
    rows = "".join(f"n{number},{text}\n" for number, text in enumerate(TEXTS))
    (tmp_path / "texts.csv").write_text(f"name,text\n{rows}")
    return PredictConfig(model="tiny", file="texts.csv", output="ranks/vectors.npy", precision="fp32", prompt="query")


def run_ranks(request: PredictConfig, ranks: int, **variables: str) -> subprocess.CompletedProcess[str]:
    return fork_ranks(ranks, "tests.train.embedding_ranks", *format_arguments(request), seconds=120, **variables)


def write_in_one_process(request: PredictConfig, output: str) -> None:
    """With the windows that the ranks have, so that all sums are in the same order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpuft.train.write_embeddings, "_WINDOW_TEXTS", 1024)
        write_embeddings(replace(request, output=output))


def test_two_ranks_write_the_file_of_one_process(request_: PredictConfig) -> None:
    """There are more windows than the ranks have at a time. Rank 1 does not see the file."""
    done = run_ranks(request_, 2)
    assert done.returncode == 0, done.stdout
    assert "5000 texts embedded, " in done.stdout
    write_in_one_process(request_, "one.npy")
    assert Path("ranks/vectors.npy").read_bytes() == Path("one.npy").read_bytes()
    assert np.load("one.npy").shape == (5000, 32)
    assert os.listdir("ranks") == ["vectors.npy"]


def test_all_ranks_compute_in_fp32_if_one_measures_a_slow_bf16(request_: PredictConfig) -> None:
    done = run_ranks(replace(request_, precision="auto"), 2, SLOW_RANK="1")
    assert done.returncode == 0, done.stdout
    write_in_one_process(request_, "one.npy")
    assert Path("ranks/vectors.npy").read_bytes() == Path("one.npy").read_bytes()


@pytest.mark.parametrize("ranks, id_column", [(2, "name"), (1, "")])
def test_a_parquet_file_has_the_ids_in_their_order(ranks: int, id_column: str, request_: PredictConfig) -> None:
    request = replace(request_, output="ranks.parquet", id_column=id_column, dimensions=8)
    done = run_ranks(request, ranks)
    assert done.returncode == 0, done.stdout
    write_in_one_process(request, "one.parquet")
    found, wanted = parquet.read_table("ranks.parquet"), parquet.read_table("one.parquet")
    assert found.equals(wanted)
    assert found["id"].to_pylist() == [f"n{number}" if id_column else number for number in range(5000)]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_of_one_rank_ends_all(rank: str, request_: PredictConfig) -> None:
    """Also while that rank waits on its other thread: its second window is the last one of rank 1."""
    done = run_ranks(request_, 2, FAILING_RANK=rank)
    assert done.returncode != 0
    assert "MemoryError: a rank without memory" in done.stdout
    assert not Path("ranks/vectors.npy").exists()


def test_a_row_that_is_wrong_ends_all_ranks(request_: PredictConfig) -> None:
    Path("late.jsonl").write_text('{"text": "a", "b": "c"}\n' * 3000 + '{"b": "c"}\n')
    done = run_ranks(replace(request_, file="late.jsonl"), 2)
    assert done.returncode != 0
    assert (
        "cpuft: error: late.jsonl, line 3001 has no text in the column 'text': correct or remove that row"
        in done.stdout
    )
    assert os.listdir("ranks") == []


def test_other_models_are_named() -> None:
    refuse_other_models([("a", "form", "node1"), ("a", "form", "node2")])
    for other in (("b", "form", "node2"), ("a", "another form", "node2")):
        with pytest.raises(CpuftError, match="rank 1 on node2 has another model than rank 0 on node1: give a folder"):
            refuse_other_models([("a", "form", "node1"), other])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"file": "none.csv"}, "there is no file none.csv: check --file"),
        ({"text_columns": "txt"}, "texts.csv has no column 'txt': did you mean text?"),
        ({"prompt": "querry"}, "tiny has no prompt 'querry': did you mean query?"),
        ({"id_column": "name"}, "vectors.npy has no room for the ids of --id-column: give an --output that ends in .p"),
    ],
)
def test_what_is_checked_before_ranks_start(options: dict[str, Any], message: str, request_: PredictConfig) -> None:
    check_request(request_)
    with pytest.raises(CpuftError) as error:
        check_request(replace(request_, **options))
    assert message in str(error.value)


def test_the_check_is_a_command(request_: PredictConfig) -> None:
    command = [sys.executable, "-m", "cpuft.train.embed_on_hosts", CHECK]
    asked = format_arguments(replace(request_, file="none.csv"))
    done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "cpuft: error: there is no file none.csv: check --file\n")
