"""What ranks do when their run is told to stop: a checkpoint after the same update, and the end of all of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from cpuft.rank.interruption import describe_cause, is_host_leaving, is_interrupted
from cpuft.record import InterruptedLine, Line
from cpuft.train.checkpoint.policy import Keeper
from cpuft.train.loop import KEEP, LEAVE, Loop
from cpuft.train.process_group import gather


class Stopped(Exception):
    """The run ends here, on all ranks, and may be resumed."""


def obey(loop: Loop, keeper: Keeper | None, record: Callable[[Line], None]) -> None:
    """Have a loop make checkpoints when they are due, and stop when a rank is told to; `record` keeps a line."""

    def ask() -> float:
        if is_interrupted():
            return LEAVE
        return KEEP if keeper and loop.world.rank == 0 and keeper.is_due() else 0.0

    def keep(update: int, leaving: Line | None = None) -> bool:
        if keeper:
            return keeper.keep(update, wait=leaving is not None, last=leaving)
        loop.exchange.contribute_to_checkpoint()
        return False

    def rest(update: int, leaves: bool) -> None:
        if leaves:
            _leave(InterruptedLine(update, loop.updates, *_find_cause()), keep, record)
        else:
            keep(update)

    loop.asks, loop.rest = ask, rest


def _find_cause() -> tuple[str, tuple[int, ...]]:
    """Who told whom, and the ranks whose hosts are about to go."""
    told: list[tuple[str, bool]] = gather(_own_cause())
    leaving = tuple(rank for rank, (_, is_so) in enumerate(told) if is_so)
    return next(cause for cause, _ in told if cause), leaving


def _own_cause() -> tuple[str, bool]:
    return (describe_cause(os.environ), is_host_leaving(os.environ)) if is_interrupted() else ("", False)


def _leave(line: InterruptedLine, keep: Callable[[int, Line], bool], record: Callable[[Line], None]) -> None:
    """Raises Stopped when a checkpoint is on a disk; where none took it, training goes on, as had been said."""
    if any(gather(keep(line.step, line))):
        record(line)
        dist.barrier()  # the first rank that ends makes mpirun end the others
        raise Stopped
