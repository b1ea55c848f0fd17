"""Standard streams, and tables of aligned text."""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from cpuft.errors import CpuftError

_READER_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
"""A pipe's reader, a terminal or a socket's other end has gone: nobody misses what they would have read."""


class _Lasting(io.FileIO):
    """A descriptor that takes everything: once it cannot be written it is /dev/null, for our children too."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:
                # Whoever shares the pipe (ssh, for one) may have made it non-blocking.
                select.select([], [self], [])
        except OSError as error:
            self.lost = error
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            return len(data)
        return count


def keep_streams() -> None:
    """Make writing to standard output and error never fail, unless somebody has put a stream of their own there.

    To be called before any file is opened: that would get the number of a stream that was closed, and take what is
    meant for the stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _make_lasting(sys.stdout, 1) if sys.stdout is sys.__stdout__ else sys.stdout
    sys.stderr = _make_lasting(sys.stderr, 2) if sys.stderr is sys.__stderr__ else sys.stderr


def _make_lasting(stream: TextIO | None, number: int) -> io.TextIOWrapper:
    # Not every character can be written in every locale; what is said must not end a run for that.
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, "w", closefd=False)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=number == 2 or os.isatty(number) or getattr(stream, "write_through", False),
    )


def check_output() -> None:
    """Raises CpuftError when what was said on standard output was lost, and not because its reader had gone."""
    sys.stdout.flush()
    lost = getattr(getattr(sys.stdout.buffer, "raw", None), "lost", None)
    if lost and lost.errno not in _READER_GONE:
        raise CpuftError(f"standard output could not be written ({lost.strerror}): make room where it goes")


def notice_silence(connection: socket.socket) -> None:
    """Have the kernel end it 7 s after the other host was cut off; the last option is for data on its way (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 7000)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


WIDTH = 120


def format_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    notes: Sequence[str] = (),
    left: int = 0,
    width: int = 0,
) -> str:
    """A table, then its notes. The first `left` columns are texts, the others are aligned to the right as numbers."""
    from rich import box  # imports a good deal, and most commands print no table
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    # Wide enough for any number of columns: a log has no width, and a terminal wraps by itself. What rich is told to
    # take for a terminal (FORCE_COLOR), and finds dumb, it gives 80 columns whatever is asked for.
    width = max(WIDTH, 16 * len(columns), width)
    console = Console(file=file, width=width, color_system=None, legacy_windows=False, force_terminal=False)
    console.print(table, markup=False, highlight=False)
    for note in notes:
        console.print(f"* {note}", markup=False, highlight=False, width=WIDTH)
    # rich's box begins with an empty line.
    lines = ([title] if title else []) + file.getvalue().rstrip().splitlines()[0 if title else 1 :]
    return "\n".join(line.rstrip() for line in lines) + "\n"
