"""Tables: rows of the user's files, read in any of the formats, a row at a time, so that files may exceed memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from itertools import chain, compress, islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from cpuft.config.table_files import DELIMITERS
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted, list_names, suggest_names
from cpuft.files import describe_lfs_pointer, split_paths
from cpuft.serialization import load, parse_json
from cpuft.train.data.columnar import Cell, is_columnar, list_columns, list_dataset_columns, read_columnar, read_dataset
from cpuft.train.data.delimited import Dialect, TableOptions, advise_conversion, choose_dialect, split_rows
from cpuft.train.startup import advise_on_hub, find_hub_problem

Row = tuple[str, dict[str, Cell]]
"""Where a row is (`train.csv, line 3`, for messages), and its cells by column. In JSON lines a row may lack columns."""
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_WORD_COLUMNS = ("tokens", "words")
"""Names of columns whose cells are lists of words."""
_JSON_BEGIN = re.compile(r"\s*(\{|\[\s*(\{|$))")
"""How the first line of a file with JSON begins, whatever its name."""
_DEFAULT = TrainConfig()
_ROWS_WITH_COLUMNS = 1000
"""Number of rows of JSON lines, the first ones, whose columns count as the columns of the file."""


@dataclass(frozen=True)
class Rows:
    """Rows that are read anew each time they are iterated over; a fault raises CpuftError, which names the line."""

    read: Callable[[], Iterator[Row]]

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
    notes: tuple[str, ...] = ()
    """What is to be said about how the files are read."""


def read_tables(
    paths: str, option: str = "--train-file", options: TableOptions = _DEFAULT, hub_split: str = "train"
) -> Table:
    """Open files as `read_table` does: paths and patterns, separated by commas, one after another.

    Names that begin with hub: are data sets of the Hugging Face hub, read by `parse_hub_name` with `hub_split` as usual
    split. Raises CpuftError: a file or data set is missing or cannot be read.
    """
    tables = [
        _read_hub_table(path, option, hub_split)
        if path.startswith(_HUB_PREFIX)
        else read_table(Path(path), option, options)
        for path in split_paths(paths)
    ]
    if len(tables) == 1:
        return tables[0]
    columns = [name for name in tables[0].columns if all(name in table.columns for table in tables)]
    notes = tuple(note for table in tables for note in table.notes)
    return Table(paths, columns, Rows(lambda: chain.from_iterable(table.rows for table in tables)), notes)


_HUB_PREFIX = "hub:"
_HUB_NAME = re.compile(
    r"hub:(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(:(?P<split>[\w.+%:\[\]-]+))?(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)


def parse_hub_name(text: str, option: str, split: str) -> dict[str, str | None]:
    """Return the arguments path (nyu-mll/glue), name, split and revision of `datasets.load_dataset` for a text such as
    `hub:nyu-mll/glue/mrpc:train@main`. Only the path is needed: otherwise name and revision are None, and the split is
    `split`. Raises CpuftError for any other form.
    """
    found = _HUB_NAME.fullmatch(text)
    if not found:
        raise CpuftError(
            f"{option} {text}: write hub:OWNER/NAME, or in full hub:OWNER/NAME/CONFIGURATION:SPLIT@REVISION"
        )
    return found.groupdict() | {"split": found["split"] or split}


def _read_hub_table(text: str, option: str, split: str) -> Table:
    arguments = parse_hub_name(text, option, split)
    advice = f"check the name, configuration, split and revision, or give files with {option}"
    data = load_from_hub(text, advice, **arguments)
    return Table(text, list_dataset_columns(data), Rows(lambda: _number_rows(text, read_dataset(data))))


def load_from_hub(what: str, advice: str, **arguments: Any) -> Any:
    """Return what `datasets.load_dataset` loads from the hub, or its cache. Raises CpuftError, which begins with `what`
    and ends with `advice`: loading fails.
    """
    problem = find_hub_problem()
    import datasets

    try:
        return datasets.load_dataset(**arguments)
    except Exception as error:  # the hub's client raises many kinds of errors
        if problem:
            raise CpuftError(
                f"{what} is not in the cache of data sets, and {problem}: {advise_on_hub(problem)}, or {advice}"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CpuftError(f"{what} could not be loaded from the Hugging Face hub ({reason}): {advice}") from None


def read_table(path: Path, option: str = "--train-file", options: TableOptions = _DEFAULT) -> Table:
    """Open a file with rows, whose format the name and the first bytes tell, and read its columns.

    The formats are CSV and TSV with a header line, JSON lines (.json, .jsonl, .ndjson), each also compressed with gzip;
    Parquet; Arrow; and a folder of `datasets.save_to_disk`. Raises CpuftError: the file is missing, empty, damaged or
    of another format; for faults after the first lines, when the rows are iterated over.
    """
    # A file that is missing or damaged: reading it as text says what to do.
    with suppress(OSError, EOFError, zlib.error):
        if is_columnar(path):
            if path.is_file():
                _refuse_other_formats(path)
            columns = _name_columns(list_columns(path))
            return Table(str(path), columns, Rows(lambda: _number_rows(str(path), read_columnar(path))))
    lines = partial(read_lines, path, option, encoding=options.encoding)
    first = next((line for line in lines() if line.strip()), None)
    if first is None:
        raise CpuftError(f"{path} is empty: give a file with rows")
    suffix = get_suffix(path)
    if suffix in JSON_SUFFIXES or _JSON_BEGIN.match(first):
        by_line = partial(lines, newline="\n")
        _refuse_json_document(by_line, path)
        rows = Rows(partial(_read_json_rows, by_line, path))
        # The columns of many lines, not the first line's: if that lacks a column, the error must name the line.
        names = {name for _, cells in islice(rows, _ROWS_WITH_COLUMNS) for name in cells}
        return Table(str(path), sorted(names), rows)
    dialect = choose_dialect(lines, path, suffix, options)
    dialect = replace(dialect, columns=_name_columns(dialect.columns))
    notes = (dialect.note,) if dialect.note else ()
    return Table(str(path), dialect.columns, Rows(partial(_read_delimited_rows, lines, path, dialect)), notes)


def get_suffix(path: Path) -> str:
    """Return the ending of a file's name, without that of gzip: `.csv` for x.csv.gz, "" for x.gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _name_columns(columns: list[str]) -> list[str]:
    """Return the columns. Those of one name get their place in it, so that none is taken for the other."""
    times = Counter(columns)
    return [
        f"{name} (column {number})" if name and times[name] > 1 else name
        for number, name in enumerate(columns, start=1)
    ]


def _number_rows(source: str, rows: Iterator[dict[str, Cell]]) -> Iterator[Row]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def _read_json_rows(lines: Callable[[], Iterator[str]], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json_cells(line, where)


def list_json_lines(paths: str, option: str) -> Iterator[tuple[str, str]]:
    """Yield where each line that is not blank is (`chat.jsonl, line 3`), and the line with its end, not parsed; `paths`
    as for `split_paths`. Raises CpuftError: a file cannot be read, begins like a Parquet file or a JSON array, or is
    named hub:...
    """
    for name in split_paths(paths):
        _refuse_columnar(name, option)
        lines = enumerate(read_lines(Path(name), option, "\n"), start=1)
        filled = ((f"{name}, line {number}", line) for number, line in lines if line.strip())
        for first in islice(filled, 1):
            _refuse_json_array(first[1], Path(name))
            yield first
        yield from filled


def _refuse_columnar(name: str, option: str) -> None:
    """Raise CpuftError if rows with nested values would have to come from another kind of file than JSON lines."""
    path, read = Path(name), ""
    if name.startswith(_HUB_PREFIX):
        arguments = {key: value for key, value in parse_hub_name(name, option, "train").items() if value}
        path, read = Path(arguments["path"].replace("/", "-")), f"load_dataset(**{arguments})"
    with suppress(OSError):  # of a file that is missing; reading it says what to do
        if is_columnar(path):
            read = f"load_from_disk({name!r})" if path.is_dir() else f"Dataset.from_parquet({name!r})"
    if read:
        target = str(path.with_name(f"{path.stem}-lines.jsonl"))
        command = f'python -c "import datasets; datasets.{read}.to_json({target!r})"'
        raise CpuftError(
            f"{name} is no file of JSON lines, which are needed here: convert it with this command, then give {target} "
            f"instead: {command}"
        )


def _read_delimited_rows(lines: Callable[[], Iterator[str]], path: Path, dialect: Dialect) -> Iterator[Row]:
    rows, columns = split_rows(lines(), dialect, path), dialect.columns
    next(rows, None)  # the header
    for line, cells in rows:
        if len(cells) != len(columns):
            separator = next(name for name, character in DELIMITERS.items() if character == dialect.delimiter)
            is_longer = dialect.is_quoted and len(cells) > len(columns)
            quotes = f"put a text that contains a {separator} in quotation marks"
            raise CpuftError(
                f"{path}, {line} has {counted(len(cells), 'column')}, but the header has {len(columns)}: "
                f"{quotes if is_longer else 'correct that line'}"
            )
        yield f"{path}, {line}", dict(zip(columns, cells))


def read_text(path: Path, option: str = "--data-dir") -> str:
    """Return the decompressed text of a file without byte order mark. Raises CpuftError: it is missing or not UTF-8."""
    return "".join(read_lines(path, option))


def read_lines(path: Path, option: str, newline: str = "", encoding: str = "", longest: int = -1) -> Iterator[str]:
    """Yield the lines of a text file, perhaps compressed with gzip, with their ends, without a byte order mark.

    `newline` is as in `open`; `encoding` is that of --encoding (auto: UTF-16 by its mark, else UTF-8), or empty (UTF-8)
    without that option. Lines of more than `longest` characters (-1: no limit) are yielded in parts. Raises CpuftError:
    the file is missing, damaged or of another format, or is no text in that encoding.
    """
    codec = "utf-8" if encoding in ("", "auto") else encoding
    try:
        if path.is_dir():
            raise CpuftError(_describe_folder(path, option))
        mark = _refuse_other_formats(path)[:2]
        if mark in _UTF_16 and encoding == "auto":
            codec = "utf-16"
        elif mark in _UTF_16 and not encoding:
            raise CpuftError(f"{path} is in UTF-16, which cpuft does not read here: {_advise_iconv('UTF-16', path)}")
        with _open_bytes(path) as file, TextIOWrapper(file, encoding=codec, newline=newline) as lines:
            for number, line in enumerate(iter(partial(lines.readline, longest), ""), start=1):
                if "\0" in line:
                    other = ", or name the file's encoding with --encoding" if encoding == "auto" else ""
                    raise CpuftError(
                        f"{path}, line {number} has a null byte, so that it is not text: give other files{other}"
                    )
                yield line.removeprefix("\ufeff") if number == 1 else line
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except _DAMAGED:
        raise CpuftError(f"{path} is cut off or damaged: copy or download it again, or check {option}") from None
    except LookupError:
        raise CpuftError(f"--encoding {encoding[:60]!r} is unknown: give for example windows-1252 or utf-16") from None
    except UnicodeError as error:
        if codec == "utf-8" and isinstance(error, UnicodeDecodeError):
            raise CpuftError(_describe_other_encoding(path, error, bool(encoding))) from None
        raise CpuftError(f"{path} is not text in {codec} ({error}): give another --encoding") from None
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): check its permissions and {option}") from None


def _open_bytes(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_compressed = file.read(2) == _GZIP
    return cast("IO[bytes]", gzip.open(path)) if is_compressed else path.open("rb")


_GZIP = b"\x1f\x8b"
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_UNPACK = "unpack it, then give the file that it holds"
_SAVE_AS_CSV = "save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead"
_SAVE_AS_PARQUET = "save it as CSV or Parquet with the program that wrote it, then give that file instead"
_OTHER_FORMATS = {
    b"PK\x03\x04": ("a spreadsheet or another zip archive", f"{_UNPACK}, or {_SAVE_AS_CSV}"),
    b"\xd0\xcf\x11\xe0": ("a spreadsheet", _SAVE_AS_CSV),
    b"BZh": ("compressed with bzip2", _UNPACK),
    b"\xfd7zXZ": ("compressed with xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", _UNPACK),
    b"\x93NUMPY": ("an array of NumPy", _SAVE_AS_PARQUET),
    b"\x89HDF": ("an HDF5 file", _SAVE_AS_PARQUET),
    b"SQLite format 3": ("a database of SQLite", _SAVE_AS_PARQUET),
    b"%PDF": ("a PDF file", "give a file of texts"),
    b"<!DOCTYPE": ("a web page", "download the file itself"),
    b"<!doctype": ("a web page", "download the file itself"),
    b"<html": ("a web page", "download the file itself"),
}


def _refuse_other_formats(path: Path) -> bytes:
    """Return the first bytes of a file. Raises CpuftError: it has a format that is not supported; says what to do."""
    with _open_bytes(path) as file:
        begin = file.read(64)
    if problem := describe_lfs_pointer(path, begin):
        raise CpuftError(problem)
    what, advice = next((found for magic, found in _OTHER_FORMATS.items() if begin.startswith(magic)), ("", ""))
    if path.suffix in (".xlsx", ".xls", ".ods"):
        what, advice = "a spreadsheet", _SAVE_AS_CSV
    if what:
        raise CpuftError(f"{path} is {what}, which cpuft does not read: {advice}")
    return begin


def _describe_folder(path: Path, option: str) -> str:
    if splits := sorted(one.parent for one in path.glob("*/state.json")):
        return f"{path} holds several splits: give one of them, for example {option} {splits[-1]}"
    return f"{path} is a folder: give a file of rows, or all files in it, for example {option} '{path}/*.csv'"


def _advise_iconv(encoding: str, path: Path) -> str:
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))}"
    return advise_conversion(path, f"-utf8{path.suffix}", command)


def _describe_other_encoding(path: Path, error: UnicodeDecodeError, has_option: bool) -> str:
    """Return the message for a file that is not UTF-8. `error` knows a part of the file only, not the line."""
    place = 1
    with _open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError as found:
                place, error = number, found
                break
    if b"\0" in error.object:
        return f"{path} is a binary file, which cpuft does not read: give CSV, TSV or JSON lines in UTF-8"
    return (
        f"{path}, line {place} is not UTF-8 text (byte 0x{error.object[error.start]:02x}): correct that line; or, if "
        f"the file comes from Windows or Excel, "
        f"{'give --encoding windows-1252' if has_option else _advise_iconv('WINDOWS-1252', path)}"
    )


def _refuse_json_array(first_line: str, path: Path) -> None:
    if first_line.lstrip().startswith("["):
        if not _JSON_BEGIN.match(first_line):
            raise CpuftError(f"{path} has a list in a line: write one object a line, {{'text': ..., 'label': ...}}")
        code = f"import json; [print(json.dumps(row)) for row in json.load(open({str(path)!r}))]"
        advice = advise_conversion(path, "-lines.jsonl", f'python -c "{code}"')
        raise CpuftError(f"{path} is a JSON array, and cpuft reads JSON lines, one object a line: {advice}")


def _refuse_json_document(lines: Callable[[], Iterator[str]], path: Path) -> None:
    filled = (line for line in lines() if line.strip())
    first, second = next(filled), next(filled, "")
    # Only a file whose first line is no whole object, or is the only one, can be such a document.
    if second and first.rstrip().endswith("}"):
        return
    _refuse_json_array(first, path)
    try:
        value = parse_json("".join((first, second, *filled)))
    except ValueError:
        return  # the message is that of the line
    if not isinstance(value, dict) or not value:
        return
    is_row = any(isinstance(one, str) for one in value.values()) or not value.keys().isdisjoint(_WORD_COLUMNS)
    if second or not is_row:
        raise CpuftError(
            f"{path} is one JSON object, and cpuft reads JSON lines, one object a line: write each row into a line of "
            f"its own, with pandas by to_json(..., orient='records', lines=True)"
        )


def parse_json_cells(line: str, where: str) -> dict[str, Cell]:
    """Parse one JSON object into cells, by column: texts, and lists of texts.

    Numbers become texts, true becomes `True`, null and, outside of a list, NaN an empty text. Objects, and lists that
    contain null, lists or objects, are left out. Raises CpuftError, which begins with `where`: the line is no JSON
    object, or has a key twice.
    """
    try:
        values = load(dict[str, Any], parse_json(line, _make_object))
        lists = {k: list(map(str, v)) for k, v in values.items() if isinstance(v, list) and _is_flat(v)}
        cells = {k: "" if v is None or v != v else str(v) for k, v in values.items() if not isinstance(v, (list, dict))}
        return {**load(dict[str, str], cells), **load(dict[str, list[str]], lists)}
    except ValueError as error:
        raise CpuftError(
            f"{where} is not a JSON object ({error}): write one object a line, {{'text': ..., 'label': ...}}"
        ) from None


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.60} is there twice")
    return made


def _is_flat(values: list[Any]) -> bool:
    return not any(value is None or isinstance(value, (list, dict)) for value in values)


def find_column(columns: Sequence[str], name: str, source: str, advice: str = "") -> int:
    """Return the index of the column `name`. CpuftError, with `advice` or names that are similar: there is none."""
    if name not in columns:
        nested = "" if source.endswith((".csv", ".tsv")) else "; objects and nested lists are no columns"
        there = f" (its columns are {list_names([*map(repr, columns)])}{nested})" if advice else ""
        raise CpuftError(
            f"{source} has no column {name!r}{there}: {advice or suggest_names(name, columns)}{hint_header(columns)}"
        )
    return columns.index(name)


_USUAL_TEXTS = ("text", "sentence", "document", "query", "question")


def choose_column(
    table: Table, wanted: str, option: str = "--text-columns", usual: Sequence[str] = _USUAL_TEXTS
) -> str:
    """Return the column of the texts: `wanted`, else the first of `usual` names (text, sentence, document, query,
    question), else the only column; `option` names it in messages. Raises CpuftError: there is no such column, or
    `wanted` names several.
    """
    if "," in wanted and wanted not in table.columns:
        raise CpuftError(f"{option} {wanted!r:.80}: name one column, as each text is taken by itself")
    if wanted:
        find_column(table.columns, wanted, table.source)
        return wanted
    known = [name for name in usual if name in table.columns]
    if not known and len(table.columns) != 1:
        raise CpuftError(
            f"{table.source} has no column {usual[0]!r} (it has {list_names(table.columns) or 'none'}): name the one "
            f"of the texts with {option}"
        )
    return known[0] if known else table.columns[0]


def split_names(text: str) -> tuple[str, ...]:
    """Return the names between commas, without spaces around them; ("a", "") for "a,", and () for ""."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def hint_header(columns: Sequence[str]) -> str:
    """Return a clause for a message, which begins with `; `, if a column's name is a number, as in a row; else ""."""
    is_row = any(name.replace(".", "", 1).isdecimal() for name in columns)
    return "; if its first line is a row, write a header such as text,label above it" if is_row else ""


def split_table(table: Table, share: float, columns: Sequence[str] = ()) -> tuple[Table, Table]:
    """Return a table without the rows for validation, and a table of these, by `choose_smallest`. Rows whose cells in
    `columns` (empty: all) are equal stay together. Raises CpuftError: fewer than two are different.
    """
    rows = ({name: cells[name] for name in columns if name in cells} if columns else cells for _, cells in table.rows)
    which = f" in {' and '.join(map(repr, columns))}" if columns else ""
    is_kept = choose_smallest(np.fromiter(map(hash_content, rows), np.uint64), share, table.source, "row", which)
    train, validation = (Rows(partial(compress, table.rows, chosen)) for chosen in (~is_kept, is_kept))
    return replace(table, rows=train), replace(table, rows=validation)


def choose_smallest(
    checksums: NDArray[np.uint64], share: float, source: str, noun: str, which: str = ""
) -> NDArray[np.bool_]:
    """Return which examples are kept for validation: those with the smallest checksums, about `share` (0 to 1) of the
    different ones, at least one and not all. So equal ones stay together, and the order has no effect. CpuftError, with
    `source`, `noun` and `which` in its message: fewer than two are different.
    """
    different = np.unique(checksums)
    if len(different) < 2:
        raise CpuftError(
            f"{source} has {counted(len(different), f'different {noun}')}{which}, too few to take some for "
            f"validation: give more {noun}s, or other {noun}s with --validation-file"
        )
    return np.asarray(checksums <= different[min(len(different) - 1, max(1, round(share * len(different)))) - 1])


def hash_content(value: Any) -> int:
    """Return a checksum of 64 bits of a value that JSON can hold; the order of keys has no effect."""
    content = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


MISSING = ("nan", "NaN", "None", "null", "NULL", "NA", "N/A", "<NA>")
"""What other programs write for a cell without a value."""


def is_blank(cell: Cell) -> bool:
    """Return whether a cell is a text that is empty, only spaces, or nan, NaN, None, null, NULL, NA, N/A or <NA>."""
    return isinstance(cell, str) and (not cell or cell.isspace() or (len(cell) < 9 and cell.strip() in MISSING))


def describe_empty(source: str) -> str:
    """Return the message that a file, `source`, has no rows."""
    return f"{source} has no rows: give a file with at least one row below its header"
