"""Files of rows: CSV, TSV and JSON lines, cell by cell."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted, near_names
from cpuft.serialization import load, parse_json
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
        _refuse_array(lines[0][1], path)
        found = [parse_json_row(line, f"{path}, line {number}", number) for number, line in lines]
        # Not those of the first line alone: if that lacks a column, the error is to name the line.
        return Table(str(path), sorted({name for _, row in found for name in row}), found)
    (_, columns), *rows = _split_cells(text, "\t" if path.suffix == ".tsv" else ",", str(path))
    _refuse_delimiter(columns, path)
    for number, cells in rows:
        if len(cells) != len(columns):
            separator = "tab" if path.suffix == ".tsv" else "comma"
            quotes = f"put a text that contains a {separator} in quotation marks"
            raise CpuftError(
                f"{path}, line {number} has {counted(len(cells), 'column')}, but the header has {len(columns)}: "
                f"{quotes if len(cells) > len(columns) else 'correct that line'}"
            )
    return Table(str(path), columns, [(number, {**dict(zip(columns, cells))}) for number, cells in rows])


def read_text(path: Path, option: str = "--data-dir") -> str:
    """A file that `option` has named, whole. Raises CpuftError: it is not there, or no UTF-8 text."""
    content = b""
    try:
        if path.is_dir():
            raise CpuftError(_describe_folder(path, option))
        content = path.read_bytes()
        if how := _describe_format(path, content):
            raise CpuftError(how)
        return content.decode("utf-8-sig")  # line ends stay: inside quotation marks they are text
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except UnicodeDecodeError as error:
        # Behind a byte order mark the decoder counts from where that ends.
        start = error.start + (len(content) - len(error.object))
        raise CpuftError(describe_encoding(path, content[:start].count(b"\n") + 1, error)) from None
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): check its permissions and {option}") from None


_CONVERT = 'python -c "import pandas; pandas.{}"'
_MAGIC = ((b"PAR1", "a Parquet file"), (b"ARROW1", "an Arrow file"), (b"\x1f\x8b", "compressed with gzip"))
"""How files of other formats begin."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _describe_format(path: Path, content: bytes) -> str:
    """What to say of a file of a format that is not read, and how it is converted; empty for what may be text."""
    name = next((name for magic, name in _MAGIC if content.startswith(magic)), "")
    target = str(path.with_suffix(".jsonl"))
    what = f"{path} is {{}}, which cpuft does not read"
    if name == "a Parquet file":
        how = _CONVERT.format(f"read_parquet({str(path)!r}).to_json({target!r}, orient='records', lines=True)")
    elif name == "an Arrow file":
        how = _CONVERT.format(f"read_feather({str(path)!r}).to_json({target!r}, orient='records', lines=True)")
    elif name:
        how, target = f"gunzip {shlex.quote(str(path))}", str(path.with_suffix(""))
    elif path.suffix in (".xlsx", ".xls", ".ods"):
        advice = "save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead"
        return f"{what.format('a spreadsheet')}: {advice}"
    elif content.startswith(_UTF_16):
        name = "in UTF-16"
        how, target = _convert_from("UTF-16", path)
    return f"{what.format(name)}: {_advise_command(how, target)}" if name else ""


def _advise_command(command: str, target: str) -> str:
    """The advice to convert a file with `command`, which writes `target`. The command ends the line, to be copied."""
    return f"convert it with this command, then give {target} instead: {command}"


def _describe_folder(path: Path, option: str) -> str:
    """What to say of a folder where a file of rows is needed."""
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        what = f"{path} is a folder that the package datasets saved, which cpuft does not read"
        if (path / "dataset_dict.json").exists():
            code = f"[split.to_json(name + '.jsonl') for name, split in datasets.load_from_disk({str(path)!r}).items()]"
            target = "the file of the split that you need, such as train.jsonl,"
        else:
            target = f"{path.absolute().name}.jsonl"
            code = f"datasets.load_from_disk({str(path)!r}).to_json({target!r})"
        command = f'python -c "import datasets; {code}"'
        return f"{what}: {_advise_command(command, target)}"
    return f"{path} is a folder, and {option} takes one file of rows: name a CSV, TSV or JSON lines file"


def _convert_from(encoding: str, path: Path) -> tuple[str, str]:
    """The command that converts a file to UTF-8, and the name of the file that it writes."""
    target = str(path.with_name(f"{path.stem}-utf8{path.suffix}"))
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(target)}", target


def describe_encoding(path: Path, line: int, error: UnicodeDecodeError) -> str:
    """What to say of a line that is no UTF-8, and the command that converts the file from its likeliest encoding."""
    if b"\0" in error.object:
        return f"{path} is a binary file, which cpuft does not read: give CSV, TSV or JSON lines in UTF-8"
    byte = error.object[error.start]
    advice = _advise_command(*_convert_from("WINDOWS-1252", path))
    return (
        f"{path}, line {line} is not UTF-8 text (byte 0x{byte:02x}): correct that line; or, if the file comes from "
        f"Windows or Excel, {advice}"
    )


def _refuse_array(line: str, path: Path) -> None:
    """Raises CpuftError where the file is one JSON array, in place of an object on each line."""
    if line.lstrip().startswith("["):
        target = str(path.with_name(f"{path.stem}-lines.jsonl"))
        code = f"import json; [print(json.dumps(row)) for row in json.load(open({str(path)!r}))]"
        what = f"{path} is a JSON array, and cpuft reads JSON lines, one object a line"
        command = f'python -c "{code}" > {shlex.quote(target)}'
        raise CpuftError(f"{what}: {_advise_command(command, target)}")


_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}


def _refuse_delimiter(columns: Sequence[str], path: Path) -> None:
    """Raises CpuftError where the header is one cell that looks like several, with something else between them."""
    wanted = "tabs" if path.suffix == ".tsv" else "commas"
    for character, name in _OTHER_DELIMITERS.items():
        if len(columns) == 1 and character in columns[0] and name != wanted:
            if name in ("tabs", "commas"):
                ending = ".tsv" if name == "tabs" else ".csv"
                raise CpuftError(f"{path} has {name} between its columns: give it a name that ends in {ending}")
            target = str(path.with_name(f"{path.stem}-{wanted}{path.suffix}"))
            how = f"read_csv({str(path)!r}, sep={character!r}, dtype=str).to_csv({target!r}, index=False)"
            what = f"{path} has {name} between its columns, and cpuft reads {wanted}"
            raise CpuftError(f"{what}: {_advise_command(_CONVERT.format(how), target)}")


def _split_cells(text: str, delimiter: str, source: str) -> list[tuple[int, list[str]]]:
    """The cells of each line that has any, with the line's number; of cells that span lines the last one's."""
    csv.field_size_limit(sys.maxsize)  # the format knows no limit
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise CpuftError(f"{source}, line {reader.line_num} is no CSV ({error}): correct that line") from None


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


def find_column(columns: Sequence[str], name: str, source: str, advice: str = "") -> int:
    """The number of a column. Raises CpuftError when there is none of that name.

    `advice` says which option names that column; without it, the error lists the names that are most like it.
    """
    if name not in columns:
        listed = f"{advice} (the file has {', '.join(columns)})" if advice else near_names(name, columns)
        raise CpuftError(f"{source} has no column {name!r}: {listed}")
    return columns.index(name)


def parse_label(text: str, task: Task, where: str) -> float:
    """A class number, or a score where the task has those. Raises CpuftError for what is neither."""
    text = text.strip()
    if task.kind == "score":
        with suppress(ValueError):
            if abs(float(text)) < _MOST_SCORE:
                return float(text)
        raise CpuftError(f"{where}: score {text!r} is no number: correct that line")
    if text not in task.labels:
        raise CpuftError(f"{where}: label {text!r} is not one of {', '.join(task.labels)}: correct that line")
    return float(task.labels.index(text))
