"""Write the checkpoints of a rank, on a thread beside the training, and choose the ranks that write."""

from __future__ import annotations

import errno
import functools
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cpuft.record import Line, StepLine, format_line
from cpuft.train.checkpoint.folders import RECORD, STATE, keep_best, note_update, to_view, write_checkpoint
from cpuft.train.checkpoint.state import TrainingState

_ASSUMED_BYTES_PER_SECOND = 150e6
"""Speed at which a checkpoint is copied, hashed and written, until the first one was measured."""
_DISK_DAYS = 1
"""How long ranks wait for a rank that writes to a slow disk."""


@contextmanager
def wait_for_disks() -> Iterator[None]:
    """Let each rank wait at the context's end for all ranks, also longer than --comm-timeout. Collective."""
    # The group is made before any rank writes, because torch waits for all ranks in the default group, too.
    has_others = dist.is_initialized() and dist.get_world_size() > 1
    group = _make_patient_group(dist.group.WORLD) if has_others else None
    yield
    if group:
        dist.barrier(group)


@functools.cache
def _make_patient_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of all ranks of `world` that waits for slow disks, one for each process: it has connections."""
    made: dist.ProcessGroup = dist.new_group(timeout=timedelta(days=_DISK_DAYS))
    return made


def choose_writer_ranks(local_ranks: Sequence[int]) -> list[int]:
    """Return the ranks that write checkpoints, the first ones of the first two hosts, from all ranks' local ranks."""
    # Hosts are not told by their names, which may be equal.
    return [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0][:2]


class CheckpointWriter:
    """Writes a rank's checkpoints: copies the state between two updates, and writes it and the record on a thread."""

    def __init__(self, state: TrainingState, root: Path, rank: int, every: float) -> None:
        """Begin to allocate the memory of the copy on a thread; `every` is that of `policy.is_due`."""
        self.rank = rank
        self.record: list[str] = []
        self.cost = state.nbytes / _ASSUMED_BYTES_PER_SECOND
        """Seconds that the last checkpoint cost: the pause of training and the thread's CPU time; first an estimate."""
        self.every = every
        self.begun = time.monotonic()
        """time.monotonic() when the last checkpoint was begun, or this object was made."""
        self._state, self._root = state, root
        self._block = torch.empty(0 if math.isinf(every) else state.nbytes, dtype=torch.uint8)
        self._has_warned = self._is_written = False
        # Touching fresh memory takes longer than copying into it. The thread spares the first checkpoint that time.
        self._thread = threading.Thread(target=self._block.zero_, daemon=True)
        self._thread.start()

    def begin(self, record: list[str], update: int) -> None:
        """Add the record's lines up to an update, after which training begins (0: a new run), and note that update."""
        self.record += record
        self._note_update(update)

    def add_line(self, line: Line) -> None:
        """Add a line to the record that checkpoints hold, and note its update if it has one (not on rank 0)."""
        self.record.append(format_line(line))
        if isinstance(line, StepLine):
            self._note_update(line.step)

    def _note_update(self, update: int) -> None:
        if self.rank:  # rank 0 writes the record itself, which has its updates
            note_update(self._root, update, self.rank)

    @property
    def is_writing(self) -> bool:
        """Whether the thread writes a checkpoint, or allocates the memory of the first one."""
        return self._thread.is_alive()

    def write(self, update: int, wait: bool = False, last_line: Line | None = None, is_best: bool = False) -> bool:
        """Copy the state, and write it with the record as the checkpoint of an update, on a thread.

        With an exchange that shards the optimizer this is collective. A disk that does not take the checkpoint, or has
        less than twice its size free, is one warning per run. A previous checkpoint that is still being written is
        waited for. `last_line` ends the record in this checkpoint. Returns whether it is on the disk, always False
        without `wait`.
        """
        self._thread.join()
        self.begun = time.monotonic()
        self._block = self._block if len(self._block) else torch.empty(self._state.nbytes, dtype=torch.uint8)
        self._state.snapshot(self._block)
        record = [*self.record, *([format_line(last_line)] if last_line else [])]
        arguments = (update, record, time.monotonic() - self.begun, is_best)
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
