"""Run by mpirun on four ranks: hierarchical means until one of them is lost. Usage: hosts_loss.py BACKEND HOW RANK."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from cpuft import comm
from cpuft.comm.compression.hierarchical import make_host_groups
from cpuft.comm.compression.table import make_reduce
from tests.comm.compression.feedback import Bucket
from tests.comm.loss import DEADLINE_SECONDS, lose
from tests.comm.ranks import become_rank, simulate_hosts

if __name__ == "__main__":
    become_rank()
    simulate_hosts(2)
    torch.set_num_threads(1)
    # A store with a timeout of its own, because the ranks may take longer than the deadline to import everything.
    rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    comm.start(sys.argv[1], timeout_seconds=DEADLINE_SECONDS, store=store, rank=rank, world_size=size)
    world: Any = dist.group.WORLD
    hosts = make_host_groups("int8", world)
    assert hosts is not None
    reduce = make_reduce("int8", world, hosts)
    for step in range(100):
        if step == 5 and rank == int(sys.argv[3]):
            print(f"losing {time.time()}", flush=True)
            lose(sys.argv[2])
        buckets = [Bucket([torch.zeros(900)], [torch.ones(900)], last=n == 2) for n in range(3)]
        for future in [reduce(bucket) for bucket in buckets]:
            future.wait()
