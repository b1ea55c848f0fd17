"""CSV files and their relatives: which delimiter and which quoting a file has, and the cells of its rows."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from cpuft.config.mine import MineConfig
from cpuft.config.predict import PredictConfig
from cpuft.config.table_files import DELIMITERS
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted

TableOptions = TrainConfig | PredictConfig | MineConfig
"""Options with --delimiter, --quoting and --encoding."""
Lines = Callable[[], Iterator[str]]
"""Begins to read the lines of a file, with their line ends."""
_MANY_LINES = 10
"""Largest number of lines of a cell that nobody wonders about in a file whose other cells have line breaks, too."""
_LINES_OF_BEGIN = 1000
"""Number of lines within which header and first row end, unless a quotation mark opens a cell without an end."""
_UNQUOTED = "give --quoting none if quotation marks are a part of the texts"


@dataclass(frozen=True)
class Dialect:
    """How the cells of a file are told apart."""

    delimiter: str
    is_quoted: bool
    """Whether a quotation mark at the begin of a cell surrounds the cell."""
    columns: list[str]
    note: str = ""
    """What decided on the dialect, if the user is to know."""


def advise_conversion(path: Path, ending: str, command: str) -> str:
    """Return `convert it with this command, then give d/a-x.csv instead: CMD > d/a-x.csv` for d/a.csv and -x.csv."""
    target = str(path.with_name(f"{path.stem}{ending}"))
    return f"convert it with this command, then give {target} instead: {command} > {shlex.quote(target)}"


def choose_dialect(lines: Lines, path: Path, suffix: str, options: TableOptions) -> Dialect:
    """Return the dialect of a file: that of the options, or the one that fits the header and the quotation marks.

    The delimiter is the one that divides header and first row into the same, largest number of columns. `suffix` .tsv
    prefers tabs to commas. The quoting auto reads the whole file. Raises CpuftError: with auto, a quotation
    mark opens a cell without an end or one that seems to be several rows; or the first line is Excel's `sep=`.
    """
    csv.field_size_limit(sys.maxsize)  # the format has no limit
    if re.fullmatch("sep=.?", first := next(lines()).strip(), re.IGNORECASE):
        advice = advise_conversion(path, f"-rows{path.suffix}", f"tail -n +2 {shlex.quote(str(path))}")
        raise CpuftError(f"{path} begins with the line {first!r}, which only Excel reads: {advice}")
    usual = "\t" if suffix == ".tsv" else ","
    order = [usual, *(other for other in DELIMITERS.values() if other != usual)]
    if options.delimiter != "auto":
        order = [DELIMITERS[options.delimiter]]
    is_quoted = options.quoting != "none"
    begins = {one: _read_begin(lines, one, is_quoted) for one in order}
    delimiter = max(order, key=lambda one: _rate(*begins[one]))  # of several, the first one
    dialect = Dialect(delimiter, is_quoted, [name.strip() for name in begins[delimiter][0]])
    return _find_quoting(lines, dialect, path) if options.quoting == "auto" else dialect


def _read_begin(lines: Lines, delimiter: str, is_quoted: bool) -> list[list[str]]:
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    rows = csv.reader(islice(lines(), _LINES_OF_BEGIN), delimiter=delimiter, quoting=quoting)
    return list(islice(filter(None, rows), 2))


def _rate(header: list[str], row: Sequence[str] = ()) -> tuple[bool, int]:
    return 1 < len(header) == len(row), len(header)


def split_rows(lines: Iterator[str], dialect: Dialect, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the line in which the header and each row that is not blank end, such as `line 3`, and its cells. Raises
    CpuftError: a cell does not end.
    """
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if dialect.is_quoted else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=dialect.delimiter, quoting=quoting, strict=True)
    begin = 1
    try:
        for cells in reader:
            if cells:
                several = f" (a quotation mark in line {begin} opens it)" if reader.line_num > begin else ""
                yield f"line {reader.line_num}{several}", cells
            begin = reader.line_num + 1
    except csv.Error as error:
        raise CpuftError(_describe_open_quote(path, begin, error)) from None


def _describe_open_quote(path: Path, line: int, error: csv.Error) -> str:
    return (
        f"{path}, line {line}: a quotation mark opens a cell there and does not close it at the end of a cell "
        f"({error}): write a quotation mark within a quoted cell twice, or {_UNQUOTED}"
    )


def _find_quoting(lines: Lines, dialect: Dialect, path: Path) -> Dialect:
    """Return the dialect, without quoting if the file can only be read so.

    If all lines as they are have the header's number of columns, quotation marks that open a cell over several lines
    are most likely a part of the texts. Commas in texts stand before a space, those between columns do not.
    """
    count = len(dialect.columns) - 1
    fits, divides = True, True  # whether all lines have that many columns, and no delimiter is in a text
    surrounded, opened = 0, 0  # cells between quotation marks, and cells that only begin with one
    last = ""
    numbers: list[int] = []  # of delimiters in the lines of the present row

    def watch() -> Iterator[str]:
        nonlocal fits, divides, surrounded, opened, last
        for last in lines():
            if last.strip("\r\n"):
                numbers.append(last.count(dialect.delimiter))
                fits = fits and numbers[-1] == count
                divides = divides and (dialect.delimiter not in ",;" or f"{dialect.delimiter} " not in last)
            for cell in last.rstrip("\r\n").split(dialect.delimiter) if '"' in last else ():
                if cell.startswith('"'):
                    is_surrounded = len(cell) > 1 and cell.endswith('"')
                    surrounded, opened = surrounded + is_surrounded, opened + (not is_surrounded)
            yield last

    watched = watch()
    reader = csv.reader(watched, delimiter=dialect.delimiter, strict=True)
    begin, first, most = 1, 0, 0
    try:
        for _ in reader:
            if reader.line_num > begin:
                first = first or begin
                if count and len(numbers) > _MANY_LINES and set(numbers) == {count}:
                    raise CpuftError(_describe_doubt(path, begin, len(numbers)))
                most = most or len(numbers)
            begin = reader.line_num + 1
            numbers.clear()
    except csv.Error as error:
        is_escaped = '\\"' in last  # by a backslash, so that the quotation marks around it surround a cell
        for _ in watched:
            pass
        if not fits or is_escaped or surrounded > opened:
            raise CpuftError(_describe_open_quote(path, begin, error)) from None
        note = f"{path} read without quoting, because of the quotation mark in line {begin}"
        return Dialect(dialect.delimiter, False, dialect.columns, note)
    if first and fits and divides and count and surrounded <= opened:
        raise CpuftError(_describe_doubt(path, first, most))
    return dialect


def _describe_doubt(path: Path, line: int, count: int) -> str:
    return (
        f"{path}, line {line}: a quotation mark opens a cell of {counted(count, 'line')}, and each of these lines has "
        f"as many columns as the header: {_UNQUOTED}, or --quoting csv if they surround cells with line breaks"
    )
