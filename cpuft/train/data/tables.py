"""Tables: rows of the user's files, read in any of the formats, a row at a time, so that files may exceed memory."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from itertools import chain, compress, islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.files import split_paths
from cpuft.serialization import load, parse_json
from cpuft.train.data.columnar import (
    Cell,
    is_columnar,
    list_columns,
    list_dataset_columns,
    read_columnar,
    read_dataset,
)
from cpuft.train.startup import find_hub_problem

Row = tuple[str, dict[str, Cell]]
"""Where a row is (`train.csv, line 3`, for messages), and its cells by column. In JSON lines a row may lack columns."""
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_ROWS_WITH_COLUMNS = 1000
"""Number of rows of JSON lines, the first ones, whose columns count as the columns of the file."""


@dataclass(frozen=True)
class Rows:
    """Rows that are read from their files each time they are iterated over, so that they need not fit into memory.

    Iterating raises CpuftError, which names the file and the line: a file cannot be read any more, is cut off or not
    UTF-8, or a line does not have the header's number of columns or is no JSON object.
    """

    read: Callable[[], Iterator[Row]]
    """Begins to read at the first row."""

    def __iter__(self) -> Iterator[Row]:
        return self.read()


@dataclass(frozen=True)
class Table:
    """The rows of one file or of several files."""

    source: str
    """The paths of the files, for messages."""
    columns: list[str]
    """Names of the columns in the order of the header; in JSON lines those of the first 1000 lines, in alphabetical
    order. Of several files, the columns that all of them have, in the order of the first one."""
    rows: Iterable[Row]
    """All rows in their order. They can be iterated over several times; each time they are read again."""


def read_tables(paths: str, option: str = "--train-file", hub_split: str = "train") -> Table:
    """Open files as `read_table` does: paths and patterns, separated by commas, one after another.

    A name such as `hub:OWNER/NAME` in place of a path means a data set of the Hugging Face hub (see `parse_hub_name`).

    Parameters
    ----------
    hub_split: the split of a data set of the hub whose name tells none.

    Raises CpuftError: a file cannot be read, or a data set cannot be loaded.
    """
    tables = [
        _load_from_hub(path, option, hub_split) if path.startswith(_HUB_PREFIX) else read_table(Path(path), option)
        for path in split_paths(paths)
    ]
    if len(tables) == 1:
        return tables[0]
    columns = [name for name in tables[0].columns if all(name in table.columns for table in tables)]
    return Table(paths, columns, Rows(lambda: chain.from_iterable(table.rows for table in tables)))


_HUB_PREFIX = "hub:"
_HUB_NAME = re.compile(
    r"hub:(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(:(?P<split>[\w.+%:\[\]-]+))?(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)


def parse_hub_name(text: str, option: str, split: str) -> dict[str, str | None]:
    """Return the arguments of `datasets.load_dataset` that a name of a data set of the Hugging Face hub stands for.

    The name is `hub:OWNER/NAME`, and may add in this order `/CONFIGURATION`, `:SPLIT` and `@REVISION`, for example
    `hub:nyu-mll/glue/mrpc:train@main`. The result has the keys path, name (the configuration), split and revision; what
    the name does not tell is None, apart from the split.

    Parameters
    ----------
    option: the option that gave the name, for the message.
    split: the split if the name tells none.

    Raises CpuftError: the text has another form.
    """
    found = _HUB_NAME.fullmatch(text)
    if not found:
        raise CpuftError(
            f"{option} {text}: the name of a data set of the Hugging Face hub has the form hub:OWNER/NAME, or with all "
            f"its parts hub:OWNER/NAME/CONFIGURATION:SPLIT@REVISION: correct it"
        )
    return found.groupdict() | {"split": found["split"] or split}


def _load_from_hub(text: str, option: str, split: str) -> Table:
    """Download a data set of the hub, or find it in the cache of data sets; its rows stay on disk."""
    arguments = parse_hub_name(text, option, split)
    problem = find_hub_problem()
    import datasets

    try:
        data: Any = datasets.load_dataset(**arguments)
        columns = list_dataset_columns(data)
    except Exception as error:  # the hub's client raises many kinds of errors
        if problem:
            raise CpuftError(
                f"{text} is not in the cache of data sets, and {problem}: check the network and the proxy settings, or "
                f"give files with {option}"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CpuftError(
            f"{text} could not be loaded from the Hugging Face hub ({reason}): check the name, configuration, split "
            f"and revision, or give files with {option}"
        ) from None

    def number_rows() -> Iterator[Row]:
        for number, row in enumerate(read_dataset(data), start=1):
            yield f"{text}, row {number}", row

    return Table(text, columns, Rows(number_rows))


def read_table(path: Path, option: str = "--train-file") -> Table:
    """Open a file with rows, whose format the name and the first bytes tell, and read its columns.

    The formats are CSV and TSV with a header line (quoting as in RFC 4180), JSON lines (.json, .jsonl, .ndjson), each
    also compressed with gzip (.gz); Parquet; Arrow; and a folder of `datasets.save_to_disk`. A name that ends in .tsv
    means tabs between columns, all other names commas. Blank lines are skipped. A file with only a header gives a table
    without rows.

    Parameters
    ----------
    option: the option that named the file, for messages.

    Raises CpuftError: the file is missing, empty, cut off or not UTF-8 text; or it has another format, such as a
    spreadsheet, a JSON array, or CSV with another delimiter. Faults after the first lines are found when the rows are
    iterated over (see `Rows`).
    """
    with suppress(OSError):  # of a file that is missing; reading it as text says what to do
        if is_columnar(path):
            columns = list_columns(path, option)
            return Table(str(path), columns, Rows(partial(_number_rows, path, option)))
    first = next((line for line in _read_lines(path, option) if line.strip()), None)
    if first is None:
        raise CpuftError(f"{path} is empty: give a file with rows")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in _JSON_SUFFIXES:
        _refuse_json_array(first, path)
        rows = Rows(partial(_read_json_rows, path, option))
        # The columns of many lines, not the first line's: if that lacks a column, the error must name the line.
        names = {name for _, cells in islice(rows, _ROWS_WITH_COLUMNS) for name in cells}
        return Table(str(path), sorted(names), rows)
    delimiter = "\t" if suffix == ".tsv" else ","
    _, columns = next(_split_cells(path, option, delimiter))
    _refuse_other_delimiter(columns, path, suffix)
    return Table(str(path), columns, Rows(partial(_read_delimited_rows, path, option, delimiter, columns)))


def _number_rows(path: Path, option: str) -> Iterator[Row]:
    for number, row in enumerate(read_columnar(path, option), start=1):
        yield f"{path}, row {number}", row


def _read_json_rows(path: Path, option: str) -> Iterator[Row]:
    for number, line in enumerate(_read_lines(path, option, "\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json_cells(line, where)


def list_json_lines(paths: str, option: str) -> Iterator[tuple[str, str]]:
    """Yield (where a line is, such as `chat.jsonl, line 3`; its text) for each line of JSON lines files, without blank
    lines.

    Files may be compressed with gzip. `paths` are paths and patterns, separated by commas; `option` named them.

    Raises CpuftError: a file is missing, cannot be read, is not UTF-8, or is one JSON array.
    """
    for name in split_paths(paths):
        is_first = True
        for number, line in enumerate(_read_lines(Path(name), option, "\n"), start=1):
            if line.strip():
                if is_first:
                    _refuse_json_array(line, Path(name))
                is_first = False
                yield f"{name}, line {number}", line


def _read_delimited_rows(path: Path, option: str, delimiter: str, columns: list[str]) -> Iterator[Row]:
    rows = _split_cells(path, option, delimiter)
    next(rows, None)  # the header
    for number, cells in rows:
        if len(cells) != len(columns):
            separator = "tab" if delimiter == "\t" else "comma"
            quotes = f"put a text that contains a {separator} in quotation marks"
            raise CpuftError(
                f"{path}, line {number} has {counted(len(cells), 'column')}, but the header has {len(columns)}: "
                f"{quotes if len(cells) > len(columns) else 'correct that line'}"
            )
        yield f"{path}, line {number}", dict(zip(columns, cells))


def _split_cells(path: Path, option: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row that has any; of a row that spans several lines, the last number."""
    csv.field_size_limit(sys.maxsize)  # the format has no limit
    reader = csv.reader(_read_lines(path, option), delimiter=delimiter)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise CpuftError(f"{path}, line {reader.line_num} is not CSV ({error}): correct that line") from None


def read_text(path: Path, option: str = "--data-dir") -> str:
    """Return the text of a file that `option` has named, with its line ends, but without a byte order mark.

    A file that is compressed with gzip is decompressed.

    Raises CpuftError: it is missing, cannot be read, is a folder, cut off, not UTF-8 text, or a spreadsheet. The
    message tells how to convert it.
    """
    return "".join(_read_lines(path, option))


def _read_lines(path: Path, option: str, newline: str = "") -> Iterator[str]:
    """Yield the lines of a text file with their line ends, without a byte order mark. Raises what `read_text` does.

    Parameters
    ----------
    newline: as in `open`: with "" lines end with any line end, with a line feed only with that.
    """
    try:
        if path.is_dir():
            raise CpuftError(_describe_folder(path, option))
        with _open_bytes(path) as file:
            if problem := _describe_format(path, file.read(2)):
                raise CpuftError(problem)
            file.seek(0)
            with TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as lines:
                yield from lines
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise CpuftError(f"{path} is cut off or damaged: copy or download it again, or check {option}") from None
    except UnicodeDecodeError as error:
        raise CpuftError(_describe_first_other_byte(path, error)) from None
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): check its permissions and {option}") from None


def _open_bytes(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_compressed = file.read(2) == _GZIP
    return cast("IO[bytes]", gzip.open(path)) if is_compressed else path.open("rb")


def _describe_first_other_byte(path: Path, error: UnicodeDecodeError) -> str:
    """Return the message for a file that is not UTF-8. `error` knows a part of the file only, not the line."""
    with _open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError as found:
                return describe_encoding(path, number, found)
    return describe_encoding(path, 1, error)


_GZIP = b"\x1f\x8b"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _describe_format(path: Path, first_bytes: bytes) -> str:
    """Say that a file has a format that is not supported, and how to convert it; empty if it may be text."""
    what = f"{path} is {{}}, which cpuft does not read"
    if path.suffix in (".xlsx", ".xls", ".ods"):
        advice = "save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead"
        return f"{what.format('a spreadsheet')}: {advice}"
    if first_bytes in _UTF_16:
        return f"{what.format('in UTF-16')}: {_advise_command(*_convert_from('UTF-16', path))}"
    return ""


def _advise_command(command: str, target: str) -> str:
    """Advise to run `command`, which writes `target`. The command ends the message so that it can be copied."""
    return f"convert it with this command, then give {target} instead: {command}"


def _describe_folder(path: Path, option: str) -> str:
    """Say that a folder was given in place of a file, or of the folder of one split that the library datasets saved."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(one.parent.name for one in path.glob("*/state.json"))
        return (
            f"{path} holds several splits that the Hugging Face library datasets saved ({', '.join(splits)}): give the "
            f"folder of one split, for example {option} {path / (splits or ['train'])[-1]}"
        )
    return (
        f"{path} is a folder, and {option} takes files of rows: give a CSV, TSV, JSON lines, Parquet or Arrow file, or "
        f"all files of the folder, for example {option} '{path}/*.csv'"
    )


def _convert_from(encoding: str, path: Path) -> tuple[str, str]:
    """Return the command that converts a file to UTF-8, and the path of the file that it writes."""
    target = str(path.with_name(f"{path.stem}-utf8{path.suffix}"))
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(target)}", target


def describe_encoding(path: Path, line: int, error: UnicodeDecodeError) -> str:
    """Return the error message for a line that is not UTF-8.

    It ends with the command that converts the file from Windows-1252, its most likely encoding. For a file with null
    bytes, it says that the file is binary.

    Parameters
    ----------
    line: number of the line, counted from 1.
    error: the error of the decoder, with the bytes that it was given.
    """
    if b"\0" in error.object:
        return f"{path} is a binary file, which cpuft does not read: give CSV, TSV or JSON lines in UTF-8"
    byte = error.object[error.start]
    advice = _advise_command(*_convert_from("WINDOWS-1252", path))
    return (
        f"{path}, line {line} is not UTF-8 text (byte 0x{byte:02x}): correct that line; or, if the file comes from "
        f"Windows or Excel, {advice}"
    )


def _refuse_json_array(first_line: str, path: Path) -> None:
    """Raise CpuftError if the file is one JSON array instead of one object on each line."""
    if first_line.lstrip().startswith("["):
        target = str(path.with_name(f"{path.stem}-lines.jsonl"))
        code = f"import json; [print(json.dumps(row)) for row in json.load(open({str(path)!r}))]"
        what = f"{path} is a JSON array, and cpuft reads JSON lines, one object a line"
        command = f'python -c "{code}" > {shlex.quote(target)}'
        raise CpuftError(f"{what}: {_advise_command(command, target)}")


_PANDAS = 'python -c "import pandas; pandas.{}"'
_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}


def _refuse_other_delimiter(columns: Sequence[str], path: Path, suffix: str) -> None:
    """Raise CpuftError if the header has one column that contains another delimiter than the file's `suffix` tells."""
    wanted = "tabs" if suffix == ".tsv" else "commas"
    for character, name in _DELIMITERS.items():
        if len(columns) == 1 and character in columns[0] and name != wanted:
            if name in ("tabs", "commas"):
                ending = ".tsv" if name == "tabs" else ".csv"
                raise CpuftError(f"{path} has {name} between its columns: give it a name that ends in {ending}")
            target = str(path.with_name(f"{path.stem}-{wanted}{path.suffix}"))
            options = f"sep={character!r}, dtype=str, keep_default_na=False"  # texts such as NA stay texts
            code = f"read_csv({str(path)!r}, {options}).to_csv({target!r}, index=False)"
            what = f"{path} has {name} between its columns, and cpuft reads {wanted}"
            raise CpuftError(f"{what}: {_advise_command(_PANDAS.format(code), target)}")


def parse_json_cells(line: str, where: str) -> dict[str, Cell]:
    """Parse one JSON object into cells, by column: texts, and lists of texts.

    Numbers become texts, true becomes `True`, null becomes an empty text; in a list, too, numbers become texts. A value
    that is an object, or a list that contains null, lists or objects, is left out as if the column were missing.

    Parameters
    ----------
    where: the file and the line, for the message.

    Raises CpuftError: it is not a JSON object.
    """
    try:
        values = load(dict[str, Any], parse_json(line))
        lists = {k: list(map(str, v)) for k, v in values.items() if isinstance(v, list) and _is_flat(v)}
        cells = {k: "" if v is None else str(v) for k, v in values.items() if not isinstance(v, (list, dict))}
        return {**load(dict[str, str], cells), **load(dict[str, list[str]], lists)}
    except ValueError as error:
        raise CpuftError(
            f"{where} is not a JSON object ({error}): write one object a line, {{'text': ..., 'label': ...}}"
        ) from None


def _is_flat(values: list[Any]) -> bool:
    return not any(value is None or isinstance(value, (list, dict)) for value in values)


def find_column(columns: Sequence[str], name: str, source: str, advice: str = "") -> int:
    """Return the index of the column `name`. Raises CpuftError if no column has that name.

    Parameters
    ----------
    source: the file, for the message.
    advice: says which option names the column; without it, the message lists the most similar names.
    """
    if name not in columns:
        there = f" (its columns are {', '.join(map(repr, columns))})" if advice else ""
        raise CpuftError(f"{source} has no column {name!r}{there}: {advice or suggest_names(name, columns)}")
    return columns.index(name)


def split_table(table: Table, share: float, columns: Sequence[str] = ()) -> tuple[Table, Table]:
    """Return a table without the rows that are kept for validation, and a table of these rows. Reads all rows once.

    Which rows are kept depends only on their cells, not on their order or on the seed of the training, so that runs can
    be compared: those whose checksums are the smallest. Equal rows, with the same cells, stay together: no validation
    example is a training example, too.

    Parameters
    ----------
    share: of the different rows for validation; at least one row is taken.
    columns: rows whose cells in these columns are equal stay together, and count as one; empty: all columns.

    Raises CpuftError: there are fewer than two different rows, or a row cannot be read.
    """
    checksums = np.fromiter((_checksum_row(_choose_cells(cells, columns)) for _, cells in table.rows), np.uint64)
    different = np.unique(checksums)
    if len(different) < 2:
        which = f" in {' and '.join(map(repr, columns))}" if columns else ""
        raise CpuftError(
            f"{table.source} has {counted(len(different), 'different row')}{which}, too few to take some for "
            f"validation: give more rows, or other rows with --validation-file"
        )
    count = min(len(different) - 1, max(1, round(share * len(different))))
    is_kept = checksums <= different[count - 1]
    train, validation = (Rows(partial(compress, table.rows, chosen)) for chosen in (~is_kept, is_kept))
    return replace(table, rows=train), replace(table, rows=validation)


def _choose_cells(cells: dict[str, Cell], columns: Sequence[str]) -> dict[str, Cell]:
    return {name: cells[name] for name in columns if name in cells} if columns else cells


def _checksum_row(cells: dict[str, Cell]) -> int:
    content = json.dumps(cells, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
