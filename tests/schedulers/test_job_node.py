"""Nodes of an AWS Batch job: what Batch tells them, keys made of the secret, and how they meet and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.facts import find_free_port
from cpuft.schedulers.base import JobLaunch
from cpuft.schedulers.job_node import Keys, Node, parse_node, parse_registration
from tests.conftest import run_shell
from tests.schedulers.jobs import SECRET, Job, command_of, open_job, shell, variables_of, wait_until_said

CHILD = {
    "AWS_BATCH_JOB_ID": "7f#2",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
    "CPUFT_JOB_TOKEN": SECRET,
}
MAIN = CHILD | {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}
NODE = Node("7f", 2, 0, 3, "10.0.0.7", 600, SECRET)


def test_a_nodes_place_is_read() -> None:
    assert parse_node(CHILD) == NODE
    assert parse_node(MAIN | {"CPUFT_MEET_SECONDS": "9"}) == replace(NODE, index=0, address="", seconds=9)
    for service in ("dstack", "skypilot"):
        found = parse_node(variables_of(service, 2, 3, "10.0.0.7") | {"CPUFT_JOB_TOKEN": SECRET})
        assert replace(found, job="7f") == NODE
    alone = {"AWS_BATCH_JOB_NUM_NODES": "1", "CPUFT_JOB_TOKEN": ""}
    assert parse_node(MAIN | alone) == replace(NODE, index=0, count=1, address="", token="")


@pytest.mark.parametrize(
    "environ, said",
    [
        ({}, "this is not a node of a job of AWS Batch, dstack, SkyPilot: start it by cpuft submit"),
        (CHILD | {"AWS_BATCH_JOB_ID": ""}, "this is not a node of a job of AWS Batch"),
        (CHILD | {"AWS_BATCH_JOB_NODE_INDEX": "-1"}, "this is not a node of a job with several nodes (AWS_BATCH"),
        (CHILD | {"AWS_BATCH_JOB_NUM_NODES": "9" * 5000}, "this is not a node of a job with several nodes (AWS_BATCH"),
        (
            CHILD | {"CPUFT_JOB_TOKEN": ""},
            "CPUFT_JOB_TOKEN is not set: submit the job by cpuft submit",
        ),
        (CHILD | {"CPUFT_JOB_TOKEN": "a"}, "CPUFT_JOB_TOKEN is too short: submit the job by cpuft submit"),
        (CHILD | {"CPUFT_MEET_SECONDS": "0"}, "CPUFT_MEET_SECONDS='0': give a whole number of seconds"),
    ],
)
def test_contradicting_variables_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(CpuftError) as refusal:
        parse_node(environ)
    assert str(refusal.value).startswith(said)
    assert SECRET not in str(refusal.value)


def test_the_secret_is_not_shown_with_the_node() -> None:
    assert SECRET not in repr(NODE)


def test_keys_depend_on_the_job_and_its_secret_only() -> None:
    """Whichever node makes them; and no client is taken for a server."""
    main, child, job, secret = (
        Keys(node) for node in (parse_node(MAIN), NODE, replace(NODE, job="8"), replace(NODE, token="b" * 32))
    )
    assert (main.host, main.login, main.mark) == (child.host, child.login, child.mark)
    assert len({one.host_line for one in (main, job, secret)}) == 3
    assert main.host != main.login


def test_a_registration_is_read() -> None:
    assert parse_registration("10.0.0.9 10.0.0.7 2 4711 yes") == ("10.0.0.9", "10.0.0.7", 2, 4711, True)


@pytest.mark.parametrize(
    "line",
    ["", "A B 2 4711", "2 4711 yes", "A 2 4711 yes", "A b 1 1 no", "A B -1 1 no", "A B 1 65536 no", "A B ٣ 1 no"],
)
def test_what_is_no_registration_is_refused(line: str) -> None:
    with pytest.raises(CpuftError, match="is not the registration of a node: start the same image on all nodes"):
        parse_registration(line.replace("A", "10.0.0.9").replace("B", "10.0.0.7"))


PROGRAM = """#!/bin/sh
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
    program.write_text(PROGRAM.format(secret=SECRET, code=code))
    program.chmod(0o755)
    command = command_of(JobLaunch(("--np", "3"), np=3), str(program), work)
    with open_job(make_job(tmp_path, command)) as job:
        assert job.end() == [code] * 3
    assert (work / "said").read_text().split("\n")[:-1] == [
        "launch --grace-period 20 --np 3 --run-dir runs/x",
        "3",
        "0",
    ]
    assert [path.name for path in work.iterdir()] == ["said"]
    assert "".join(map(job.said, range(3))) == ""


def test_a_node_with_another_secret_is_refused_and_missing_nodes_are_named(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path), seconds=20), nodes=(0, 1)) as job:
        job.start(2, CPUFT_JOB_TOKEN="b" * 32)
        assert job.nodes[2].wait(60) == 2
        assert job.end() == [75, 75, 2]
    said = "cpuft: error: node 2 and the main node have different secrets: give all nodes the same CPUFT_JOB_TOKEN\n"
    assert job.said(2) == said
    (last,) = job.said(0).splitlines()
    assert last.startswith("cpuft: error: node 2 did not register within 20 s: see the log there")
    assert job.said(1) == ""


@pytest.mark.proof
def test_a_node_that_dies_ends_the_job(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path))) as job:
        wait_until_said(job, "begun")
        job.send(2, signal.SIGKILL)
        assert job.end() == [75, 75, -signal.SIGKILL]
    assert job.said(0).splitlines()[1:] == ["cpuft: node 2 has gone: the job ends, and another attempt resumes the run"]


@pytest.mark.proof
def test_all_nodes_end_when_the_main_node_dies(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path))) as job:
        wait_until_said(job, "begun")
        job.send(0, signal.SIGKILL)
        assert job.end() == [-signal.SIGKILL, 75, 75]
    assert job.said(1) == "cpuft: error: node 1 has lost the main node 127.0.0.1: see the log there\n"


@pytest.mark.proof
def test_sigterm_of_any_node_reaches_the_command_once(tmp_path: Path) -> None:
    """Which is told once, though Batch tells all nodes, and has its time: all stay until it ends."""
    waits = "trap 'echo told; end=1' TERM; echo begun; while [ ! $end ]; do sleep 0.1; done; sleep 3; exit 75"
    with open_job(make_job(tmp_path, shell(waits, tmp_path))) as job:
        wait_until_said(job, "begun")
        job.send(1, signal.SIGTERM)
        wait_until_said(job, "told\n")
        job.send(0, signal.SIGTERM)
        assert job.end() == [75, 75, 75]
    assert job.said(0).splitlines() == ["begun", "cpuft: node 1 of the job received an interruption notice", "told"]


@pytest.mark.proof
def test_a_node_gives_up_without_a_main_node(tmp_path: Path) -> None:
    with open_job(make_job(tmp_path, shell(WAITS, tmp_path), seconds=2), nodes=(1,)) as job:
        assert job.end() == [75]
    assert job.said(1).startswith("cpuft: error: node 1 did not reach the main node 127.0.0.1 port")
    assert job.said(1).count("\n") == 1


@pytest.mark.parametrize(
    "words, code, said",
    [("work true", 75, "cpuft: error: [Errno 2] No usable temporary directory"), ("--register .", 255, "")],
    ids=["the main node", "registering there"],
)
def test_a_full_disk_lets_another_attempt_try(words: str, code: int, said: str, tmp_path: Path) -> None:
    job = variables_of("batch", 0, 3, "") | {"CPUFT_JOB_TOKEN": SECRET, "SSH_CONNECTION": "10.0.0.2 1 10.0.0.1 2"}
    done = run_shell(f"ulimit -f 0; python -m cpuft.schedulers.job_node {words}", **job, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr[: len(said)], done.stderr.count("\n")) == (code, said, int(bool(said)))


def test_a_wrong_call_is_answered_in_one_line() -> None:
    said = "cpuft: error: this is not a node of a job of AWS Batch, dstack, SkyPilot: start it"
    command = [sys.executable, "-m", "cpuft.schedulers.job_node", "/proc/x", "true"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr[: len(said)], done.stderr.count("\n")) == (2, "", said, 1)
