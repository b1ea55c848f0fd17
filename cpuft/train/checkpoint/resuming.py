"""Goes on with a run: all ranks agree on the newest whole checkpoint that any host has, and take it over."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft.config import FREE_ON_RESUME
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import Record, parse_record
from cpuft.train.checkpoint.files import RECORD, STATE, read_newest, remove_after
from cpuft.train.checkpoint.state import State
from cpuft.train.job import gather

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
        if name not in (*_OF_HOSTS, *FREE_ON_RESUME) and then.get(name, value) != value:
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
