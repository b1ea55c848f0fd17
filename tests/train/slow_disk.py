"""Run by mpirun: rank 0 writes each checkpoint for longer than messages may take, and the others wait for it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from cpuft import comm
from cpuft.config.train import WorkerConfig
from cpuft.train.checkpoint.timing import Checkpoints
from cpuft.train.run import finish
from tests.comm.ranks import become_rank, start_late

become_rank()
start_late("gloo", 4.0)


class SlowWriter:
    """A writer whose thread is writing a checkpoint."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=time.sleep, args=(6.0,))
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return self._thread.is_alive()

    def write(self, update: int, is_best: bool) -> None:
        self.finish()
        self.__init__()  # type: ignore[misc]

    def finish(self) -> None:
        self._thread.join()


exchange = SimpleNamespace(contribute_to_checkpoint=lambda: None)
checkpoints = Checkpoints(cast(Any, exchange), None if dist.get_rank() else cast(Any, SlowWriter()))
checkpoints.write(2, is_best=True)
dist.barrier()  # as in the next update
finish(checkpoints, WorkerConfig(), dist.get_rank())
print(f"rank {dist.get_rank()} has finished", flush=True)
comm.exit_process(0)
