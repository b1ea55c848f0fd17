"""Tables that are written: each format gives back what was written, whatever the texts are."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from cpuft.config.table_files import OUTPUT_ENDINGS
from cpuft.train.data.tables import read_table
from cpuft.train.data.write_tables import Column, guard_formula, write_table

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
ODD = st.one_of(
    TEXTS, st.sampled_from(['a,"b', "no\nmore", "\r", "a\rb\r\n", "=1+1", "\t", "", "  ", "\u2028", "'", "|"])
)
FLOATS = st.floats(width=32)
ROW = st.tuples(st.integers(-(2**63), 2**63 - 1), ODD, st.none() | ODD, st.lists(ODD), st.none() | FLOATS, FLOATS)
TYPES = ("int64", "string", "string", "list", "float32", "float64")


@given(st.lists(ODD, min_size=6, max_size=6, unique=True), st.lists(ROW, min_size=1, max_size=5))
def test_what_was_written_is_read_again(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    columns = [Column(name, type_) for name, type_ in zip(names, TYPES)]
    with tempfile.TemporaryDirectory() as folder:
        for ending in OUTPUT_ENDINGS:
            path = Path(folder, f"x{ending}")
            write_table(path, columns, rows, guards=False)
            assert READERS[ending](path) == [names, *map(EXPECTED.get(ending, to_texts), rows)]


def read_delimited(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, "excel-tab" if path.suffix == ".tsv" else "excel"))


def to_texts(row: tuple[Any, ...]) -> list[str]:
    return ["" if cell is None else "|".join(cell) if isinstance(cell, list) else str(cell) for cell in row]


def read_json_lines(path: Path) -> list[list[Any]]:
    found = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    return [list(found[0]), *(list(row.values()) for row in found)]


def to_json(row: tuple[Any, ...]) -> list[Any]:
    return [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]


def read_parquet(path: Path) -> list[list[Any]]:
    table = parquet.read_table(path)
    rows = zip(*(column.to_pylist() for column in table.columns))
    return [table.column_names, *map(to_parquet, rows)]


def to_parquet(row: tuple[Any, ...]) -> list[Any]:
    return ["nan" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row]


READERS = {".csv": read_delimited, ".tsv": read_delimited, ".jsonl": read_json_lines, ".parquet": read_parquet}
EXPECTED = {".jsonl": to_json, ".parquet": to_parquet}


@pytest.mark.parametrize("ending", OUTPUT_ENDINGS)
def test_cpuft_reads_what_it_writes(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in texts have the form of their column, and a Parquet file with many cells has several groups of rows."""
    monkeypatch.setattr("cpuft.train.data.write_tables._CELLS_AT_ONCE", 5)
    columns = [Column("index", "int64"), Column("a\rb"), Column("p", "float32", ".3f")]
    rows = [(number, "x\ry", 0.25) for number in range(3)]
    write_table(tmp_path / f"x{ending}", columns, rows)
    found = [cells for _, cells in read_table(tmp_path / f"x{ending}").rows]
    p = "0.250" if ending in (".csv", ".tsv") else "0.25"
    assert [(row["index"], row["a\rb"], row["p"]) for row in found] == [(str(n), "x\ry", p) for n in range(3)]
    if ending == ".parquet":
        assert parquet.ParquetFile(tmp_path / "x.parquet").num_row_groups == 3


def test_no_text_of_a_spreadsheet_is_a_formula(tmp_path: Path) -> None:
    """Numbers and lone characters stay as they are, and so do all texts in formats that no spreadsheet opens."""
    texts = ["=1+2", "+cmd|x", "-x", "@SUM(A1)", "\t=1", "-1", "+1.5e3", "-", "--", "a=b", "", "'=1"]
    guarded = ["'=1+2", "'+cmd|x", "'-x", "'@SUM(A1)", "'\t=1", "-1", "+1.5e3", "-", "'--", "a=b", "", "'=1"]
    assert [guard_formula(text) for text in texts] == guarded
    columns, row = [Column("=a()"), Column("b", "list"), Column("c", "float64")], ("@X", ["-a", "b"], -2.5)
    for ending in OUTPUT_ENDINGS:
        write_table(tmp_path / f"x{ending}", columns, [row])
    assert (tmp_path / "x.csv").read_text() == "'=a(),b,c\n'@X,'-a|b,-2.5\n"
    assert (tmp_path / "x.tsv").read_text() == "'=a()\tb\tc\n'@X\t'-a|b\t-2.5\n"
    assert (tmp_path / "x.jsonl").read_text() == '{"=a()": "@X", "b": ["-a", "b"], "c": -2.5}\n'
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() == [dict(zip(("=a()", "b", "c"), row))]


def test_an_error_between_rows_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> Any:
        yield ("a",)
        raise ValueError("a row is missing")

    for ending in OUTPUT_ENDINGS:
        with pytest.raises(ValueError, match="a row is missing"):
            write_table(tmp_path / f"x{ending}", [Column("a")], fail())
    assert list(tmp_path.iterdir()) == []
