"""Run by mpirun: several groups, each driven by a thread of its own, with many collectives in flight.

Usage: crowd.py BACKEND [ROUNDS]. Prints "all right" from every rank.
"""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist

from cpuft import comm
from tests.comm.ranks import become_rank

GROUPS = 4
IN_FLIGHT = 20


def drive(group: dist.ProcessGroup, number: int, faults: list[str]) -> None:
    """Queue many operations of many sizes, then check them all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = [torch.full((1 + 997 * at % 5000,), float(rank + at + number)) for at in range(IN_FLIGHT)]
    gathered = [torch.zeros(size, 7) for _ in range(IN_FLIGHT)]
    works = []
    for at in range(IN_FLIGHT):
        works.append(dist.all_reduce(sums[at], group=group, async_op=True))
        source = torch.full((1, 7), float(10 * rank + at))
        works.append(dist.all_gather_into_tensor(gathered[at], source, group=group, async_op=True))
    for work in works:
        work.wait()
    for at in range(IN_FLIGHT):
        due = sum(other + at + number for other in range(size))
        if not torch.equal(sums[at], torch.full_like(sums[at], due)):
            faults.append(f"group {number}, sum {at}: {sums[at][:3]} and not {due}")
        if not torch.equal(gathered[at][:, 0], torch.tensor([10.0 * other + at for other in range(size)])):
            faults.append(f"group {number}, gathered {at}: {gathered[at][:, 0]}")


def play_round(groups: list[dist.ProcessGroup]) -> list[str]:
    faults: list[str] = []
    threads = [threading.Thread(target=drive, args=(group, at, faults)) for at, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start(sys.argv[1], timeout_seconds=30)
    groups = [dist.new_group() for _ in range(GROUPS)]
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        faults = play_round(groups)
        assert not faults, faults
    dist.destroy_process_group()
    print("all right", flush=True)
