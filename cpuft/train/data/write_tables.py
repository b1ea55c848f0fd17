"""Write tables as CSV, TSV, JSON lines or Parquet, by the ending of the file's name, row by row."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from cpuft.config.table_files import OUTPUT_ENDINGS
from cpuft.errors import CpuftError, install_command
from cpuft.files import refuse_input, refuse_special, write_atomically
from cpuft.serialization import to_number
from cpuft.train.data.labels import LABEL_SEPARATOR

_DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}
_CELLS_AT_ONCE = 1 << 18
"""About the most cells of a group of rows in a Parquet file, which are in memory together."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class Column(NamedTuple):
    """A column of a table that is written."""

    name: str
    type: str = "string"
    """What its cells are, if they are not None: string, int64, float32, float64, or list for lists of strings."""
    form: str = ""
    """How its numbers are rounded in texts, such as `.6f`; empty for the shortest form."""


Rows = Iterable[Sequence[Any]]
"""Rows of cells in the order of the columns."""


def check_output(path: Path, overwrite: bool, *inputs: str) -> None:
    """Raise CpuftError if `path` does not end in .csv, .tsv, .jsonl or .parquet (which needs pyarrow), is a folder,
    device or one of the `inputs`, or exists without `overwrite`.
    """
    if path.suffix not in OUTPUT_ENDINGS:
        raise CpuftError(
            f"{path} has the ending {path.suffix!r:.20}: give an --output that ends in {', '.join(OUTPUT_ENDINGS)}"
        )
    check_pyarrow(path)
    refuse_special(path)
    refuse_input(path, *inputs)
    if path.exists() and not overwrite:
        raise CpuftError(f"{path} exists: give another --output, or replace the file with --overwrite")


def check_pyarrow(path: Path) -> None:
    """Raise CpuftError if a file to write ends in .parquet and pyarrow is not installed."""
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise CpuftError(f"writing {path} needs pyarrow: {install_command('train')}")


def write_table(path: Path, columns: Sequence[Column], rows: Rows, guards: bool = True) -> None:
    """Write or replace a file that `check_output` accepts, completely or not at all; column names must differ.

    In CSV and TSV, None is an empty cell, lists have bars between their parts, and texts that a spreadsheet would run
    as formulas, names of columns as well, get an apostrophe in front, if `guards`. In JSON lines, numbers that are not
    finite are null. Raises CpuftError: at `path` is a folder, device or pipe.
    """
    with write_atomically(path) as beside:
        if path.suffix == ".parquet":
            _write_parquet(beside, columns, rows)
            return
        with beside.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".jsonl":
                _write_json_lines(file, columns, rows)
            else:
                _write_delimited(file, _DIALECTS[path.suffix], columns, rows, guards)


class _LineEnds:
    """A file whose lines end with \\n, and that gets \\r\\n: Python 3.12 quotes \\r in cells only if lines have it."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, line: str) -> None:
        self.file.write(line.removesuffix("\r\n") + "\n")


def _write_delimited(file: IO[str], dialect: str, columns: Sequence[Column], rows: Rows, guards: bool) -> None:
    def to_text(cell: Any, form: str) -> str:
        if cell is None:
            return ""
        if isinstance(cell, list):
            cell = LABEL_SEPARATOR.join(cell)
        if isinstance(cell, str):
            return guard_formula(cell) if guards else cell
        return format(cell, form)

    writer = csv.writer(_LineEnds(file), dialect, lineterminator="\r\n")
    writer.writerow([to_text(column.name, "") for column in columns])
    forms = [column.form for column in columns]
    writer.writerows(map(to_text, row, forms) for row in rows)


def _write_json_lines(file: IO[str], columns: Sequence[Column], rows: Rows) -> None:
    def to_value(cell: Any, form: str) -> Any:
        if not isinstance(cell, float):
            return cell
        return float(format(cell, form)) if abs(cell) < float("inf") else None

    names, forms = zip(*((column.name, column.form) for column in columns))
    for row in rows:
        file.write(json.dumps(dict(zip(names, map(to_value, row, forms))), ensure_ascii=False) + "\n")


def _write_parquet(path: Path, columns: Sequence[Column], rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {"list": pyarrow.list_(pyarrow.string())}
    schema = pyarrow.schema([(column.name, types.get(column.type, column.type)) for column in columns])
    left, size = iter(rows), max(1, _CELLS_AT_ONCE // len(columns))
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(islice(left, size)):
            arrays = [pyarrow.array(cells, field.type) for cells, field in zip(zip(*group), schema)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def guard_formula(text: str) -> str:
    """Return the text, with an apostrophe in front if it begins with =, +, -, @, tab or return, for which a spreadsheet
    runs it as a formula; numbers such as -1, and single characters, stay.
    """
    is_formula = len(text) > 1 and text.startswith(_FORMULA_STARTS) and math.isnan(to_number(text))
    return f"'{text}" if is_formula else text
