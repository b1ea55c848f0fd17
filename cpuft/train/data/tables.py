"""Files of rows: CSV, TSV and JSON lines, cell by cell."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted, near_names
from cpuft.loader import load, parse_json
from cpuft.train.data.tasks import Task

_MOST_SCORE = 3e38  # larger ones are infinite as float32, which models compute in

Cell = str | list[str]
"""A text; in JSON lines, a list of texts too."""


@dataclass(frozen=True)
class Table:
    """A user's file: its column names, and each row with its line number."""

    source: str
    columns: list[str]
    rows: list[tuple[int, dict[str, Cell]]]


def read_table(path: Path, option: str = "--train-file") -> Table:
    """A CSV or TSV file with a header line (quoting as RFC 4180 has it), or JSON lines (.json, .jsonl).

    Raises CpuftError: it is not there (`option` named it), empty, no UTF-8 text, or has a line that does not fit the
    others.
    """
    text = read_text(path, option)
    if not text.strip():
        raise CpuftError(f"{path} is empty: give a file with rows")
    if path.suffix in (".json", ".jsonl", ".ndjson"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        found = [parse_json_row(line, f"{path}, line {number}", number) for number, line in lines]
        return Table(str(path), sorted(found[0][1]), found)
    (_, columns), *rows = _split_cells(text, "\t" if path.suffix == ".tsv" else ",", str(path))
    for number, cells in rows:
        if len(cells) != len(columns):
            quotes = " (a text with a comma stands in quotation marks)" if len(cells) > len(columns) else ""
            raise CpuftError(
                f"{path}, line {number} has {counted(len(cells), 'column')}, its header {len(columns)}: "
                f"mend that line{quotes}"
            )
    return Table(str(path), columns, [(number, {**dict(zip(columns, cells))}) for number, cells in rows])


def read_text(path: Path, option: str = "--data-dir") -> str:
    """A file that `option` has named, whole. Raises CpuftError: it is not there, or no UTF-8 text."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # a line end inside quotation marks is text
            return file.read()
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"{path} cannot be read ({error}): it must be a UTF-8 text file you may read") from None


def _split_cells(text: str, delimiter: str, source: str) -> list[tuple[int, list[str]]]:
    """The cells of each line that has any, with the line's number; of cells that span lines the last one's."""
    csv.field_size_limit(sys.maxsize)  # the format knows no limit
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise CpuftError(f"{source}, line {reader.line_num} is no CSV ({error}): mend that line") from None


def parse_json_row(line: str, where: str, number: int) -> tuple[int, dict[str, Cell]]:
    """Objects, and lists of anything but texts and numbers, are no cells: of columns asked for, they are missing."""
    try:
        values = load(dict[str, Any], parse_json(line))
        lists = {k: list(map(str, v)) for k, v in values.items() if isinstance(v, list) and _is_flat(v)}
        cells = {k: "" if v is None else str(v) for k, v in values.items() if not isinstance(v, (list, dict))}
        return number, {**load(dict[str, str], cells), **load(dict[str, list[str]], lists)}
    except ValueError as error:
        raise CpuftError(
            f"{where} is not a JSON object ({error}): write one object a line, {{'text': ..., 'label': ...}}"
        ) from None


def _is_flat(values: list[Any]) -> bool:
    return not any(value is None or isinstance(value, (list, dict)) for value in values)


def refuse_empty(rows: Sequence[object], source: str) -> None:
    """Raises CpuftError when there are no rows."""
    if not rows:
        raise CpuftError(f"{source} has no rows: give a file with at least one row below its header")


def find_column(columns: Sequence[str], name: str, source: str) -> int:
    """The number of a column. Raises CpuftError when there is none of that name."""
    if name not in columns:
        raise CpuftError(f"{source} has no column {name!r}: {near_names(name, columns)}")
    return columns.index(name)


def parse_label(text: str, task: Task, where: str) -> float:
    """A class number, or a score where the task has those. Raises CpuftError for what is neither."""
    text = text.strip()
    if task.kind == "score":
        with suppress(ValueError):
            if abs(float(text)) < _MOST_SCORE:
                return float(text)
        raise CpuftError(f"{where}: score {text!r} is no number: mend that line")
    if text not in task.labels:
        raise CpuftError(f"{where}: label {text!r} is not one of {', '.join(task.labels)}: mend that line")
    return float(task.labels.index(text))
