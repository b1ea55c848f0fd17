"""Killing what is left of a run on a host finds the processes of this run, and no others."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from cpuft.rank import describe_run, kill

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with exactly this environment, and ends it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(environ: dict[str, str], *command: str) -> subprocess.Popen[bytes]:
        path = {"PATH": os.environ["PATH"]}
        started.append(subprocess.Popen(command or ("sleep", "60"), env=path | environ, start_new_session=True))
        # While the kernel loads a program, its environment looks empty.
        while not Path(f"/proc/{started[-1].pid}/environ").read_bytes():
            assert started[-1].poll() is None
        return started[-1]

    yield start_one
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_as_on_a_host(run_dir: str, owner: int = 9) -> str:
    """Run kill.py as the launcher does: from standard input, with the run's folder and the owner as arguments."""
    source = Path(kill.__file__).read_text(encoding="utf-8")
    command = [sys.executable, "-c", "import sys; exec(sys.stdin.read())", run_dir, str(owner)]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True, timeout=20).stdout


@pytest.mark.parametrize("module", [kill, describe_run])
def test_what_hosts_run_needs_no_newer_python_than_3_6(module: ModuleType) -> None:
    """Newer ones refuse none of it. The import of annotations from the future came with 3.7."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 6))
    assert "__future__" not in text
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            assert not isinstance(getattr(node, name, None), ast.Subscript | ast.BinOp)


def test_a_newline_in_the_folder_matches_no_other_variable(start: Start, tmp_path: Path) -> None:
    run_dir = f"{tmp_path}/run\n\nSTRANGER=1"
    own = start({"CPUFT_RUN_DIR": run_dir})
    strangers = [start({"STRANGER": "1"}), start({}), start({"CPUFT_RUN_DIR": f"{tmp_path}/run"})]
    assert run_as_on_a_host(run_dir).split() == [str(own.pid)]
    assert own.wait(5) == -signal.SIGKILL
    assert [process.poll() for process in strangers] == [None, None, None]


def test_only_processes_with_exactly_this_variable_are_killed(start: Start, tmp_path: Path) -> None:
    run_dir = f"{tmp_path}/run"
    names = ({"CPUFT_RUN_DIR": f"{run_dir}-2"}, {"CPUFT_RUN_DIR": f"{run_dir}/logs"}, {"MY_CPUFT_RUN_DIR": run_dir})
    strangers = [start(environ) for environ in (*names, {"TEXT": f"CPUFT_RUN_DIR={run_dir}"})]
    assert run_as_on_a_host(run_dir) == ""
    assert [process.poll() for process in strangers] == [None] * 4


def test_mpiruns_process_above_a_rank_is_killed_too_and_its_parent_is_not(start: Start, tmp_path: Path) -> None:
    starter = tmp_path / "hydra_pmi_proxy"
    shutil.copy(shutil.which("bash") or "/bin/bash", starter)
    run_dir = f"{tmp_path}/run"
    script = f"'{starter}' -c 'CPUFT_RUN_DIR={run_dir} sleep 60 & echo $$; wait'; echo still there; sleep 60"
    above = start({}, "bash", "-c", f"exec >'{tmp_path}/output'; {script}")
    while not (tmp_path / "output").exists() or not (tmp_path / "output").read_text():
        assert above.poll() is None
    proxy = int((tmp_path / "output").read_text())
    pids: list[int] = []
    while len(pids) < 2:
        pids = kill.find_processes(run_dir, 9)
    assert pids[1:] == [proxy]
    # mpirun's process may end by itself as soon as its rank has ended.
    assert run_as_on_a_host(run_dir).split() in ([str(pids[0])], [str(pid) for pid in pids])
    while "still there" not in (tmp_path / "output").read_text():
        assert above.poll() is None
    assert kill.find_processes(run_dir, 9) == []


def test_it_kills_neither_itself_nor_anything_for_an_empty_folder(start: Start) -> None:
    stranger = start({"CPUFT_RUN_DIR": ""})
    assert kill.find_processes("", 9) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUFT_RUN_DIR", "/nowhere/run")
        assert run_as_on_a_host("/nowhere/run") == ""
    assert stranger.poll() is None


def test_processes_of_other_users_are_never_killed(start: Start, tmp_path: Path) -> None:
    own = start({"CPUFT_RUN_DIR": str(tmp_path)})
    assert kill.find_processes(str(tmp_path), 9, uid=os.geteuid() + 1) == []
    assert kill.find_processes(str(tmp_path), 9) == [own.pid]


def test_a_detached_command_is_killed_and_those_of_other_runs_are_not(start: Start, tmp_path: Path) -> None:
    words, place = ("sh", "-c", "sleep 60; :"), f"{tmp_path}/detached/0123456789ab/run"
    names = f"--run-dir={place}/x", f"--run-dir={place}/x-2", f"--run-dir={tmp_path}/0123456789ab/x", f"{place}/x"
    own, *strangers = [start({}, *words, name) for name in names]
    assert run_as_on_a_host(f"{tmp_path}/0123456789ab/x").split() == [str(own.pid)]
    assert [process.poll() for process in strangers] == [None] * 3


def test_processes_of_later_starts_stay(start: Start, tmp_path: Path) -> None:
    """Another launcher has started the run again. Those of earlier starts may have no ranks yet, only mpirun or ssh."""
    run_dir, owners = f"{tmp_path}/run", (1, 2, 10)
    marked = [start({"CPUFT_RUN_DIR": run_dir, "CPUFT_OWNER": str(owner)}) for owner in owners]
    wait = ("sh", "-c", "sleep 60; :")
    named = [start({}, *wait, f"{tmp_path}/{kill.SSH_NAME}{owner}") for owner in owners]
    strangers = [start({}, *wait, name) for name in (kill.SSH_NAME, f"{tmp_path}/other/{kill.SSH_NAME}1", run_dir)]
    killed = [process.pid for process in (*marked[:2], *named[:2])]
    assert sorted(map(int, run_as_on_a_host(run_dir, 2).split())) == sorted(killed)
    assert [process.poll() for process in (marked[2], named[2], *strangers)] == [None] * 5
