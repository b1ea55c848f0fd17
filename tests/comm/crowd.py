"""Several groups, each used by a thread of its own, with many collectives under way; a part of grid.py.

By itself, run by mpirun: crowd.py BACKEND ROUNDS. Every rank prints "passed".
"""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist

from cpuft import comm
from tests.comm.ranks import become_rank

GROUPS = 4
UNDER_WAY = 20


def use_group(group: dist.ProcessGroup, number: int, faults: list[str]) -> None:
    """Queue many operations of many sizes, and check all of their results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = [torch.full((1 + 997 * at % 5000,), float(rank + at + number)) for at in range(UNDER_WAY)]
    gathered = [torch.zeros(size, 7) for _ in range(UNDER_WAY)]
    works = []
    for at in range(UNDER_WAY):
        works.append(dist.all_reduce(sums[at], group=group, async_op=True))
        source = torch.full((1, 7), float(10 * rank + at))
        works.append(dist.all_gather_into_tensor(gathered[at], source, group=group, async_op=True))
    for work in works:
        work.wait()
    for at in range(UNDER_WAY):
        expected = sum(other + at + number for other in range(size))
        if not torch.equal(sums[at], torch.full_like(sums[at], expected)):
            faults.append(f"group {number}, sum {at}: {sums[at][:3]} instead of {expected}")
        if not torch.equal(gathered[at][:, 0], torch.tensor([10.0 * other + at for other in range(size)])):
            faults.append(f"group {number}, gathered {at}: {gathered[at][:, 0]}")


def find_faults(rounds: int) -> list[str]:
    """Return what was wrong in one of the rounds, in each of which every group has a thread."""
    groups = [dist.new_group() for _ in range(GROUPS)]
    faults: list[str] = []
    for _ in range(rounds):
        threads = [threading.Thread(target=use_group, args=(group, at, faults)) for at, group in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    return faults


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start(sys.argv[1], timeout_seconds=30)
    faults = find_faults(int(sys.argv[2]))
    assert not faults, faults
    dist.destroy_process_group()
    print("passed", flush=True)
