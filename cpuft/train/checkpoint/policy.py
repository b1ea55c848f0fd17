"""When checkpoints are written and by which ranks, and how a run resumes from the newest one."""

from __future__ import annotations

import math
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft.config import CHANGEABLE_ON_RESUME
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import Line, Record, RecordedRank, StepLine, format_line, parse_record
from cpuft.train.checkpoint.files import (
    RECORD,
    STATE,
    note_update,
    read_newest,
    remove_after,
    to_view,
    write_checkpoint,
)
from cpuft.train.checkpoint.state import State
from cpuft.train.process_group import gather

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


_OF_HOSTS = ("model", "from_config", "tokenizer", "data_dir", "train_file", "validation_file", "precision")
"""Other hosts have other paths, and not all have bf16: rows are known by their checksum, weights are fp32 ones."""
_PIECE = 1 << 26


@dataclass(frozen=True)
class Past:
    """What a resumed run has behind it."""

    update: int = 0
    """The last one that is done; 0 where there is no checkpoint."""
    text: str = ""
    """The record up to there."""
    record: Record | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Found:
    """What a host has."""

    host: str
    update: int
    """Of its newest whole checkpoint; -1: it has none."""
    damaged: list[str]
    header: bytes
    text: str
    nbytes: int


def find_newest(root: Path, world: World, text: str, header: int = 0) -> tuple[Found, Callable[[], torch.Tensor]]:
    """The newest whole checkpoint in `root` on any host, and what gives its state to every rank. Collectives, both.

    Parameters
    ----------
    text: name of the file beside the state that all ranks get.
    header: bytes of the state that they get with it.

    Raises
    ------
    CpuftError: on all ranks alike, all that there are are damaged.
    """
    update, files, damaged = read_newest(root) if world.local_rank == 0 else (-1, {}, [])
    content, said = files.get(STATE, bytearray()), files.get(text, bytearray()).decode(errors="replace")
    found = Found(socket.gethostname(), update, damaged, bytes(content[:header]), said, len(content))
    everyone: list[Found] = gather(found)
    for one in everyone if world.rank == 0 else ():
        for line in one.damaged:
            print(f"{line} ({one.host})", file=sys.stderr, flush=True)
    newest = max(everyone, key=lambda one: one.update)  # of several, that of the lowest rank
    if newest.update < 0 and any(one.damaged for one in everyone):
        raise CpuftError(f"no checkpoint in {root} is whole: bring one back, or start a new run without --resume")
    return newest, lambda: _broadcast(content, newest.nbytes, everyone.index(newest), world.rank)


def resume(state: State, root: Path, world: World, options: Mapping[str, Any], data: str) -> Past:
    """Take over the newest whole checkpoint in `root` on any host. A collective.

    Parameters
    ----------
    options, data: of this run; what a checkpoint has must be the same.

    Raises
    ------
    CpuftError: on all ranks alike, the checkpoint is of another job, and what differs; or all that there are are
    damaged.
    """
    newest, read = find_newest(root, world, RECORD, len(state.header))
    record = None
    if newest.update >= 0:
        record = parse_record(newest.text, f"checkpoint of update {newest.update} on {newest.host}")
        if problem := find_difference(record, newest.header == state.header, options, data):
            raise CpuftError(f"{record.path} {problem}")
        state.restore(read())
    if world.local_rank == 0:
        remove_after(root, newest.update)
    return Past(max(0, newest.update), newest.text, record)


def find_difference(record: Record, same_tensors: bool, options: Mapping[str, Any], data: str) -> str:
    """What a checkpoint's job has that this one has not, with the next move; empty when they are one job."""
    then = record.header.options
    for name, value in options.items():
        if name not in (*_OF_HOSTS, *CHANGEABLE_ON_RESUME) and then.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            return f"is of another job, with {flag} {then[name]}, and this is {value}: start a new run without --resume"
    if record.header.data != data:
        return "was trained on other rows: bring them back as they were, or start a new run without --resume"
    if not same_tensors:
        return "is of another model: see whether it was copied from another run, or start a new run without --resume"
    return ""


def _broadcast(content: bytearray, nbytes: int, root: int, rank: int) -> torch.Tensor:
    """A block that one rank has read, on every rank."""
    block = torch.frombuffer(content, dtype=torch.uint8) if rank == root else torch.empty(nbytes, dtype=torch.uint8)
    for start in range(0, nbytes if dist.is_initialized() else 0, _PIECE):
        dist.broadcast(block[start : start + _PIECE], root)
    return block
