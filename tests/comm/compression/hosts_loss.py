"""Run by mpirun on four ranks: hierarchical means until one of them is lost. Usage: hosts_loss.py BACKEND HOW RANK."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.compression.hierarchical import make_host_groups
from cpuft.comm.compression.table import make_reduce
from tests.comm.compression.feedback import Bucket
from tests.comm.loss import DEADLINE_SECONDS, lose
from tests.comm.ranks import become_rank, simulate_hosts, start_late

if __name__ == "__main__":
    become_rank()
    simulate_hosts(2)
    torch.set_num_threads(1)
    start_late(sys.argv[1], DEADLINE_SECONDS)
    world: Any = dist.group.WORLD
    hosts = make_host_groups("int8")
    assert hosts is not None
    reduce = make_reduce("int8", world, hosts)
    for step in range(100):
        if step == 5 and dist.get_rank() == int(sys.argv[3]):
            print(f"losing {time.time()}", flush=True)
            lose(sys.argv[2])
        buckets = [Bucket([torch.zeros(900)], [torch.ones(900)], last=n == 2) for n in range(3)]
        for future in [reduce(bucket) for bucket in buckets]:
            future.wait()
