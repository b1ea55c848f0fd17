"""Run by mpirun: rank 0 writes its last checkpoint for longer than messages may take, and the others wait for it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from cpuft import comm
from cpuft.config.train import WorkerConfig
from cpuft.train.checkpoint.policy import Checkpoints
from cpuft.train.run import finish
from tests.comm.ranks import become_rank, start_late

become_rank()
start_late("gloo", 4.0)
writer = cast(Any, SimpleNamespace(finish=lambda: time.sleep(7)))
finish(Checkpoints(cast(Any, None), None if dist.get_rank() else writer), WorkerConfig(), dist.get_rank())
print(f"rank {dist.get_rank()} has finished", flush=True)
comm.exit_process(0)
