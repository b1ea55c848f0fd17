"""Measure how much of a rank's cores other programs, and other guests of the machine, take."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

_IDLE = slice(3, 5)
"""Columns `idle` and `iowait` of /proc/stat, see proc_stat(5)."""
_COLUMNS = 8
"""Up to `steal`: the time of guests, which follows, is a part of the first two."""
_LEAST_SECONDS = 1.0
"""In a shorter time, the ticks of /proc/stat, usually of 10 ms, are too coarse."""


class OtherLoad:
    """What has run on some hardware threads, beside this process, since this was made."""

    def __init__(self, cpus: Collection[int]) -> None:
        self._names = {f"cpu{number}" for number in cpus}
        self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        try:
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            lines = []
        return time.monotonic(), count_busy_ticks(lines, self._names) / os.sysconf("SC_CLK_TCK"), time.process_time()

    def measure_share(self) -> float:
        """Return the share of the threads' time that others took, 0 to 1; 0.0 in the first second, or if unknown."""
        passed, busy, own = (now - then for now, then in zip(self._read(), self._start))
        return min(max((busy - own) / (passed * len(self._names)), 0.0), 1.0) if passed > _LEAST_SECONDS else 0.0


def count_busy_ticks(lines: Collection[str], names: Collection[str]) -> int:
    """Return the ticks (usually 10 ms) that the hardware threads of these names, such as "cpu0", were busy since the
    start of the system, or that other guests had them, all together, from the lines of /proc/stat.
    """
    busy = 0
    for name, *words in (line.split() for line in lines if line.startswith("cpu")):
        if name in names:
            ticks = list(map(int, words[:_COLUMNS]))
            busy += sum(ticks) - sum(ticks[_IDLE])
    return busy
