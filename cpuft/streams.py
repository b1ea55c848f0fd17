"""Standard streams that a run outlives: closed from the start, their reader gone, or their disk full; and connections
that end when their other end has gone."""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import sys
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
