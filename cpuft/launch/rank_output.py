"""The output of rank 0, as the terminal shows it while a run is active."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from cpuft.launch.failures import is_for_users
from cpuft.rank.process import MARKS

_HIDDEN = (*MARKS, "|CCL_WARN| value of CCL_LOG_LEVEL changed")
"""Lines of rank 0 that the terminal does not show: marks for the launcher, and oneCCL's warning about our setting."""

_make_decoder = partial(codecs.getincrementaldecoder("utf-8"), errors="replace")


@dataclass
class LogTail:
    """Copies what is appended to a log to a stream, except lines that are not for users and the ranks' marks."""

    path: Path
    stream: IO[str]
    position: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=_make_decoder)
    """Keeps the first bytes of a character whose others are not written yet."""

    def copy(self) -> None:
        """Copy what was appended since the last call; nothing if there is no such file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
        except FileNotFoundError:
            return
        self.position += len(new)
        if new:
            lines = self.decoder.decode(new).splitlines(keepends=True)
            shown = (line for line in lines if is_for_users(line) and not any(mark in line for mark in _HIDDEN))
            self.stream.write("".join(shown))
            self.stream.flush()
