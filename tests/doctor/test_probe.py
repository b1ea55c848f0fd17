"""What the probe finds on a host."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from cpuft.doctor import probe
from cpuft.doctor.probe import find_leftovers, read_mpi, sample_cpu
from tests.provision.simulated import needs_root

RUNS = ("cpuft-0/0123456789ab", "cpuft-0/0123456789ab.sent")
OTHERS = (
    "cpuft-inputs",
    "cpuft-0/inputs",
    "cpuft-0",
    "cpuft-0123456789ab",
    "cpuft-0/0123456789ab; cd; rm -r *",
    "cpuft-0/0123456789ab.d",
)


def make(root: Path, names: tuple[str, ...], hours: float = 25) -> None:
    """Make folders that were last changed `hours` ago."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in names:
        os.utime(root / name, (time.time() - hours * 3600,) * 2)


def left(root: Path) -> list[str]:
    return sorted(text for text in find_leftovers(str(root)) if text.startswith(str(root)))


def test_kernels_come_from_a_compiler_or_from_provisioning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "site"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert probe.find_kernels() == ""
    library = tmp_path / "site" / "cpuft_kernels" / "kernels-0123456789abcdef-avx2.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert probe.find_kernels() == str(library)
    library.unlink()
    own = tmp_path / "site" / "cpuft/train/fast/compiled" / library.name
    own.parent.mkdir(parents=True)
    own.touch()
    assert probe.find_kernels() == str(own)
    (tmp_path / "c++").touch(mode=0o755)
    assert probe.find_kernels() == str(tmp_path / "c++")


def test_the_build_of_the_kernels_is_told_by_the_cpuft_of_the_host() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUFT_KERNELS", "0")
        assert probe.describe_kernels() == "none: CPUFT_KERNELS=0"
        patch.setitem(sys.modules, "cpuft.compiler", None)
        assert probe.describe_kernels() == ""


@pytest.mark.parametrize("module", probe.RUN_MODULES)
def test_the_modules_of_a_run_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_folders_of_runs_are_left_over_after_a_day(tmp_path: Path) -> None:
    make(tmp_path, (*RUNS, *OTHERS))
    make(tmp_path, ("cpuft-0/ba9876543210",), hours=23)
    assert left(tmp_path) == sorted(f"{tmp_path}/{name}" for name in RUNS)


@pytest.mark.parametrize("kept", ["run/checkpoints/12.4", "run/state.json"])
def test_folders_with_what_was_not_fetched_are_told_apart(tmp_path: Path, kept: str) -> None:
    """An interrupted run has its only checkpoints there, or a finished one its only model."""
    make(tmp_path, (f"{RUNS[1]}/{kept}", RUNS[1], RUNS[0]))
    assert left(tmp_path) == sorted([f"{tmp_path}/{RUNS[1]}{probe.UNFETCHED}", f"{tmp_path}/{RUNS[0]}"])


@pytest.mark.parametrize("name", RUNS)
def test_a_long_run_is_not_left_over(tmp_path: Path, name: str) -> None:
    make(tmp_path, (name,))
    environ = dict(os.environ) | {"CPUFT_RUN_DIR": f"{tmp_path}/{name}/run"}
    # It starts no program: while a process does, its environment cannot be read for a moment.
    command = ("sh", "-c", "echo; read line")
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = left(tmp_path)
        process.kill()
    assert found == []
    assert left(tmp_path) == [f"{tmp_path}/{name}"]


def test_a_folder_that_a_run_removes_meanwhile_is_not_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(path: str) -> bool:
        if path.startswith(str(tmp_path)):
            shutil.rmtree(path)
        return path.startswith(str(tmp_path))

    make(tmp_path, RUNS[:1])
    monkeypatch.setattr(probe, "_is_own", remove)
    assert left(tmp_path) == []


@needs_root
def test_directories_of_other_users_are_ignored(tmp_path: Path) -> None:
    make(tmp_path, RUNS[:1])
    os.chown(tmp_path / RUNS[0], 65534, 65534)
    assert left(tmp_path) == []


@pytest.mark.parametrize(("job", "found"), [({"SLURM_JOB_ID": "7"}, "slurm-wlm 22.05.8"), ({}, "")])
def test_srun_counts_as_mpirun_in_a_slurm_job(job: dict[str, str], found: str, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    (tmp_path / "srun").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PATH": str(tmp_path), **job}.items():
            patch.setenv(name, value)
        assert read_mpi("/nowhere") == found


def test_busy_cores_are_seen_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            busy, stolen = sample_cpu()
        finally:
            spinning.kill()
    assert busy > 0.5
    assert 0 <= stolen <= 1


@pytest.mark.parametrize(("peers", "order"), [(16, ["login", "ports"]), (17, ["ports", "login"])])
def test_logins_to_many_hosts_wait_until_their_probes_have_started(
    peers: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def log_in(options: list[str], names: list[str]) -> dict[str, str]:
        seen.append("login")
        return dict.fromkeys(names, "")

    def try_ports(*given: object) -> dict[str, object]:
        time.sleep(0.3)
        seen.append("ports")
        return {}

    monkeypatch.setattr(probe, "try_ssh", log_in)
    monkeypatch.setattr(probe, "try_ports", try_ports)
    names = [f"n{number}" for number in range(peers)]
    asked = {"port": 0, "peers": [], "seconds": 1.0, "ssh_options": [], "ssh_peers": names}
    assert probe.examine(asked | {"kernels": False})["ssh"] == dict.fromkeys(names, "")
    assert seen == order


def test_a_rank_that_outlived_its_mpirun_is_named_by_its_module(tmp_path: Path) -> None:
    """The program that finds the module stands before it on the command line."""
    command = [sys.executable, "-c", "import time; time.sleep(60)" + " " * 80, "cpuft.rank", "one"]
    # Its parent ends at once, so that process 1, or the reaper of this session, gets it.
    orphan = f"import subprocess as s; print(s.Popen({command!r}, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    done = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    try:
        parent = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").partition("PPid:\t")[2].partition("\n")[0]
        found = [text for text in find_leftovers(str(tmp_path)) if text.startswith(f"pid {pid}:")]
        is_left = parent == "1" and b"python" not in Path("/proc/1/cmdline").read_bytes()
        assert found == ([f"pid {pid}: cpuft.rank one"] if is_left else [])
    finally:
        os.kill(pid, signal.SIGKILL)


@needs_root
def test_the_ranks_of_a_launch_that_is_the_first_process_of_a_container_are_not_left_over() -> None:
    program = (
        "import subprocess, sys\n"
        "from cpuft.doctor.probe import find_leftovers\n"
        "child = [sys.executable, '-c', 'input()', 'cpuft.rank']\n"
        "with subprocess.Popen(child, stdin=subprocess.PIPE) as rank:\n"
        "    print(find_leftovers('/none'))\n"
        "    rank.kill()\n"
    )
    first = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", program)
    done = subprocess.run(first, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
