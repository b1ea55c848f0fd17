"""A rank or a host is lost while others wait for it: the run ends in time, says who it was, and loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.hosts.cluster import Cluster
from cpuft.hosts.flavours import Flavour
from tests.conftest import run_cpuft
from tests.provision.simulated import Simulated, needs_root, simulate

SILENT_SECONDS, END_SECONDS = 10.0, 35.0
"""After how long a host that fell silent is missed at the latest, and what the run may take from then to its end."""

STOPPED = """
import datetime, os, signal, torch, torch.distributed as dist
from cpuft import comm
comm.start("gloo")
group = dist.new_group(timeout=datetime.timedelta(seconds=3))
dist.barrier()
dist.get_rank() == 1 and os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1), group=group)
"""

SUMS = """
import datetime, os, pathlib, sys, time, torch, torch.distributed as dist
from cpuft import comm
comm.start(sys.argv[1])
deadline = datetime.timedelta(seconds=float(sys.argv[2]))
group = dist.new_group(timeout=deadline) if deadline else None
if dist.get_rank() == 0:
    pathlib.Path(os.environ["CPUFT_RUN_DIR"], "kept").write_text("mine")
dist.barrier()
print("here", flush=True)
while True:
    dist.all_reduce(torch.ones(1), group=group)
    time.sleep(0.02)
"""


def test_a_stopped_rank_is_named_and_nobody_else() -> None:
    Path("stopped.py").write_text(STOPPED, encoding="utf-8")
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", "stopped.py", seconds=60)
    assert done.returncode == 75
    lines = done.stderr.rstrip().splitlines()
    assert lines[-1] == "cpuft: rank 1 on localhost did not answer the others: is it stopped? look at it there"
    assert "cpuft: rank 0 waited in vain:" in lines
    assert "rank 0 on localhost" not in done.stderr
    assert "before any rank did" not in done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with simulate(tmp_path_factory.mktemp("lost"), "--nodes", "3") as made:
        (made.folder / "sums.py").write_text(SUMS, encoding="utf-8")
        yield made


def lose(cluster: Simulated, run: str, fault: str, host: str, backend: str, deadline: int) -> tuple[int, list[str]]:
    """A run on three hosts that loses one; its exit code, and its last lines on the terminal."""
    words = ["launch", "--np", "3", "--no-check", "--cluster", cluster.name, "--run-dir", run, "--"]
    command = [sys.executable, "-m", "cpuft", *words, str(cluster.folder / "sums.py"), backend, str(deadline)]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    with subprocess.Popen(
        command, cwd=cluster.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        try:
            assert cluster.cpuft("provision", "local", "--name", cluster.name, fault, host).returncode == 0
            start = time.monotonic()
            errors = process.communicate(timeout=deadline + 100)[1]
            assert time.monotonic() - start < max(SILENT_SECONDS, deadline) + END_SECONDS, errors
        finally:
            process.kill()
            cluster.cpuft("provision", "local", "--name", cluster.name, "--nodes", "3")
    return process.returncode, errors.rstrip().splitlines()


def work_folder(cluster: Simulated, run: str) -> Path:
    """Where the run is on the master, whose disk is this machine's."""
    made = Cluster((), (), Flavour("mpirun", "intel"), away=True, uid=os.getuid())
    return Path(made.work_dir(str(cluster.folder / run)))


@needs_root
@pytest.mark.parametrize("fault, backend, deadline", [("kill", "ccl", 0), ("cut", "ccl", 0), ("pause", "gloo", 4)])
def test_a_lost_host_is_named_and_the_record_is_here(
    cluster: Simulated, fault: str, backend: str, deadline: int
) -> None:
    """A host that falls silent is missed long before a collective's deadline; a frozen one's kernel still answers."""
    code, lines = lose(cluster, fault, fault, "2", backend, deadline)
    lost = cluster.hosts[1].name
    assert lines[-1] == f"cpuft: host {lost} does not answer, rank 1 was lost with it: look at it with cpuft doctor"
    assert [line for line in lines if "paramiko" in line] == []
    assert code == 75
    assert (cluster.folder / fault / "kept").read_text() == "mine"
    assert not work_folder(cluster, fault).parent.exists()


@needs_root
def test_of_a_lost_master_nothing_is_taken_away_and_the_place_is_said(cluster: Simulated) -> None:
    code, lines = lose(cluster, "master", "pause", "1", "gloo", 0)
    work = work_folder(cluster, "master")
    try:
        assert code == 2
        assert lines[-1].endswith(f"what was recorded is in {work} on {cluster.hosts[0].name}")
        assert (work / "kept").read_text() == "mine"
        assert not list(cluster.folder.glob("master*"))
    finally:
        shutil.rmtree(work.parent)
