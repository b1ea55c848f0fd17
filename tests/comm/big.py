"""Run by mpirun: collectives on more than 2 GiB. Usage: big.py BACKEND. It needs 10 GB of memory for 2 ranks."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from cpuft import comm
from tests.comm.ranks import become_rank

COUNT = 2**31 + 64
"""More elements and bytes than a 32-bit count can hold."""

if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start(sys.argv[1], timeout_seconds=100)
    rank = dist.get_rank()
    data = torch.full((COUNT,), 1 + rank, dtype=torch.uint8)
    dist.all_reduce(data)
    assert data[0] == data[2**30] == data[-1] == 3, (data[0], data[-1])
    data[-1] = 7 + rank
    dist.broadcast(data, 1)
    assert data[-1] == 8, data[-1]
    data = data[: COUNT // 2].contiguous() + rank
    both = torch.empty(COUNT, dtype=torch.uint8)
    dist.all_gather_into_tensor(both, data)
    assert [both[0].item(), both[-1].item()] == [3, 4], (both[0], both[-1])
    dist.destroy_process_group()
    print("passed", flush=True)
