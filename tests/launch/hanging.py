"""A user's script that hangs: hanging.py KIND HOW RANK SECONDS. KIND: a backend of cpuft.comm's, or torch's own gloo.

Ranks add up, until one of them does something else instead; a collective's deadline passes after SECONDS.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def spin() -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        pass


def keep_the_gil() -> None:
    sum(itertools.repeat(0, 1 << 36))


def go_elsewhere() -> None:
    dist.barrier()


def hang(how: str) -> None:
    print(f"hangs {time.time()}", flush=True)
    if how == "loop":
        spin()
    elif how == "gil":
        keep_the_gil()
    elif how == "asleep":
        time.sleep(120)
    elif how == "elsewhere":
        go_elsewhere()
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def main(kind: str, how: str, lost: int, seconds: float) -> None:
    deadline = datetime.timedelta(seconds=seconds)
    if kind == "torch":
        dist.init_process_group("gloo")
    else:
        from cpuft import comm

        comm.start(kind)
    group = dist.new_group(timeout=deadline)
    data = torch.ones(1000)
    for step in range(100):
        if step == 5 and dist.get_rank() == lost:
            hang(how)
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
