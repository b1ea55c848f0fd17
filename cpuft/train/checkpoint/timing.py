"""When checkpoints are written, and how a run stops."""

from __future__ import annotations

import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

from cpuft.rank.interruption import describe_cause, is_host_leaving, is_interrupted
from cpuft.rank.world import World
from cpuft.record import InterruptedLine
from cpuft.train.checkpoint.folders import BEST, RECORD
from cpuft.train.checkpoint.resume import find_newest_checkpoint
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.writer_thread import CheckpointWriter, wait_for_disks
from cpuft.train.exchange.base import Exchange
from cpuft.train.ranks import gather

DEFAULT_TIME_SHARE = 0.02
"""Share of a run's time that checkpoints may cost if `--checkpoint-every` is not given."""


def is_due(writer: CheckpointWriter) -> bool:
    """Return whether it is time for a writer's next checkpoint; never while the last one is being written.

    `writer.every` is the time between two in seconds; below 0, they may cost DEFAULT_TIME_SHARE of the time; inf: none
    is ever due.
    """
    every = writer.every if writer.every >= 0 else writer.cost / DEFAULT_TIME_SHARE
    return time.monotonic() - writer.begun >= every and not writer.is_writing


class Request(IntEnum):
    """What ranks request of all ranks after an update. The sum of all ranks' numbers is 1 only for a checkpoint."""

    NOTHING = 0
    CHECKPOINT = 1
    """Write a checkpoint. Only rank 0 requests this."""
    STOP = 2
    """Write a checkpoint and end the run. Any rank may request this."""

    @classmethod
    def merge(cls, total: float) -> Request:
        """Return what all ranks requested, from the sum of their numbers: 0 nothing, 1 a checkpoint, else a stop."""
        return cls(min(int(total), cls.STOP))


class TrainingInterrupted(Exception):
    """The run ends early on all ranks, after a checkpoint from which it can be resumed."""

    def __init__(self, line: InterruptedLine) -> None:
        super().__init__(f"interrupted after update {line.step}")
        self.line = line


class Checkpoints:
    """What the training loop knows of checkpoints and of stopping; every rank has one.

    Ranks without a `writer` contribute to the checkpoints of others. Without `state`, a run is not interrupted and has
    no checkpoints. `restore_best` needs `root`, `write_final` needs `keep_final`.
    """

    def __init__(
        self,
        exchange: Exchange,
        writer: CheckpointWriter | None = None,
        state: TrainingState | None = None,
        root: Path = Path(),
        keep_final: bool = False,
    ) -> None:
        self.writer = writer
        self._exchange, self._state, self._root, self._keep_final = exchange, state, root, keep_final

    def finish(self) -> None:
        """Wait until no rank writes a checkpoint any more, also longer than --comm-timeout. Collective."""
        with wait_for_disks():
            if self.writer:
                self.writer.finish()

    def _write(self, update: int, **options: Any) -> bool:
        """Write this rank's checkpoint, or contribute to others': also while its previous one is being written."""
        if self.writer and not self.writer.is_writing:
            return self.writer.write(update, **options)
        self._exchange.contribute_to_checkpoint()
        return False

    def find_request(self) -> Request:
        """Return a stop if this rank was told to stop, else on rank 0 a checkpoint if due; nothing without `state`."""
        if self._state is None:
            return Request.NOTHING
        if is_interrupted():
            return Request.STOP
        is_asked = self.writer is not None and self.writer.rank == 0 and is_due(self.writer)
        return Request.CHECKPOINT if is_asked else Request.NOTHING

    def write(self, update: int, is_best: bool = False) -> None:
        """Begin to write a checkpoint after an update; each rank writes one or contributes to others'. Collective.

        It returns when the state is copied; a thread writes the copy. A writer whose previous checkpoint is not on the
        disk yet writes none; with `is_best`, all ranks wait for it. A full disk is a warning, not an exception.
        """
        if is_best:
            self.finish()
        self._write(update, is_best=is_best)

    def restore_best(self, update: int, world: World) -> bool:
        """Restore the weights of the best evaluation, made after this update, into the model on all ranks. Collective.

        Returns False, and leaves the model as it is, if no host has these weights, or without `state`. Raises
        CpuftError on all ranks alike if there are checkpoints of best evaluations, and all are damaged.
        """
        if self._state is None:
            return False
        self.finish()
        newest, read = find_newest_checkpoint(self._root / BEST, world, RECORD)
        if newest.update == update:
            self._state.restore(read())
        return newest.update == update

    def write_and_stop(self, update: int, updates: int) -> None:
        """Write a checkpoint after an update, wait for the disk, raise TrainingInterrupted on all ranks. Collective.

        At least one rank must have been told to stop. It returns only if no rank could write its checkpoint, as on a
        full disk. `updates` are the whole run's.
        """
        own = (describe_cause(os.environ), is_host_leaving(os.environ)) if is_interrupted() else ("", False)
        causes: list[tuple[str, bool]] = gather(own)
        leaving = tuple(rank for rank, (_, is_so) in enumerate(causes) if is_so)
        line = InterruptedLine(update, updates, next(cause for cause, _ in causes if cause), leaving)
        self.finish()
        with wait_for_disks():
            written = self._write(update, wait=True, last_line=line)
        if any(gather(written)):
            raise TrainingInterrupted(line)

    def write_final(self, update: int) -> None:
        """Wait for the previous checkpoint, and begin to write one after `update`, the run's last one, if `keep_final`
        is set. Collective.

        If the first host is lost before the launcher has fetched the results, the run is evaluated and saved again from
        the checkpoint. With one host, `keep_final` is False: the checkpoint would be lost as well.
        """
        if self._keep_final:
            self.finish()
            self._write(update)
