"""`cpuft launch` in the main node of a job of three simulated hosts: no hostfile, and no sshd is asked."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.record import read_record
from cpuft.schedulers.base import JobLaunch
from cpuft.schedulers.job_node import PORT
from tests.provision.simulated import Simulated, needs_root, simulate
from tests.schedulers.jobs import Job, command_of, open_job, wait_until_said

pytestmark = needs_root
TRAINING = (
    *("--task", "demo", "--batch-size", "2", "--max-length", "16", "--precision", "fp32", "--dropout", "0"),
    *("--backend", "gloo", "--no-save-model", "--no-fast-path"),
)
HELLO = """import os, socket
print(os.environ["RANK"], os.environ["WORLD_SIZE"], socket.gethostname())
"""
OWN_DISKS = 'mkdir -p "$0" && mount -t tmpfs tmpfs "$0" && mount -t tmpfs tmpfs /var/tmp && exec "$@"'
"""Of a node, as containers have them."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with simulate(tmp_path_factory.mktemp("batch"), "--nodes", "3") as made:
        yield made


def make_job(cluster: Simulated, name: str, *words: str, script: tuple[str, ...] = ()) -> Job:
    """A job of that name; its nodes are the hosts in turn."""
    folder = cluster.folder / name
    folder.mkdir(exist_ok=True)
    program = folder / "cpuft"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cpuft "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    command = command_of(JobLaunch(("--np", "3", *words), script, np=3), str(program), folder / "work", name)
    return Job(folder, cluster.hosts[0].name, PORT, command, inside=lambda index: enter(cluster, index))


def enter(cluster: Simulated, index: int) -> tuple[str, ...]:
    """Words before a command that run it in a host, without anybody's help there."""
    holder = (cluster.folder / "state" / cluster.name / "nodes" / str(index + 1) / "pid").read_text().strip()
    child = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0]
    return ("setpriv", "--pdeathsig", "KILL", "nsenter", "--target", child, "--all", "--wd=/")


@pytest.mark.parametrize(
    "service", ["batch", *(pytest.param(name, marks=pytest.mark.proof) for name in ("dstack", "skypilot"))]
)
def test_ranks_run_on_all_its_nodes(cluster: Simulated, service: str) -> None:
    logs = [cluster.folder / "state" / cluster.name / "nodes" / str(number) / "log" for number in (1, 2, 3)]
    names = [cluster.on(number, "hostname") for number in (1, 2, 3)]
    before = [log.stat().st_size for log in logs]
    (cluster.folder / "hello.py").write_text(HELLO, encoding="utf-8")
    name = f"says-{service}"
    job = make_job(cluster, name, "--independent", script=("--", str(cluster.folder / "hello.py")))
    with open_job(replace(job, service=service)):
        assert job.end(200) == [0, 0, 0], job.said(0)
    outputs = sorted((job.folder / "work" / "runs" / name / "logs").glob("rank-*.out"))
    assert [path.read_text().split() for path in outputs] == [[str(rank), "3", names[rank]] for rank in range(3)]
    assert [log.stat().st_size for log in logs] == before


@pytest.mark.proof
def test_a_job_trains(cluster: Simulated) -> None:
    with open_job(make_job(cluster, "trains", *TRAINING, "--max-steps", "3")) as job:
        assert job.end(200) == [0, 0, 0], job.said(0)
    record = read_record(str(job.folder / "work" / "runs" / "trains"))
    assert (len(record.steps), len({rank.host for rank in record.header.ranks})) == (3, 3)


@pytest.mark.proof
def test_nodes_need_not_share_a_disk(cluster: Simulated) -> None:
    """What the run reads is sent to them, and what it wrote comes back to the main node."""
    job = make_job(cluster, "apart", *TRAINING, "--max-steps", "3")
    apart = ("unshare", "--mount", "sh", "-c", OWN_DISKS, job.command[0])
    with open_job(replace(job, inside=lambda index: (*enter(cluster, index), *apart))) as job:
        assert job.end(200) == [0, 0, 0], job.said(0)
    assert re.search(r"accuracy 0\.\d+", job.said(0))
    assert list((job.folder / "work").iterdir()) == []


@pytest.mark.proof
def test_too_many_ranks_are_refused_on_all_nodes(cluster: Simulated) -> None:
    with open_job(make_job(cluster, "many", *TRAINING, "--np", "999", "--ppn", "333")) as job:
        assert job.end(200) == [2, 2, 2]
    assert re.search(r"^cpuft: error: 333 ranks on [0-9.]+, which has \d+ cores: lower --np", job.said(0), re.MULTILINE)


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_another_attempt_goes_on_where_a_node_went(number: int, cluster: Simulated) -> None:
    """Told to go, or dead: the job ends with what Batch starts again, and the runs' folder is shared."""
    words = (*TRAINING, "--max-steps", "60", "--checkpoint-every", "0.5")
    job = make_job(cluster, f"goes-{number}", *words)
    with open_job(job):
        wait_until_said(job, "step [1-9]")
        time.sleep(3)
        job.send(2, number)
        codes = job.end(120)
    assert (codes[:2], codes[2] in (75, -signal.SIGKILL)) == ([75, 75], True), job.said(0)
    again = replace(job, nodes={})
    for index in range(3):
        again.start(index, AWS_BATCH_JOB_ATTEMPT="2")
    with open_job(again, ()):
        assert again.end(240) == [0, 0, 0], again.said(0)
    record = job.folder / "work" / "runs" / f"goes-{number}"
    assert len(read_record(str(record)).steps) == 60
    assert "resumed" in (record / "record.jsonl").read_text()
