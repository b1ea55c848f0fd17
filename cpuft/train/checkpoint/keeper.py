"""Writes checkpoints while a run goes on: a copy in the pause between two updates, and a thread for the disk."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cpuft.record import Line, RecordedRank, StepLine, format_line
from cpuft.train.checkpoint.files import RECORD, STATE, note_update, to_view, write_checkpoint
from cpuft.train.checkpoint.state import State

SHARE = 0.02
"""Of a run's time that checkpoints may cost, where their interval is not asked for."""
_GUESSED_BYTES_PER_SECOND = 150e6
"""Copied, hashed and written, before it is measured."""


def find_keepers(ranks: list[RecordedRank]) -> list[int]:
    """Ranks that keep checkpoints: the first, and the first on a second host, so that either host may be lost."""
    others = [rank.rank for rank in ranks if rank.host != ranks[0].host]
    return [0, *others[:1]]


class Keeper:
    """Keeps a rank's checkpoints in a folder, and the record up to each."""

    def __init__(
        self, state: State, root: Path, rank: int, every: float, stand_by: Callable[[], None] = lambda: None
    ) -> None:
        """`every`: seconds between two; below 0, so many that they cost `SHARE` of the time; inf: none by itself.

        `stand_by`: gives other keepers what their snapshot needs of this rank, where this one takes none.
        """
        self._stand_by = stand_by
        self._state, self._root, self._rank, self._every = state, root, rank, every
        self.record: list[str] = []
        """Lines so far: what a checkpoint has of the record."""
        self.cost = state.nbytes / _GUESSED_BYTES_PER_SECOND
        """Seconds of a core that the last one took."""
        self._block = torch.empty(0 if math.isinf(every) else state.nbytes, dtype=torch.uint8)
        self._told = self._kept = False
        self._last = time.monotonic()
        # Touching fresh memory takes longer than copying into it, and the first steps need not wait for that.
        self._thread = threading.Thread(target=self._block.zero_, daemon=True)
        self._thread.start()

    def begin(self, record: list[str], update: int) -> None:
        """Go on after an update, with the record up to there."""
        self.record += record
        self._note_update(update)

    def note(self, line: Line) -> None:
        """Remember a line of the record."""
        self.record.append(format_line(line))
        if isinstance(line, StepLine):
            self._note_update(line.step)

    def _note_update(self, update: int) -> None:
        if self._rank:  # the first rank writes the record itself
            note_update(self._root, update, self._rank)

    def is_due(self) -> bool:
        """Whether it is time for the next one, and the last one is written."""
        every = self._every if self._every >= 0 else self.cost / SHARE
        return time.monotonic() - self._last >= every and not self._thread.is_alive()

    def keep(self, update: int, wait: bool = False, last: Line | None = None, skip_if_busy: bool | None = None) -> bool:
        """Make a checkpoint after an update.

        Parameters
        ----------
        wait: return only when the checkpoint is written.
        last: the last line of the record in the checkpoint.
        skip_if_busy: make no checkpoint while the one before is being written (default: unless `wait` is set).

        Returns
        -------
        Whether the checkpoint is on the disk; False without `wait`.
        """
        if self._thread.is_alive() and (not wait if skip_if_busy is None else skip_if_busy):
            self._stand_by()
            return False
        self._thread.join()
        start = self._last = time.monotonic()
        self._block = self._block if len(self._block) else torch.empty(self._state.nbytes, dtype=torch.uint8)
        self._state.snapshot(self._block)
        paused = time.monotonic() - start
        record = [*self.record, *([format_line(last)] if last else [])]
        self._thread = threading.Thread(target=self._write, args=(update, record, paused), daemon=True)
        self._thread.start()
        if wait:
            self._thread.join()
        return wait and self._kept

    def end(self) -> None:
        """Wait for what is being written."""
        self._thread.join()

    def _write(self, update: int, record: list[str], paused: float) -> None:
        files = {STATE: self._block.numpy().data, RECORD: to_view(record)}
        self._kept = False
        try:
            self._check_room()
            write_checkpoint(self._root, update, self._rank, files)
            self._kept = True
        except OSError as error:
            if not self._told:
                said = f"checkpoint of update {update} cannot be written to {self._root} ({error.strerror})"
                print(f"{said}: training goes on, and the last good one stays", file=sys.stderr, flush=True)
            self._told = True
        self.cost = paused + time.thread_time()

    def _check_room(self) -> None:
        """Raises OSError when no room would be left for the model at the end."""
        self._root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self._root).free < 2 * self._state.nbytes:
            raise OSError(28, "No space left on device")
