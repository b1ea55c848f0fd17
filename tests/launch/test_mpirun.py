"""The command lines of Intel MPI, MPICH, Open MPI and srun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation, parse_version
from cpuft.hosts.rank_counts import Assignment
from cpuft.launch.mpirun import RankGroup, mpirun_settings, plan_mpirun
from cpuft.plans import Plan, Setting, Step, format_plan
from tests.conftest import Golden

VERSIONS = {
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\nCopyright 2003-2026",
    "openmpi": "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
    "mpich": "HYDRA build details:\n    Version:                                 4.0.2\n",
    "srun": "slurm-wlm 22.05.8\n",
}


def make_group(host: str, ranks: int, settings: tuple[Setting, ...]) -> RankGroup:
    return Assignment(Host(host), ranks), settings


GROUPS = (
    make_group("node1", 2, (Setting("OMP_NUM_THREADS", "16", ""), Setting("X", "a b", ""))),
    make_group("node2", 1, (Setting("OMP_NUM_THREADS", "32", ""),)),
)
SHARED = (Setting("MASTER_ADDR", "10.0.0.1", ""),)


@pytest.mark.parametrize("name, text", VERSIONS.items())
def test_implementations_are_recognized_by_their_version_text(name: str, text: str) -> None:
    assert parse_version("/usr/bin/mpirun", text) == MpiImplementation("/usr/bin/mpirun", name)


def test_another_program_is_not_accepted_as_mpirun() -> None:
    with pytest.raises(CpuftError, match=r"/bin/ls is not an mpirun that cpuft knows \(its --version prints: ls 9\)"):
        parse_version("/bin/ls", "ls 9\n")


@pytest.mark.parametrize("name", ["intel", "mpich"])
def test_percent_signs_in_the_log_folder_are_escaped_for_hydra(name: str) -> None:
    words = plan_mpirun(MpiImplementation("mpirun", name), GROUPS, SHARED, ("true",), "/runs/50%rate/logs", "ens5")
    assert words[words.index("-outfile-pattern") + 1] == "/runs/50%%rate/logs/rank-%r.out"
    assert words[words.index("-errfile-pattern") + 1] == "/runs/50%%rate/logs/rank-%r.err"


@pytest.mark.parametrize("folder", ["/runs/a:b", "/runs/a,b"])
def test_characters_that_open_mpi_takes_for_options_are_refused(folder: str) -> None:
    with pytest.raises(CpuftError, match=f"in {folder}/logs for options: give another --run-dir"):
        plan_mpirun(MpiImplementation("mpirun", "openmpi"), GROUPS, SHARED, ("true",), f"{folder}/logs", "ens5")


@pytest.mark.parametrize("name", VERSIONS)
def test_command_lines(name: str, golden: Golden) -> None:
    mpi = MpiImplementation("mpirun", name)
    words = plan_mpirun(mpi, GROUPS, SHARED, ("python", "train.py", "--lr", "1"), "/run/logs", "ens5")
    options = () if name == "srun" else ("-F", "/etc/ssh_config")
    step = Step("start", words, mpirun_settings(mpi, options, as_root=True))
    golden(f"mpirun-{name}.sh", format_plan(Plan(((step,),))))


def test_percent_signs_in_the_log_folder_are_escaped_for_srun() -> None:
    words = plan_mpirun(MpiImplementation("srun", "srun"), GROUPS, SHARED, ("true",), "/runs/50%rate/logs", "ens5")
    assert {"--output=/runs/50%%rate/logs/rank-%t.out", "--error=/runs/50%%rate/logs/rank-%t.err"} <= {*words}
    assert mpirun_settings(MpiImplementation("srun", "srun"), (), False, "slurm") == ()


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_each_task_of_srun_has_the_settings_of_its_own_host(host: str) -> None:
    awkward = {"A": "a 0", "B": 'a"=0"', "C": "a'; echo foo", "D": "$HOME", "E": "one\ntwo", "F": "--", "G": "@node2"}
    groups = tuple(
        make_group(name, 1, (*(Setting(*one, "") for one in awkward.items()), Setting("OWN", name, "")))
        for name in ("node1", "node2", "node11")
    )
    show = (
        sys.executable,
        "-c",
        "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))",
        "--",
        ":",
    )
    words = plan_mpirun(MpiImplementation("srun", "srun"), groups, SHARED, show, "/run/logs", "ens5")
    command = words[words.index("env") :]
    done = subprocess.run(command, env={"SLURMD_NODENAME": host, "PATH": "/bin"}, capture_output=True, text=True)
    found, rest = json.loads(done.stdout)
    assert found.items() >= (awkward | {"OWN": host, "MASTER_ADDR": "10.0.0.1"}).items()
    assert rest == ["--", ":"]


def test_a_task_on_an_unplanned_host_fails() -> None:
    words = plan_mpirun(MpiImplementation("srun", "srun"), GROUPS, SHARED, ("true",), "/run/logs", "ens5")
    done = subprocess.run(words[words.index("env") :], env={"SLURMD_NODENAME": "node3", "PATH": "/bin"}, timeout=10)
    assert done.returncode


@pytest.mark.parametrize(
    ("name", "setting"),
    [("intel", "I_MPI_HYDRA_BOOTSTRAP"), ("mpich", "HYDRA_LAUNCHER"), ("openmpi", "OMPI_MCA_plm")],
)
def test_in_a_slurm_job_srun_starts_the_proxies(name: str, setting: str) -> None:
    own = {one.name: one.value for one in mpirun_settings(MpiImplementation("mpirun", name), (), False, "slurm")}
    assert own.items() >= {(setting, "slurm"), ("SLURM_OVERLAP", "1"), ("SLURM_CPU_BIND", "none")}
    assert mpirun_settings(MpiImplementation("mpirun", name), (), False) == ()


LOGIN = """#!/bin/sh
echo "$(cat /proc/$PPID/comm)" >>"$(dirname "$0")/logins"
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
"""In place of ssh: notes which program logs in, and runs the command here."""


def test_no_host_but_the_head_host_logs_in_to_others(tmp_path: Path) -> None:
    """Without the setting, Intel MPI's proxies log in to the hosts after the sixteenth."""
    login = tmp_path / "ssh"
    login.write_text(LOGIN)
    login.chmod(0o755)
    path = Path(sys.executable).with_name("mpirun")
    hosts = [f"127.0.1.{number}" for number in range(1, 21)]
    (tmp_path / "logs").mkdir()
    groups = tuple(make_group(host, 1, ()) for host in hosts)
    words = plan_mpirun(MpiImplementation(str(path), "intel"), groups, (), ("true",), f"{tmp_path}/logs", "lo")
    own = {one.name: one.value for one in mpirun_settings(MpiImplementation("", "intel"), (), False, hosts=len(hosts))}
    environ = {**os.environ, **own, "PATH": f"{path.parent}:{os.environ['PATH']}"}
    command = (words[0], "-launcher-exec", str(login), *words[1:])
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "logins").read_text().split() == ["mpiexec.hydra"] * (len(hosts) - 1)


@pytest.mark.parametrize(("name", "most"), [("intel", 16), ("openmpi", 64), ("mpich", 1000)])
def test_mpirun_is_told_to_log_in_to_all_hosts_itself(name: str, most: int) -> None:
    mpi = MpiImplementation("mpirun", name)
    assert mpirun_settings(mpi, (), False, hosts=most) == ()
    found = {one.name: one.value for one in mpirun_settings(mpi, (), False, hosts=most + 1)}
    expected = {
        "intel": {"I_MPI_HYDRA_BRANCH_COUNT": "17"},
        "openmpi": {"OMPI_MCA_plm_rsh_no_tree_spawn": "1"},
        "mpich": {},
    }
    assert found == expected[name]
    # srun needs no login.
    assert mpirun_settings(mpi, (), False, "slurm", most + 1) == mpirun_settings(mpi, (), False, "slurm")


@pytest.mark.parametrize("name", ["intel", "mpich", "openmpi"])
def test_a_path_that_mpirun_would_split_is_refused(name: str) -> None:
    """The path may have spaces only where no mpirun gets it."""
    mpi = MpiImplementation("mpirun", name)
    for path in ("/home/u/my files/config", "/tab\there"):
        with pytest.raises(
            CpuftError, match="contains white space, which mpirun cannot pass to ssh: give --ssh-config"
        ):
            mpirun_settings(mpi, ("-F", path), False, hosts=2)
