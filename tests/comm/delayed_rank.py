"""Run by mpirun: rank 1 connects to the hub long after rank 0 has called MPI_Init, which holds the GIL."""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from cpuft import comm
from tests.comm.ranks import become_rank

if __name__ == "__main__":
    become_rank()
    time.sleep(5 * int(os.environ["RANK"]))
    comm.start("mpi", timeout_seconds=20)
    dist.barrier()
    print("passed", flush=True)
