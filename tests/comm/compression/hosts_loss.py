"""Run by mpirun on four ranks: hierarchical means until one of them is lost, in one case after another.

Usage: hosts_loss.py FOLDER CASE ..., each case HOW-RANK-PORT. A process that each rank forks does a case, and prints to
FOLDER/HOW-LOST.RANK. FOLDER/HOW-LOST.RANK.end has its exit code and the time at which it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.compression.hierarchical import make_host_groups
from cpuft.comm.compression.table import make_reduce
from tests.comm.compression.feedback import Bucket
from tests.comm.loss import DEADLINE_SECONDS, lose
from tests.comm.ranks import become_rank, simulate_hosts, start_late
from tests.conftest import wait_until


def train(how: str, lost: int) -> None:
    start_late("gloo", DEADLINE_SECONDS)
    world: Any = dist.group.WORLD
    hosts = make_host_groups("int8", world)
    assert hosts is not None
    reduce = make_reduce("int8", world, hosts)
    for step in range(100):
        if step == 5 and dist.get_rank() == lost:
            print(f"losing {time.time()}", flush=True)
            lose(how)
        buckets = [Bucket([torch.zeros(900)], [torch.ones(900)], last=n == 2) for n in range(3)]
        for future in [reduce(bucket) for bucket in buckets]:
            future.wait()


def fork(output: Path, how: str, lost: int) -> int:
    """Return the process that trains."""
    if child := os.fork():
        return child
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.pop("PMI_FD", None)  # by which the first one that names the lost rank lets mpirun end all others
    try:
        train(how, lost)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, *cases: str) -> None:
    rank, others = int(os.environ["RANK"]), {0, 1, 2, 3}
    for how, lost, port in (case.split("-") for case in cases):
        os.environ["MASTER_PORT"] = port
        ends = [folder / f"{how}-{lost}.{other}.end" for other in sorted(others - {int(lost)})]
        child = fork(folder / f"{how}-{lost}.{rank}", how, int(lost))
        if rank == int(lost):
            wait_until(lambda places=ends: all(place.exists() for place in places))
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / f"{how}-{lost}.{rank}.end").write_text(json.dumps([code, time.time()]))


if __name__ == "__main__":
    become_rank()
    simulate_hosts(2)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
