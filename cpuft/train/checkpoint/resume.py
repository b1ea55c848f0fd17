"""Restore the newest whole checkpoint that any host has."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft.config.train import CHANGEABLE_ON_RESUME, TRAINING_INPUTS
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import Record, parse_record
from cpuft.train.checkpoint.folders import BEST, RECORD, STATE, read_newest, remove_after
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.ranks import gather

_HOST_OPTIONS = (*TRAINING_INPUTS, "precision")
"""Options that may differ on other hosts: their paths differ, and not all hosts have bf16. A checkpoint knows its
examples by their checksum, and its weights are fp32."""
_BROADCAST_BYTES = 1 << 26


@dataclass(frozen=True)
class ResumePoint:
    """Where a run continues: the number of updates that are done, and the record of them as text and parsed."""

    update: int = 0
    text: str = ""
    record: Record | None = field(default=None, compare=False)


@dataclass(frozen=True)
class HostCheckpoint:
    """The newest undamaged checkpoint that a rank has found on its host, without its state; update -1 without one."""

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
    root: Path, world: World, text_file: str, header_bytes: int = 0
) -> tuple[HostCheckpoint, Callable[[], torch.Tensor]]:
    """Find the newest whole checkpoint in `root` on any host. Collective: the first rank of each host reads `root`.

    Returns on all ranks the checkpoint, with the text of `text_file`, RECORD or VALUES, and the first bytes of its
    state (update -1 without one); and a collective function that returns the state, uint8, (nbytes,). Rank 0 prints a
    line for each newer checkpoint that is damaged. Raises CpuftError on all ranks: all are damaged.
    """
    update, files, damaged = read_newest(root) if world.local_rank == 0 else (-1, {}, [])
    content, decoded = files.get(STATE, bytearray()), files.get(text_file, bytearray()).decode(errors="replace")
    own = HostCheckpoint(socket.gethostname(), update, damaged, bytes(content[:header_bytes]), decoded, len(content))
    everyone: list[HostCheckpoint] = gather(own)
    for one in everyone if world.rank == 0 else ():
        for message in one.damaged:
            print(f"{message} ({one.host})", file=sys.stderr, flush=True)
    newest = max(everyone, key=lambda one: one.update)  # of equal ones, that of the lowest rank
    if newest.update < 0 and any(one.damaged for one in everyone):
        raise CpuftError(f"all checkpoints in {root} are damaged: restore one, or start a new run without --resume")
    return newest, lambda: _broadcast(content, newest.nbytes, everyone.index(newest), world.rank)


def resume(
    state: TrainingState, root: Path, world: World, options: Mapping[str, Any], data_checksum: str
) -> ResumePoint:
    """Restore the newest whole checkpoint in `root` on any host into model and optimizer, if there is one. Collective.

    Returns `ResumePoint()` without one. Removes newer checkpoints, also best ones. Raises CpuftError on all ranks: the
    checkpoint is of another job by `describe_other_job`, or all checkpoints are damaged. `options` are by names of
    TrainConfig.
    """
    newest, read = find_newest_checkpoint(root, world, RECORD, len(state.header))
    record = None
    if newest.update >= 0:
        record = parse_record(newest.text, f"checkpoint of update {newest.update} on {newest.host}")
        if problem := describe_other_job(record, newest.header == state.header, options, data_checksum):
            raise CpuftError(f"{record.path} {problem}")
        state.restore(read())
    if world.local_rank == 0:
        remove_after(root, newest.update)
        remove_after(root / BEST, newest.update)
    return ResumePoint(max(0, newest.update), newest.text, record)


def describe_other_job(record: Record, same_tensors: bool, options: Mapping[str, Any], data_checksum: str) -> str:
    """Return, as the end of a sentence about a checkpoint, how its job differs from this one, and what to do; else "".

    The first difference counts: of `options`, by names of TrainConfig (those that both have and that may not change on
    resume), of the examples' checksum, or of the states' headers (`same_tensors` is False).
    """
    then = record.header.options
    for name, value in options.items():
        if name not in (*_HOST_OPTIONS, *CHANGEABLE_ON_RESUME) and then.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            return f"is of another job, with {flag} {then[name]}, and this is {value}: start a new run without --resume"
    if record.header.data != data_checksum:
        return "was trained on other examples: restore the data as it was, or start a new run without --resume"
    if not same_tensors:
        return "is of another model: see whether it was copied from another run, or start a new run without --resume"
    return ""


def _broadcast(content: bytearray, nbytes: int, root: int, rank: int) -> torch.Tensor:
    block = torch.frombuffer(content, dtype=torch.uint8) if rank == root else torch.empty(nbytes, dtype=torch.uint8)
    for start in range(0, nbytes if dist.is_initialized() else 0, _BROADCAST_BYTES):
        dist.broadcast(block[start : start + _BROADCAST_BYTES], root)
    return block
