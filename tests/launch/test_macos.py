"""Trying out training on macOS, which `tests.system` imitates; its mpirun is this machine's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpuft.errors import RESUMABLE
from cpuft.rank.kill import find_processes
from cpuft.record import read_record
from tests.system import imitate
from tests.test_systems import MPIRUN, run_there

TRAIN = ("-m", "cpuft", "launch", "--np=2", "--task=demo", "--backend=gloo", "--run-dir=run", f"--mpirun={MPIRUN}")


def test_a_mac_trains_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", f"{sys.prefix}/lib/libmpi.so.12")  # else mpi4py looks for that of macOS
    done = run_there("darwin", tmp_path, *TRAIN, "--max-steps", "2", "--backend=mpi")  # gloo in the other tests
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "cpuft: this machine has macOS, on which you can only try out training: its ranks have no cores "
    )
    assert "the compiled kernels are not used on" in done.stderr
    assert "(cpuft has none for macOS): training without them is slower, on x86-64 2 to 3 times" in done.stderr
    ranks = read_record(f"{tmp_path}/run").header.ranks
    assert [len(rank.cpus) for rank in ranks] == [max(1, (os.cpu_count() or 1) // 2)] * 2
    monkeypatch.setenv("PATH", f"{Path(MPIRUN).parent}:{os.environ['PATH']}")
    plan = run_there("darwin", tmp_path, "-m", "cpuft", "quickstart", "--dry-run")
    assert (plan.returncode, "-n 2" in plan.stdout) == (0, True), plan.stdout
    (tmp_path / "rows.csv").write_text("text\nhello\nworld\n")
    words = ("predict", "--model", "minilm", "--file", "rows.csv", "--output", "vectors.npy", "--np", "2")
    embedded = run_there("darwin", tmp_path, "-m", "cpuft", *words)
    assert (embedded.returncode, (tmp_path / "vectors.npy").exists()) == (0, True), embedded.stderr


@contextmanager
def training_there(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Train a long run, give it when it begins, and kill what is left of it."""
    places = {"HOME": str(folder), "CPUFT_STATE": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
    environ = os.environ | places | imitate("darwin")
    process = subprocess.Popen(
        [sys.executable, *TRAIN, "--max-steps", "1000"], cwd=folder, env=environ, stdout=-1, stderr=-2, text=True
    )
    try:
        assert process.stdout
        assert any("the compiled kernels are not used" in line for line in process.stdout)
        yield process
    finally:
        process.kill()
        process.wait()
        for left in find_left(folder):
            os.kill(left, signal.SIGKILL)


def find_left(folder: Path) -> list[int]:
    return find_processes(f"{folder}/run", owner=9)


def test_ctrl_c_on_a_mac_saves_a_checkpoint(tmp_path: Path) -> None:
    with training_there(tmp_path) as process:
        stacks = run_there("darwin", tmp_path, "-m", "cpuft", "stacks", "run")
        assert stacks.stderr.startswith("cpuft: error: cpuft stacks of a run on this machine needs Linux, and this ")
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=60)[0]
        assert process.returncode == RESUMABLE, text
        assert f"continue with cpuft launch --resume {tmp_path}/run" in text
        assert find_left(tmp_path) == []


@pytest.mark.parametrize("victim", ["cpuft", "cpuft.rank"])
def test_on_a_mac_ranks_end_with_their_parents(victim: str, tmp_path: Path) -> None:
    with training_there(tmp_path) as process:
        assert len(find_left(tmp_path)) >= 4
        if victim == "cpuft":
            process.kill()
            process.wait()
        else:
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in find_left(tmp_path)}
            os.kill(next(pid for pid, words in commands.items() if b"cpuft.rank" in words[3:4]), signal.SIGKILL)
        end = time.monotonic() + 15
        while find_left(tmp_path) and time.monotonic() < end:
            time.sleep(0.1)
        assert find_left(tmp_path) == []
