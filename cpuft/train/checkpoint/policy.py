"""When checkpoints are written and by which ranks, how a run stops, and how it resumes from the newest checkpoint."""

from __future__ import annotations

import errno
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft.config.train import CHANGEABLE_ON_RESUME
from cpuft.errors import CpuftError
from cpuft.rank.interruption import describe_cause, is_host_leaving, is_interrupted
from cpuft.rank.world import World
from cpuft.record import InterruptedLine, Line, Record, StepLine, format_line, parse_record
from cpuft.train.checkpoint.files import (
    BEST,
    RECORD,
    STATE,
    keep_best,
    note_update,
    read_newest,
    remove_after,
    to_view,
    write_checkpoint,
)
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.exchange.base import Exchange
from cpuft.train.ranks import gather

DEFAULT_TIME_SHARE = 0.02
"""Share of a run's time that checkpoints may cost if `--checkpoint-every` is not given."""
_ASSUMED_BYTES_PER_SECOND = 150e6
"""Speed at which a checkpoint is copied, hashed and written, until the first one was measured."""
_HOST_OPTIONS = ("model", "from_config", "tokenizer", "data_dir", "train_file", "validation_file", "precision")
"""Options that may differ on other hosts: their paths differ, and not all hosts have bf16. A checkpoint knows its
examples by their checksum, and its weights are fp32."""
_BROADCAST_BYTES = 1 << 26
_DISK_DAYS = 1
"""How long ranks wait for a rank that writes to a slow disk."""


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
        """Return the number that a rank contributes to the sum over ranks: 2 for a stop, 1 for a checkpoint, else 0."""
        return 2.0 if self.stop else float(self.checkpoint)

    @classmethod
    def decode(cls, total: float) -> Requests:
        """Return what ranks have requested together, from the sum of their numbers; `stop` excludes `checkpoint`."""
        return cls(checkpoint=total == 1.0, stop=total >= 2.0)


class TrainingInterrupted(Exception):
    """The run ends early on all ranks, after a checkpoint from which it can be resumed."""

    def __init__(self, line: InterruptedLine) -> None:
        super().__init__(f"interrupted after update {line.step}")
        self.line = line


class Checkpoints:
    """What the training loop knows of checkpoints and of stopping; every rank has one.

    Ranks without a writer contribute to the checkpoints of others, if the run has any (`enabled`): that of
    `Checkpoints(exchange)` has none, and does not stop early. With `state`, what checkpoints hold, `restore_best` is
    possible; with `keep_final`, `write_final` writes one.
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
        """Return what this rank requests after an update: a stop if it was told so; on rank 0, a checkpoint if due."""
        if not self._enabled:
            return Requests()
        if is_interrupted():
            return Requests(stop=True)
        return Requests(checkpoint=self.writer is not None and self.writer.rank == 0 and self.writer.is_due())

    def write(self, update: int, is_best: bool = False) -> None:
        """Begin to write a checkpoint after an update; each rank writes one or contributes to others'. Collective.

        It returns when the state is copied; a thread writes the copy. A writer whose previous checkpoint is not on the
        disk yet writes none or, with `is_best`, waits for it. A full disk is a warning, not an exception.
        """
        self._write(update, skip_if_busy=not is_best, is_best=is_best)

    def restore_best(self, update: int, world: World) -> bool:
        """Restore the weights of the best evaluation, made after this update, into the model on all ranks. Collective.

        Returns False, and leaves the model as it is, if no host has them. Raises CpuftError on all ranks alike if all
        checkpoints of best evaluations are damaged.
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
        """Begin to write a checkpoint after the last update, if `keep_final` is set. Collective.

        If the first host is lost before the launcher has fetched the results, the run is evaluated and saved again
        from it. A run on one host writes none: it would be lost as well.
        """
        if self._keep_final:
            self._write(updates)


@contextmanager
def wait_for_disks() -> Iterator[None]:
    """Let each rank wait at the context's end for all ranks, also longer than --comm-timeout. Collective."""
    # The group is made before any rank writes, because torch waits for all ranks in the default group, too.
    has_others = dist.is_initialized() and dist.get_world_size() > 1
    group = dist.new_group(timeout=timedelta(days=_DISK_DAYS)) if has_others else None
    yield
    if group:
        dist.barrier(group)


def choose_writer_ranks(local_ranks: Sequence[int]) -> list[int]:
    """Return the ranks that write checkpoints: rank 0 and, with several hosts, the first rank of the next host."""
    # Hosts are not told by their names, which may be equal.
    return [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0][:2]


class CheckpointWriter:
    """Writes a rank's checkpoints: copies the state between two updates, and writes it and the record on a thread."""

    def __init__(
        self,
        state: TrainingState,
        root: Path,
        rank: int,
        every: float,
        contribute: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to allocate the memory of the copy on a thread.

        `every`: seconds between two checkpoints; below 0, they may cost DEFAULT_TIME_SHARE of the time. `contribute`
        takes part in the snapshots of other writers and is called if this rank makes none.
        """
        self.rank = rank
        self.record: list[str] = []
        self.cost = state.nbytes / _ASSUMED_BYTES_PER_SECOND
        """Seconds that the last checkpoint cost: the pause of training and the thread's CPU time; first an estimate."""
        self._contribute = contribute
        self._state, self._root, self._every = state, root, every
        self._block = torch.empty(0 if math.isinf(every) else state.nbytes, dtype=torch.uint8)
        self._has_warned = self._is_written = False
        self._last = time.monotonic()
        # Touching fresh memory takes longer than copying into it. The thread spares the first checkpoint that time.
        self._thread = threading.Thread(target=self._block.zero_, daemon=True)
        self._thread.start()

    def begin(self, record: list[str], update: int) -> None:
        """Add the record's lines up to an update, after which training begins (0: a new run), and note that update."""
        self.record += record
        self._note_update(update)

    def add_line(self, line: Line) -> None:
        """Add a line to the record that checkpoints hold, and note its update if it has one."""
        self.record.append(format_line(line))
        if isinstance(line, StepLine):
            self._note_update(line.step)

    def _note_update(self, update: int) -> None:
        if self.rank:  # rank 0 writes the record itself, which has its updates
            note_update(self._root, update, self.rank)

    def is_due(self) -> bool:
        """Return whether it is time for the next checkpoint; never while the last one is being written."""
        every = self._every if self._every >= 0 else self.cost / DEFAULT_TIME_SHARE
        return time.monotonic() - self._last >= every and not self._thread.is_alive()

    def write(
        self,
        update: int,
        wait: bool = False,
        last_line: Line | None = None,
        skip_if_busy: bool = False,
        is_best: bool = False,
    ) -> bool:
        """Copy the state, and write it with the record as the checkpoint of an update, on a thread.

        With an exchange that shards the optimizer this is collective. A disk that does not take the checkpoint, or has
        less than twice its size free, is one warning per run. A writer whose previous checkpoint is still being written
        waits for it or, with `skip_if_busy`, only contributes to those of other ranks. `last_line` ends the record in
        this checkpoint. Returns whether it is on the disk, always False without `wait`.
        """
        if skip_if_busy and self._thread.is_alive():
            self._contribute()
            return False
        self._thread.join()
        self._last = time.monotonic()
        self._block = self._block if len(self._block) else torch.empty(self._state.nbytes, dtype=torch.uint8)
        self._state.snapshot(self._block)
        record = [*self.record, *([format_line(last_line)] if last_line else [])]
        arguments = (update, record, time.monotonic() - self._last, is_best)
        self._thread = threading.Thread(target=self._write_to_disk, args=arguments, daemon=True)
        self._thread.start()
        if wait:
            self._thread.join()
        return wait and self._is_written

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is on the disk or has failed."""
        self._thread.join()

    def _write_to_disk(self, update: int, record: list[str], paused: float, is_best: bool) -> None:
        files = {STATE: self._block.numpy().data, RECORD: to_view(record)}
        self._is_written = False
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            # The model that is saved at the end needs space, too.
            if shutil.disk_usage(self._root).free < 2 * self._state.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            path = write_checkpoint(self._root, update, self.rank, files)
            self._is_written = True
            if is_best:
                keep_best(path)
        except OSError as error:
            if not self._has_warned:
                problem = f"checkpoint of update {update} cannot be written to {self._root} ({error.strerror})"
                print(f"{problem}: training goes on, and the last good one stays", file=sys.stderr, flush=True)
            self._has_warned = True
        self.cost = paused + time.thread_time()


@dataclass(frozen=True)
class ResumePoint:
    """Where a run continues: the number of updates that are done, and the record up to there as text and parsed."""

    update: int = 0
    text: str = ""
    record: Record | None = field(default=None, compare=False)


@dataclass(frozen=True)
class HostCheckpoint:
    """The newest checkpoint of a host, without its state; update -1 if its sender has read none."""

    host: str
    update: int
    damaged: list[str]
    """A message for each newer checkpoint that is damaged."""
    header: bytes
    """The first bytes of the state, as many as were asked for."""
    text: str
    """The file beside the state, RECORD or VALUES."""
    nbytes: int


def find_newest_checkpoint(
    root: Path, world: World, text: str, header: int = 0
) -> tuple[HostCheckpoint, Callable[[], torch.Tensor]]:
    """Find the newest whole checkpoint in `root` on any host. Collective: the first rank of each host reads `root`.

    Returns on all ranks the checkpoint, with `text`, RECORD or VALUES, and the first `header` bytes of its state
    (update -1: there is none); and a collective function that returns the state, uint8, (nbytes,). Rank 0 prints a line
    for each newer checkpoint that is damaged. Raises CpuftError on all ranks: all are damaged.
    """
    update, files, damaged = read_newest(root) if world.local_rank == 0 else (-1, {}, [])
    content, decoded = files.get(STATE, bytearray()), files.get(text, bytearray()).decode(errors="replace")
    own = HostCheckpoint(socket.gethostname(), update, damaged, bytes(content[:header]), decoded, len(content))
    everyone: list[HostCheckpoint] = gather(own)
    for one in everyone if world.rank == 0 else ():
        for message in one.damaged:
            print(f"{message} ({one.host})", file=sys.stderr, flush=True)
    newest = max(everyone, key=lambda one: one.update)  # of equal ones, that of the lowest rank
    if newest.update < 0 and any(one.damaged for one in everyone):
        raise CpuftError(
            f"no checkpoint in {root} is undamaged: restore one from a copy, or start a new run without --resume"
        )
    return newest, lambda: _broadcast(content, newest.nbytes, everyone.index(newest), world.rank)


def resume(state: TrainingState, root: Path, world: World, options: Mapping[str, Any], data: str) -> ResumePoint:
    """Restore the newest whole checkpoint in `root` on any host into model and optimizer, if there is one. Collective.

    Removes newer checkpoints, which are damaged. Raises CpuftError on all ranks: `find_difference` finds one, or all
    checkpoints are damaged.
    """
    newest, read = find_newest_checkpoint(root, world, RECORD, len(state.header))
    record = None
    if newest.update >= 0:
        record = parse_record(newest.text, f"checkpoint of update {newest.update} on {newest.host}")
        if problem := find_difference(record, newest.header == state.header, options, data):
            raise CpuftError(f"{record.path} {problem}")
        state.restore(read())
    if world.local_rank == 0:
        remove_after(root, newest.update)
        remove_after(root / BEST, newest.update)
    return ResumePoint(max(0, newest.update), newest.text, record)


def find_difference(record: Record, same_tensors: bool, options: Mapping[str, Any], data: str) -> str:
    """Return, as the end of a sentence about the checkpoint, how its job differs from this one, and what to do; "" if
    it does not. `same_tensors`: whether the headers of the states are the same; `data`: the checksum of the examples.
    """
    then = record.header.options
    for name, value in options.items():
        if name not in (*_HOST_OPTIONS, *CHANGEABLE_ON_RESUME) and then.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            return f"is of another job, with {flag} {then[name]}, and this is {value}: start a new run without --resume"
    if record.header.data != data:
        return "was trained on other examples: restore the data as it was, or start a new run without --resume"
    if not same_tensors:
        return "is of another model: see whether it was copied from another run, or start a new run without --resume"
    return ""


def _broadcast(content: bytearray, nbytes: int, root: int, rank: int) -> torch.Tensor:
    """Return on every rank the bytes that the rank `root` has read."""
    block = torch.frombuffer(content, dtype=torch.uint8) if rank == root else torch.empty(nbytes, dtype=torch.uint8)
    for start in range(0, nbytes if dist.is_initialized() else 0, _BROADCAST_BYTES):
        dist.broadcast(block[start : start + _BROADCAST_BYTES], root)
    return block
