"""When checkpoints are written, and how a run stops."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.rank.interruption import describe_cause, is_host_leaving, is_interrupted
from cpuft.rank.world import World
from cpuft.record import InterruptedLine
from cpuft.train.checkpoint.files import (
    BEST,
    RECORD,
)
from cpuft.train.checkpoint.resume import find_newest_checkpoint
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.writer import CheckpointWriter, wait_for_disks
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


@dataclass(frozen=True)
class Requests:
    """What ranks request of all ranks after an update."""

    checkpoint: bool = False
    """Write a checkpoint. Only rank 0 requests this."""
    stop: bool = False
    """Write a checkpoint and end the run. Any rank may request this."""

    @property
    def any(self) -> bool:
        """Whether a checkpoint or a stop is requested."""
        return self.checkpoint or self.stop

    def encode(self) -> float:
        """Return a rank's number in the sum over ranks: 2 for a stop, otherwise 1 for a checkpoint, otherwise 0."""
        return 2.0 if self.stop else float(self.checkpoint)

    @classmethod
    def decode(cls, total: float) -> Requests:
        """Return what all ranks requested, from their numbers' sum: 1 is only a checkpoint, 2 or more only a stop."""
        return cls(checkpoint=total == 1.0, stop=total >= 2.0)


class TrainingInterrupted(Exception):
    """The run ends early on all ranks, after a checkpoint from which it can be resumed."""

    def __init__(self, line: InterruptedLine) -> None:
        super().__init__(f"interrupted after update {line.step}")
        self.line = line


class Checkpoints:
    """What the training loop knows of checkpoints and of stopping; every rank has one.

    Ranks without a `writer` contribute to the checkpoints of others. Without `enabled`, a run is not interrupted and
    has no checkpoints. `restore_best` needs `state` and `root`, `write_final` needs `keep_final`.
    """

    def __init__(
        self,
        exchange: Exchange,
        writer: CheckpointWriter | None = None,
        enabled: bool = False,
        keep_final: bool = False,
        state: TrainingState | None = None,
        root: Path = Path(),
    ) -> None:
        self.writer = writer
        self._state, self._root = state, root
        self._exchange, self._enabled, self._keep_final = exchange, enabled, enabled and keep_final

    def _write(self, update: int, **options: Any) -> bool:
        """Write this rank's checkpoint, as `CheckpointWriter.write` does, or contribute to those of other ranks."""
        if self.writer:
            return self.writer.write(update, **options)
        self._exchange.contribute_to_checkpoint()
        return False

    def find_requests(self) -> Requests:
        """Return a stop if this rank was told to stop, else on rank 0 a checkpoint if due; nothing unless `enabled`."""
        if not self._enabled:
            return Requests()
        if is_interrupted():
            return Requests(stop=True)
        return Requests(checkpoint=self.writer is not None and self.writer.rank == 0 and is_due(self.writer))

    def write(self, update: int, is_best: bool = False) -> None:
        """Begin to write a checkpoint after an update; each rank writes one or contributes to others'. Collective.

        It returns when the state is copied; a thread writes the copy. A writer whose previous checkpoint is not on the
        disk yet writes none or, with `is_best`, waits for it. A full disk is a warning, not an exception.
        """
        self._write(update, skip_if_busy=not is_best, is_best=is_best)

    def restore_best(self, update: int, world: World) -> bool:
        """Restore the weights of the best evaluation, made after this update, into the model on all ranks. Collective.

        Returns False, and leaves the model as it is, if no host has these weights, or without `state`. Raises
        CpuftError on all ranks alike if there are checkpoints of best evaluations, and all are damaged.
        """
        if self._state is None:
            return False
        with wait_for_disks():
            if self.writer:
                self.writer.finish()
        newest, read = find_newest_checkpoint(self._root / BEST, world, RECORD)
        if newest.update == update:
            self._state.restore(read())
        return newest.update == update

    def write_and_stop(self, update: int, updates: int) -> None:
        """Write a checkpoint after an update, wait for the disk, raise TrainingInterrupted on all ranks. Collective.

        At least one rank must have been told to stop. It returns only if no rank could write its checkpoint, as on a
        full disk. `updates` are the whole run's.
        """
        causes: list[tuple[str, bool]] = gather(
            (describe_cause(os.environ), is_host_leaving(os.environ)) if is_interrupted() else ("", False)
        )
        leaving = tuple(rank for rank, (_, is_so) in enumerate(causes) if is_so)
        line = InterruptedLine(update, updates, next(cause for cause, _ in causes if cause), leaving)
        with wait_for_disks():
            written = self._write(update, wait=True, last_line=line)
        if any(gather(written)):
            raise TrainingInterrupted(line)

    def write_final(self, updates: int) -> None:
        """Begin to write a checkpoint after the last update, if `enabled` and `keep_final` are set. Collective.

        If the first host is lost before the launcher has fetched the results, the run is evaluated and saved again
        from the checkpoint. With one host, `keep_final` is False: the checkpoint would be lost as well.
        """
        if self._keep_final:
            self._write(updates)
