"""A rank or a host is lost while others wait for it: the run ends in time, names it, and loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpuft.hosts.cluster import STATE_FILE, Cluster
from cpuft.hosts.mpi_implementations import MpiImplementation
from tests.conftest import run_cpuft
from tests.provision.simulated import Simulated, needs_root, simulate

pytestmark = pytest.mark.alone  # Four runs are active at the same time, and have a limited time to end.
SILENT_SECONDS, END_SECONDS = 10.0, 35.0
"""Seconds after which a silent host must be detected, and seconds from then until the run must have ended."""

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
    time.sleep(0.1)
"""


def test_a_stopped_rank_is_named_and_nobody_else() -> None:
    Path("stopped.py").write_text(STOPPED, encoding="utf-8")
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", "stopped.py", seconds=60)
    assert done.returncode == 75
    lines = done.stderr.rstrip().splitlines()
    held_up = "cpuft: rank 1 on localhost blocks the others (rank 0 waits in all_reduce #1 of group 1): "
    assert lines[-1].startswith(f"{held_up}it is stopped (T)")
    assert Path("run/logs/rank-1.stack").read_text().splitlines()[1] == "state: stopped (T)"
    assert "location: stopped.py:8 in <module>" in Path("run/logs/rank-0.stack").read_text()
    assert "cpuft: rank 0 waited in vain for other ranks. Last lines of rank 0:" in lines
    assert "rank 0 on localhost" not in done.stderr
    assert "no rank reported an error" not in done.stderr


@dataclass(frozen=True)
class Case:
    """A run that loses a host."""

    fault: str
    lost: int
    """The host, counted from 1 in the cluster."""
    hosts: tuple[int, ...]
    """The hosts of the run, the head host first."""
    backend: str
    deadline: int
    """Seconds of a collective; 0 for the run's own."""


CASES = {
    "kill": Case("kill", 2, (1, 2), "ccl", 0),
    "cut": Case("cut", 4, (3, 4, 5), "ccl", 0),
    "pause": Case("pause", 7, (6, 7), "gloo", 4),
    "master": Case("pause", 8, (8, 9), "gloo", 0),
}


@dataclass(frozen=True)
class Ending:
    """What a run printed, and how many seconds it took from the fault to its end."""

    code: int
    lines: list[str]
    seconds: float


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with simulate(tmp_path_factory.mktemp("lost"), "--nodes", "9") as made:
        (made.folder / "sums.py").write_text(SUMS, encoding="utf-8")
        yield made


@pytest.fixture(scope="module")
def endings(cluster: Simulated) -> dict[str, Ending]:
    """The endings of all cases. The runs are active at the same time, because they mostly wait."""
    started = {name: start(cluster, name, case) for name, case in CASES.items()}
    try:
        said = [process.stdout and process.stdout.readline() for process in started.values()]
        assert said == ["here\n"] * len(CASES)
        with ThreadPoolExecutor(len(CASES)) as pool:
            found = pool.map(lambda name: lose(cluster, CASES[name], started[name]), CASES)
            return dict(zip(CASES, found, strict=True))
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
        cluster.cpuft("provision", "local", "--name", cluster.name, "--nodes", "9")


def start(cluster: Simulated, run: str, case: Case) -> subprocess.Popen[str]:
    """The launch of a run on some of the hosts."""
    lines = Path(cluster.folder / "hostfiles" / cluster.name).read_text(encoding="utf-8").splitlines(keepends=True)
    hosts = [line for line in lines if not line.startswith("#")]
    hostfile = cluster.folder / f"{run}-hosts"
    hostfile.write_text("".join(hosts[index - 1] for index in case.hosts), encoding="utf-8")
    where = ["--hostfile", str(hostfile), "--ssh-config", cluster.ssh_config]
    words = [
        "launch",
        "--np",
        str(len(case.hosts)),
        "--max-restarts",
        "0",
        "--no-check",
        *where,
        "--run-dir",
        run,
        "--",
    ]
    command = [sys.executable, "-m", "cpuft", *words, str(cluster.folder / "sums.py"), case.backend, str(case.deadline)]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cluster.folder, env=environ, stdout=pipe, stderr=pipe, text=True)


def lose(cluster: Simulated, case: Case, process: subprocess.Popen[str]) -> Ending:
    """Make the fault, and wait for the end of the run."""
    # Of a host that it has not heard of for a while, the kernel finds out six seconds later that it is gone, each time.
    for index in case.hosts:
        cluster.on(index, "true")
    done = cluster.cpuft("provision", "local", "--name", cluster.name, case.fault, str(case.lost))
    assert done.returncode == 0, done.stderr
    begun = time.monotonic()
    errors = process.communicate(timeout=case.deadline + 100)[1]
    return Ending(process.returncode, errors.rstrip().splitlines(), time.monotonic() - begun)


def work_folder(cluster: Simulated, run: str) -> Path:
    """The run folder on the head host, whose disk is on this machine."""
    made = Cluster((), (), MpiImplementation("mpirun", "intel"), works_remotely=True, uid=os.getuid())
    return Path(made.work_dir(str(cluster.folder / run)))


@needs_root
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_lost_a_host_ends_in_time(endings: dict[str, Ending], name: str) -> None:
    """A silent host is detected long before a collective times out. The kernel of a frozen host still answers."""
    assert endings[name].seconds < max(SILENT_SECONDS, CASES[name].deadline) + END_SECONDS, endings[name]


@needs_root
@pytest.mark.parametrize("name", ["kill", "cut", "pause"])
def test_a_lost_host_is_named_and_the_record_is_here(cluster: Simulated, endings: dict[str, Ending], name: str) -> None:
    lines, lost = endings[name].lines, cluster.hosts[CASES[name].lost - 1].name
    assert lines[-1] == f"cpuft: host {lost} does not answer, so rank 1 was lost: check the host with cpuft doctor"
    assert [line for line in lines if "paramiko" in line] == []
    assert endings[name].code == 75
    assert (cluster.folder / name / "kept").read_text() == "mine"
    assert not work_folder(cluster, name).parent.exists()


@needs_root
def test_files_on_a_lost_head_host_stay_and_their_folder_is_named(
    cluster: Simulated, endings: dict[str, Ending]
) -> None:
    ending, work = endings["master"], work_folder(cluster, "master")
    try:
        assert ending.code == 2
        place = f"the run's record is in {work} on {cluster.hosts[CASES['master'].lost - 1].name}"
        assert ending.lines[-1].endswith(place)
        assert (work / "kept").read_text() == "mine"
        assert [path.name for path in (cluster.folder / "master").iterdir()] == [STATE_FILE]
    finally:
        shutil.rmtree(work.parent)
