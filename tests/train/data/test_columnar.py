"""Parquet, Arrow and saved data sets give the same rows as a CSV file with the same content."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest
from pyarrow import feather, parquet

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.record import read_record
from cpuft.train.data.prepare import prepare
from cpuft.train.data.sources import read_data
from cpuft.train.data.tables import parse_hub_name, read_table, read_tables, split_table
from tests.conftest import run_cpuft
from tests.train.data.test_sources import lines, read_all

ROWS: dict[str, list[Any]] = {
    "text": ["good", "NA", 'a "quoted", text', "line\nbreak", "caf\u00e9", ""],
    "label": [1, 0, 1, 0, 1, 0],
    "score": [0.5, 1e-7, 3.0, 2.25, -1.0, 0.1],
}


def write_stream(table: pyarrow.Table, path: str) -> None:
    with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[pyarrow.Table, str], None]] = {
    "x.csv": lambda table, path: table.to_pandas().to_csv(path, index=False),
    "x.csv.gz": lambda table, path: table.to_pandas().to_csv(path, index=False),
    "x.jsonl": lambda table, path: table.to_pandas().to_json(path, orient="records", lines=True),
    "x.jsonl.gz": lambda table, path: table.to_pandas().to_json(path, orient="records", lines=True),
    "x.parquet": lambda table, path: parquet.write_table(table, path),
    "x.feather": lambda table, path: feather.write_feather(table, path),
    "x.arrow": write_stream,
    "x": lambda table, path: datasets.Dataset(table).save_to_disk(path),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, write in WRITERS.items():
        write(pyarrow.table(ROWS), name)
    return tmp_path


def test_all_formats_give_the_same_rows(written: Path) -> None:
    expected = [list(row.values()) for _, row in read_table(Path("x.csv")).rows]
    assert [row[0] for row in expected] == ROWS["text"]
    for name in WRITERS:
        table = read_table(Path(name))
        assert table.columns == sorted(ROWS) if "json" in name else table.columns == list(ROWS)
        assert [[row[column] for column in ROWS] for _, row in table.rows] == expected, name


def test_all_formats_give_the_same_tokens(written: Path, own_cache: None) -> None:
    names = [name for name in WRITERS if name != "x"]
    paths = {
        prepare(TrainConfig(task="files", train_file=name, validation_file="x.csv")).name for name in (*names, "x")
    }
    assert len(paths) == 1


@pytest.mark.proof
def test_all_formats_train_with_the_same_losses(tmp_path: Path) -> None:
    """Each has a cache folder of its own, so that each is tokenised anew."""
    data = read_data(TrainConfig(task="demo")).train.load()
    texts, labels = data.texts[:160], [str(int(label)) for label in data.labels[:160]]
    table = pyarrow.table(
        {"first": [text[0] for text in texts], "second": [text[1] for text in texts], "label": labels}
    )
    tokens, losses = set(), []
    for name in ("x.csv", "x.parquet", "x.arrow", "x"):
        WRITERS[name](table, name)
        words = ("--task", "files", "--train-file", name, "--validation-split", "0.2", "--text-columns", "first,second")
        options = (*words, "--max-steps", "5", "--run-dir", f"run-{name}", "--batch-size", "16", "--no-save-model")
        done = run_cpuft("launch", *options, settings={"XDG_CACHE_HOME": str(tmp_path / f"cache-{name}")})
        assert done.returncode == 0, done.stderr
        tokens |= {(path.name, path.read_bytes()) for path in tmp_path.glob(f"cache-{name}/cpuft/files-*.npz")}
        losses.append([line.loss for line in read_record(f"run-{name}").steps])
    assert len(tokens) == 1
    assert len(losses[0]) == 5
    assert losses == [losses[0]] * 4


def test_numbers_of_classes_become_their_names() -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    table.save_to_disk("x")
    table.to_parquet("x.parquet")
    for name in ("x", "x.parquet"):
        assert [row["label"] for _, row in read_table(Path(name)).rows] == ["good", "bad"]


def test_rows_that_were_selected_are_read_in_their_order() -> None:
    datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).select([2, 0]).save_to_disk("x")
    assert [row["text"] for _, row in read_table(Path("x")).rows] == ["c", "a"]


def test_fp32_numbers_nulls_and_nested_columns() -> None:
    table = pyarrow.table(
        {
            "text": pyarrow.array(["a", None]),
            "score": pyarrow.array([0.1, None], pyarrow.float32()),
            "tokens": pyarrow.array([["a", "b"], []]),
            "nested": pyarrow.array([{"x": 1}, {"x": 2}]),
            "flag": pyarrow.array([True, False]),
        }
    )
    parquet.write_table(table, "x.parquet")
    found = read_table(Path("x.parquet"))
    assert found.columns == ["text", "score", "tokens", "flag"]
    assert [row for _, row in found.rows] == [
        {"text": "a", "score": "0.1", "tokens": ["a", "b"], "flag": "True"},
        {"text": "", "score": "", "tokens": [], "flag": "False"},
    ]
    assert [where for where, _ in found.rows] == ["x.parquet, row 1", "x.parquet, row 2"]


@pytest.mark.parametrize("name", ["x.parquet", "x.feather", "x.arrow", "x.csv.gz", "x/data-00000-of-00001.arrow"])
@pytest.mark.parametrize("size", [5, 100, -64])
def test_a_file_that_is_cut_off_is_named(written: Path, name: str, size: int) -> None:
    content = Path(name).read_bytes()
    Path(name).write_bytes(content[:size])
    path = Path(name.partition("/")[0])
    with pytest.raises(CpuftError, match=f"{path} is cut off or damaged.*: copy or download it again"):
        list(read_table(path, "--train-file").rows)


def test_a_column_that_is_missing_is_answered_with_those_that_are_there(written: Path) -> None:
    with pytest.raises(
        CpuftError,
        match=r"x.parquet has no column 'body' \(its columns are 'text', 'label', 'score'; objects",
    ):
        read_data(TrainConfig(task="files", train_file="x.parquet", text_columns="body"))


def test_several_files_and_patterns_are_read_in_their_order(written: Path) -> None:
    one, two = lines({"text": "a", "label": "x"}), lines({"label": "y", "text": "b", "more": 1})
    Path("b1.jsonl").write_text(one)
    Path("b0.jsonl").write_text(two)
    for paths, expected in (("b1.jsonl, b0.jsonl", ["a", "b"]), ("b*.jsonl", ["b", "a"])):
        table = read_tables(paths)
        assert [row["text"] for _, row in table.rows] == expected
        assert set(table.columns) == {"label", "text"}
    assert next(iter(table.rows))[0] == "b0.jsonl, line 1"


def test_without_a_validation_file_a_part_is_kept_and_equal_rows_stay_together() -> None:
    rows = [{"text": f"text {number % 40}", "label": str(number % 2)} for number in range(80)]
    Path("x.jsonl").write_text(lines(*rows))
    table = read_table(Path("x.jsonl"))
    train, validation = (list(part.rows) for part in split_table(table, 0.25))
    texts = [{row["text"] for _, row in part} for part in (train, validation)]
    assert (len(train), len(validation)) == (60, 20)
    assert not texts[0] & texts[1]
    Path("other.jsonl").write_text(lines(*reversed(rows)))
    again = list(split_table(read_table(Path("other.jsonl")), 0.25)[1].rows)
    assert sorted(row["text"] for _, row in again) == sorted(row["text"] for _, row in validation)
    data = read_all(TrainConfig(task="files", train_file="x.jsonl", validation_split=0.25))
    assert len(data.validation[""].texts) == 20


@pytest.mark.parametrize(
    "name, expected",
    [
        ("hub:a/b", {"path": "a/b", "name": None, "split": "train", "revision": None}),
        ("hub:a/b:test", {"path": "a/b", "name": None, "split": "test", "revision": None}),
        ("hub:a/b@v1/x", {"path": "a/b", "name": None, "split": "train", "revision": "v1/x"}),
        ("hub:a/b/c:train[:1%]@v1", {"path": "a/b", "name": "c", "split": "train[:1%]", "revision": "v1"}),
    ],
)
def test_the_parts_of_a_name_of_the_hub(name: str, expected: dict[str, str | None]) -> None:
    assert parse_hub_name(name, "--train-file", "train") == expected


@pytest.mark.parametrize("name", ["hub:", "hub:a", "hub:a/b/c/d", "hub:a/b:", "hub:a/b@", "hub:../../x y"])
def test_another_form_of_a_name_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(CpuftError, match="write hub:OWNER/NAME, or in full"):
        parse_hub_name(name, "--train-file", "train")


def test_rows_of_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub cannot be had here: data sets of the library stand in, one of them with selected rows."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}, features=features)
    splits = {"train": data, "validation": data.select([2, 1])}
    asked = []

    def load_dataset(**arguments: Any) -> Any:
        asked.append(arguments)
        return splits[arguments["split"]]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("cpuft.train.data.tables.find_hub_problem", lambda: "")
    found = read_all(TrainConfig(task="files", train_file="hub:a/b/c@v1", validation_file="hub:a/b"))
    assert found.task.labels == ("bad", "good")
    assert (found.train.texts, found.train.labels) == ([("a",), ("b",), ("c",)], [1.0, 0.0, 1.0])
    assert (found.validation[""].texts, found.validation[""].labels) == ([("c",), ("b",)], [1.0, 0.0])
    assert asked[0] == {"path": "a/b", "name": "c", "split": "train", "revision": "v1"}


@pytest.mark.parametrize(
    "problem, message",
    [
        ("the hub is away", "hub:a/b is not in the cache of data sets, and the hub is away: check the network"),
        ("", r"hub:a/b could not be loaded from the Hugging Face hub \(Unknown split\): check the name, configuration"),
    ],
)
def test_a_data_set_that_the_hub_does_not_give(problem: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(**_: Any) -> None:
        raise ValueError("Unknown split\nsecond line")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("cpuft.train.data.tables.find_hub_problem", lambda: problem)
    with pytest.raises(CpuftError, match=message):
        read_tables("hub:a/b")


def test_pandas_and_gzip_are_what_tests_write_with() -> None:
    pandas.DataFrame({"text": ["a"]}).to_csv("x.csv.gz", index=False)
    assert gzip.decompress(Path("x.csv.gz").read_bytes()) == b"text\na\n"
