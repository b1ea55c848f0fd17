"""Standard streams, and tables of aligned text."""

from __future__ import annotations

import codecs
import errno
import io
import math
import os
import select
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from cpuft.errors import CpuftError, escape_controls

_READER_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
"""Errors of a write when the reader of a pipe, a terminal or a socket is gone, so that nobody misses the output."""


_PLAIN = "cpuft.plain"


def _write_plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace the lines of tables by hyphens where the encoding lacks them, as Windows' does, and escape the rest."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return ("-" * len(text), error.end) if {*text} == {"\u2500"} else codecs.backslashreplace_errors(error)


codecs.register_error(_PLAIN, _write_plainly)


class _ProtectedFile(io.FileIO):
    """An output descriptor whose writes never fail: after an error it is /dev/null, also for child processes."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:
                # Another process that shares the pipe, such as ssh, may have made it non-blocking.
                select.select([], [self], [])
        except OSError as error:
            self.lost = error
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            return len(data)
        return count


def protect_streams() -> None:
    """Replace standard output and error by streams whose writes never fail; `check_stdout` tells about errors. Call
    this before any file is opened: if a standard stream is closed, the next file would get its number and its output.
    Streams that are not the interpreter's own any more, as under pytest, stay as they are.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _make_protected(sys.stdout, 1) if sys.stdout is sys.__stdout__ else sys.stdout
    sys.stderr = _make_protected(sys.stderr, 2) if sys.stderr is sys.__stderr__ else sys.stderr


def _make_protected(stream: TextIO | None, number: int) -> TextIO:
    if stream and sys.platform == "win32" and stream.isatty():
        return stream  # a console shows Unicode, but takes bytes for those of an old encoding
    # A locale may lack a character of a message, which must not end a run.
    return io.TextIOWrapper(
        io.BufferedWriter(_ProtectedFile(number, "w", closefd=False)),
        encoding=stream.encoding if stream else "utf-8",
        errors=_PLAIN,
        line_buffering=number == 2 or os.isatty(number) or getattr(stream, "write_through", False),
    )


def check_stdout() -> None:
    """Flush standard output, and raise CpuftError if a write to it has failed; not if its reader was gone."""
    sys.stdout.flush()
    lost = getattr(getattr(sys.stdout.buffer, "raw", None), "lost", None)
    if lost and lost.errno not in _READER_GONE:
        raise CpuftError(f"standard output could not be written ({lost.strerror}): make room on the disk it goes to")


def print_message(line: str) -> None:
    """Print "cpuft: LINE" on standard error at once."""
    print(f"cpuft: {line}", file=sys.stderr, flush=True)


DEAD_PEER_SECONDS = 7.0
"""How long a host may be silent, unless `detect_dead_peer` is told otherwise."""


def detect_dead_peer(connection: socket.socket, seconds: float = DEAD_PEER_SECONDS) -> None:
    """Make the kernel end a TCP connection `seconds` after the other host is gone (tcp(7)); reads then raise an
    OSError. `seconds` is rounded up to a multiple of 7: the kernel sends the first of four probes after three sevenths.
    """
    interval = math.ceil(seconds / 7)
    limits = (("KEEPIDLE", 3 * interval), ("KEEPINTVL", interval), ("KEEPCNT", 4), ("USER_TIMEOUT", 7000 * interval))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in limits:
        if option := getattr(socket, f"TCP_{name}", 0):  # Linux has them all
            with suppress(OSError):  # Windows, before 2017
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


WIDTH = 120
"""Characters per line of tables and notes, unless a table needs more."""


def format_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    notes: Sequence[str] = (),
    left: int = 0,
    width: int = 0,
) -> str:
    """Return a table as text that ends with a newline: the title, the headings, a rule, the rows and the notes.

    The first `left` columns are aligned to the left, as texts; the others to the right, as numbers. Lines have at most
    120 characters, 16 per column or `width`, whichever is most; cells are cut off to fit. The title stays as it is;
    each note begins with "* " and is wrapped.
    """
    from rich import box  # imports many modules, and most commands print no table
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(escape_controls(column, kept="\n"), justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape_controls, row))  # a record or a journal may hold anything
    file = io.StringIO()
    # Wide enough for any number of columns: a log has no width, and a terminal wraps by itself. With FORCE_COLOR and
    # TERM=dumb, rich would use 80 columns whatever the width is.
    width = max(WIDTH, 16 * len(columns), width)
    console = Console(file=file, width=width, color_system=None, legacy_windows=False, force_terminal=False)
    console.print(table, markup=False, highlight=False)
    for note in notes:
        console.print(f"* {escape_controls(note)}", markup=False, highlight=False, width=WIDTH)
    # The box begins with an empty line.
    lines = ([escape_controls(title, kept="\n")] if title else []) + file.getvalue().rstrip().splitlines()[
        0 if title else 1 :
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows (at least one) as lines: first column to the left, others to the right, two spaces between them."""
    first, *widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([f"{row[0]:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths))]).rstrip()
        for row in rows
    ]
