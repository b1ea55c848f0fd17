"""The proof that ranks form one job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import RecordedRank
from cpuft.train.ranks import check_ranks, checksum_parameters, join_process_group


def test_a_rank_on_other_cores_than_planned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("CPUFT_CORES", ",".join(map(str, cpus)))
    assert check_ranks(World(0, 1, 0, 1)) == [RecordedRank(0, socket.gethostname(), cpus)]
    monkeypatch.setenv("CPUFT_CORES", "9999")
    with pytest.raises(CpuftError, match=r"rank 0 on .* runs on hardware threads \[.*\], planned \[9999\]: let only"):
        check_ranks(World(0, 1, 0, 1))


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
    message = "rank 1 does not know where rank 0 is: export MASTER_ADDR"
    with pytest.raises(CpuftError, match=message), join_process_group(World(1, 2, 1, 2), "gloo", 30):
        pass
