"""Run by mpirun: prints the CPU seconds of a rank that waits one second for a rank on another host."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from cpuft import comm
from tests.comm.ranks import become_rank

become_rank()
os.environ["MPI_LOCALNRANKS"] = "1"
comm.start("mpi", timeout_seconds=60)
dist.barrier()
worked = time.process_time()
time.sleep(dist.get_rank())
dist.all_reduce(torch.ones(1))
worked = time.process_time() - worked
print(f"rank {dist.get_rank()} worked {worked:.2f} s", flush=True)
dist.barrier()
comm.exit_process(0)
