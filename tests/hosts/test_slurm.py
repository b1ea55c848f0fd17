"""What Slurm tells a job, read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.slurm import SlurmDoor, find_door, read_hosts
from cpuft.words import parse_counts

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_counts_of_hosts_are_read(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert parse_counts(text) == tuple(count for count, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "x", "2(x", "2,,1", "-1", "2(x3),", "1" * 50])
def test_what_are_no_counts(text: str) -> None:
    assert parse_counts(text) == ()


@pytest.mark.parametrize(
    ("environ", "door"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        (JOB, SlurmDoor(own="n2")),
        (JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, SlurmDoor(own="n2")),
        # A batch script has these of its job, and no step.
        (JOB | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, SlurmDoor(own="n2")),
    ],
    ids=("no Slurm", "half of it", "a script", "a step of one", "a script of four"),
)
def test_where_a_process_runs(environ: dict[str, str], door: SlurmDoor | None) -> None:
    assert find_door(environ) == door


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun starts cpuft launch 4 times"),
        ({"SLURMD_NODENAME": ""}, "on none of its hosts"),
    ],
)
def test_where_it_may_not(changes: dict[str, str], message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        find_door(JOB | changes)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scontrol"
    path.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


@pytest.mark.parametrize(
    ("told", "slots"),
    [
        ({}, (0, 0, 0)),
        ({"SLURM_TASKS_PER_NODE": "1(x3)"}, (0, 0, 0)),
        ({"SLURM_TASKS_PER_NODE": "1,2(x2)", "SLURM_NTASKS": "5"}, (2, 1, 2)),
        ({"SLURM_TASKS_PER_NODE": "1,2", "SLURM_NTASKS": "5"}, (0, 0, 0)),
    ],
    ids=("nothing", "by default", "asked for", "other hosts"),
)
def test_hosts_of_a_job_this_one_first(told: dict[str, str], slots: tuple[int, ...], scontrol: Path) -> None:
    assert read_hosts(JOB | told) == tuple(Host(name, count) for name, count in zip(("n2", "n1", "n3"), slots))


def test_slurm_does_not_answer(scontrol: Path) -> None:
    scontrol.write_text("#!/bin/sh\necho slurm_load_jobs error: Unable to contact >&2\nexit 1\n")
    with pytest.raises(CpuftError, match=r"Slurm does not tell its hosts \(slurm_load_jobs error: Unable to contact\)"):
        read_hosts(JOB)
