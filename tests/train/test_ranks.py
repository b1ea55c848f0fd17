"""The proof that ranks form one job."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import RecordedRank
from cpuft.train.ranks import checksum_parameters, find_misplaced, join_process_group


def rank(number: int, host: str = "a", cpus: tuple[int, ...] = (0,), pid: int = 0, **planned: Any) -> Any:
    plan = {"size": "2", "host": host, "cpus": list(cpus)} | planned
    return RecordedRank(number, host, list(cpus)), plan, pid or 100 + number


@pytest.mark.parametrize(
    "found, problem",
    [
        ([rank(0), rank(1, cpus=(1,))], ""),
        ([rank(0), rank(0, pid=7)], "rank 0 exists 2 times: start the run with one mpirun"),
        ([rank(0, pid=7), rank(1, pid=7)], "process 7 on a holds 2 ranks: start the run with cpuft launch"),
        ([rank(0), rank(1, size="4")], "rank 1 was planned for 4 ranks and finds 2: check mpirun's -n"),
    ],
)
def test_what_is_misplaced_is_named(found: list[Any], problem: str) -> None:
    assert find_misplaced(2, found)[: len(problem) or None] == problem


def test_wrong_host_and_cores_name_the_rank() -> None:
    rank_1 = RecordedRank(1, "c", [0, 1])
    wrong_host = (rank_1, {"size": "2", "host": "b", "cpus": [0, 1]}, 5)
    wrong_cores = (rank_1, {"size": "2", "host": "c", "cpus": [2]}, 5)
    assert find_misplaced(2, [rank(0), wrong_host]).startswith("rank 1 is on c, planned on b")
    assert find_misplaced(2, [rank(0), wrong_cores]).startswith(
        "rank 1 on c runs on hardware threads [0, 1], planned [2]"
    )


def test_a_checksum_sees_every_bit_of_every_parameter() -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), norm)
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    before = checksum_parameters(model)
    assert before == checksum_parameters(model)
    with torch.no_grad():
        norm.bias[2] += 1e-7
    assert checksum_parameters(model) != before
    assert checksum_parameters(model.to(torch.bfloat16)) != before


ALONE = """
import os, sys
from cpuft.comm import exit_process
from cpuft.rank.world import parse_world
from cpuft.train.ranks import gather, join_process_group
before = set(os.environ)
with join_process_group(parse_world(os.environ), sys.argv[1], 30) as choice:
    print(choice, gather(7), {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & (os.environ.keys() - before))
exit_process(0)
"""


@pytest.mark.parametrize(
    "wanted, choice",
    [
        ("auto", "Choice(backend='gloo', reason='a single rank does not communicate')"),
        ("mpi", "Choice(backend='mpi', reason='as you asked')"),
        ("ccl", "Choice(backend='ccl', reason='as you asked')"),
    ],
)
def test_a_rank_alone_needs_no_launcher(wanted: str, choice: str) -> None:
    ccl = {"CCL_KVS_IFACE": "lo", "CCL_LOG_LEVEL": "error"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, wanted], capture_output=True, text=True, timeout=60, env=os.environ | ccl
    )
    # oneCCL warns on standard output of each variable that it is given.
    assert done.stdout.splitlines()[-1:] == [f"{choice} [7] set()"], done.stderr


def test_a_rank_that_nobody_tells_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    message = "rank 1 of 2 was not told where rank 0 is: export MASTER_ADDR"
    with pytest.raises(CpuftError, match=message), join_process_group(World(1, 2, 1, 2), "gloo", 30):
        pass
