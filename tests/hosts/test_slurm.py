"""The hosts of a Slurm job, read from the variables that Slurm sets, and what starts ranks there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.argv import parse_slurm_counts
from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation, find_mpi
from cpuft.hosts.slurm import SlurmTransport, find_transport, read_job_hosts
from cpuft.hosts.transport import SshTransport

OUTSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
JOB = OUTSIDE | {"SLURMD_NODENAME": "n2"}


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_counts_of_hosts_are_read(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert parse_slurm_counts(text) == tuple(count for count, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "x", "2(x", "2,,1", "-1", "2(x3),", "1" * 50])
def test_texts_that_are_not_counts_are_empty(text: str) -> None:
    assert parse_slurm_counts(text) == ()


@pytest.mark.parametrize(
    ("environ", "transport"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        (JOB, SlurmTransport(own="n2")),
        (JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, SlurmTransport(own="n2")),
        # A batch script has these of its job, and no step.
        (JOB | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, SlurmTransport(own="n2")),
        (OUTSIDE, SlurmTransport()),
    ],
    ids=("no Slurm", "half of it", "a script", "a step of one", "a script of four", "a login node's salloc"),
)
def test_the_transport_of_a_process_in_or_outside_of_a_job(
    environ: dict[str, str], transport: SlurmTransport | None
) -> None:
    assert find_transport(environ) == transport


def test_a_launch_started_by_srun_several_times_is_refused() -> None:
    with pytest.raises(CpuftError, match="srun starts cpuft launch 4 times"):
        find_transport(JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"})


INTEL, SRUN = "Intel(R) MPI Library for Linux* OS", "slurm-wlm 22.05.8"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH but for the shell's own; an mpiexec.hydra in it is no reason to take that."""
    for name, says in (("mpirun", INTEL), ("mpiexec.hydra", INTEL), ("srun", SRUN)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    for name in ("sh", "readlink", "dirname"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


HERE, THERE = Host("n2"), Host("n1")


@pytest.mark.parametrize(
    ("removed", "wanted", "found"),
    [
        ((), "", ("mpiexec.hydra", "intel")),
        ((), "srun", ("srun", "srun")),
        (("mpirun",), "", ("srun", "srun")),
    ],
    ids=("mpirun first", "srun asked for", "no mpirun"),
)
def test_ranks_are_started_by_mpirun_or_srun_on_a_host_of_the_job(
    removed: tuple[str, ...], wanted: str, found: tuple[str, str], programs: Path
) -> None:
    for name in removed:
        (programs / name).unlink()
    mpi = find_mpi(HERE, wanted, "/nowhere/python", SlurmTransport(own="n2"))
    assert mpi == MpiImplementation(str(programs / found[0]), found[1])


def test_ranks_are_started_by_srun_from_a_login_node(programs: Path) -> None:
    """The fake srun says its version, whatever it is to start."""
    assert find_mpi(THERE, "", "/nowhere/python", SlurmTransport()) == MpiImplementation("srun", "srun")
    (programs / "srun").write_text(f"#!/bin/sh\necho /opt/mpirun\necho '{INTEL}'\n")
    with pytest.raises(
        CpuftError, match="the job's hosts may not reach back to mpirun on this login node: leave --mpirun out"
    ):
        find_mpi(THERE, "mpirun", "/nowhere/python", SlurmTransport())


def test_srun_is_refused_outside_of_a_job(programs: Path) -> None:
    with pytest.raises(CpuftError, match="srun starts ranks only inside a Slurm job"):
        find_mpi(Host("localhost"), "srun", "/nowhere/python", SshTransport())


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
    assert read_job_hosts(JOB | told) == tuple(Host(name, count) for name, count in zip(("n2", "n1", "n3"), slots))


def test_an_error_of_slurm_is_shown(scontrol: Path) -> None:
    scontrol.write_text("#!/bin/sh\necho slurm_load_jobs error: Unable to contact >&2\nexit 1\n")
    with pytest.raises(
        CpuftError, match=r"Slurm does not name the job's hosts \(slurm_load_jobs error: Unable to contact\)"
    ):
        read_job_hosts(JOB)
