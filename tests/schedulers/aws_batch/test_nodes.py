"""A job's nodes meet, and end together: processes of this machine on its own address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.hosts.facts import find_free_port
from cpuft.schedulers.work import Work
from tests.schedulers.aws_batch.job import SECRET, Job, command_of, open_job, shell, wait_until_said

CPUFT = """#!/bin/sh
echo "$@" > said
grep -c '^Host ' "$CPUFT_JOB/ssh_config" >> said
env | grep -c {secret} >> said
exit {code}
"""
WAITS = "echo begun; exec sleep 120"


def make_job(folder: Path, command: list[str], seconds: int = 60) -> Job:
    return Job(folder, "127.0.0.1", find_free_port(), command, seconds=seconds)


@pytest.mark.parametrize("code", [7, pytest.param(0, marks=pytest.mark.proof)])
def test_all_end_as_the_command_of_the_jobs_definition_does(code: int, tmp_path: Path) -> None:
    """It is told where the nodes are, and not their secret; nothing of that stays."""
    program, work = tmp_path / "cpuft", tmp_path / "work"
    program.write_text(CPUFT.format(secret=SECRET, code=code))
    program.chmod(0o755)
    command = command_of(Work(("--np", "3"), np=3), str(program), work)
    with open_job(make_job(tmp_path, command)) as job:
        assert job.end() == [code] * 3
    assert (work / "said").read_text().split("\n")[:-1] == [
        "launch --grace-period 20 --np 3 --run-dir runs/x",
        "3",
        "0",
    ]
    assert [path.name for path in work.iterdir()] == ["said"]
    assert "".join(map(job.said, range(3))) == ""


def test_who_has_another_secret_is_refused_and_who_is_missing_is_named(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path), seconds=6), nodes=(0, 1)) as job:
        job.start(2, CPUFT_BATCH_TOKEN="b" * 32)
        assert job.nodes[2].wait(60) == 2
        assert job.end() == [75, 75, 2]
    said = "cpuft: error: node 2 and the main node have different secrets: give all nodes the same CPUFT_BATCH_TOKEN\n"
    assert job.said(2) == said
    *dropped, last = job.said(0).splitlines()
    assert dropped == ["cpuft: dropped a connection from 127.0.0.1: it did not prove to know the job's secret"]
    assert last.startswith("cpuft: error: node 2 did not come within 6 s: see the log there")
    assert job.said(1) == ""


@pytest.mark.proof
def test_a_node_that_dies_ends_the_job(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path))) as job:
        wait_until_said(job, "begun")
        job.send(2, signal.SIGKILL)
        assert job.end() == [75, 75, -signal.SIGKILL]
    assert job.said(0).splitlines()[1:] == [
        "cpuft: node 2 of the job is gone, and with it the job: another attempt goes on"
    ]


@pytest.mark.proof
def test_the_others_do_not_outlive_the_main_node(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path))) as job:
        wait_until_said(job, "begun")
        job.send(0, signal.SIGKILL)
        assert job.end() == [-signal.SIGKILL, 75, 75]
    assert job.said(1) == "cpuft: error: node 1 has lost the main node 127.0.0.1: see the log there\n"


@pytest.mark.proof
def test_a_node_that_is_told_to_go_tells_the_command(tmp_path: Path) -> None:
    """Which is told once, though Batch tells all nodes, and has its time: all stay until it ends."""
    waits = "trap 'echo told; end=1' TERM; echo begun; while [ ! $end ]; do sleep 0.1; done; sleep 3; exit 75"
    with open_job(make_job(tmp_path, shell(waits, tmp_path))) as job:
        wait_until_said(job, "begun")
        job.send(1, signal.SIGTERM)
        wait_until_said(job, "told\n")
        job.send(0, signal.SIGTERM)
        assert job.end() == [75, 75, 75]
    assert job.said(0).splitlines() == ["begun", "cpuft: node 1 of the job was told to go", "told"]


@pytest.mark.proof
def test_a_node_finds_no_main_node(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path), seconds=2), nodes=(1,)) as job:
        assert job.end() == [75]
    assert job.said(1).startswith("cpuft: error: node 1 did not reach the main node 127.0.0.1 port")
    assert job.said(1).count("\n") == 1


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "cpuft: error: name a folder and a command: python -m cpuft.schedulers.aws_batch FOLDER COMMAND...\n"),
        (("/proc/x", "true"), "cpuft: error: this is no node of a multi-node job of AWS Batch (AWS_BATCH_JOB_NODE"),
    ],
)
def test_what_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-m", "cpuft.schedulers.aws_batch", *words]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr[: len(said)], done.stderr.count("\n")) == (2, "", said, 1)
