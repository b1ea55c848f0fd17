"""Run by mpirun: ranks run all-reduces until one of them is lost. Usage: loss.py BACKEND HOW RANK."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from tests.comm.ranks import become_rank, start_late

DEADLINE_SECONDS = 3.0


def lose(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("this rank has failed")
    elif how == "sleep":
        time.sleep(60)


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    start_late(sys.argv[1], DEADLINE_SECONDS)
    data = torch.ones(1000)
    for step in range(100):
        if step == 5 and dist.get_rank() == int(sys.argv[3]):
            print(f"losing {time.time()}", flush=True)
            lose(sys.argv[2])
        dist.all_reduce(data, op=dist.ReduceOp.MAX)
