"""Real hangs: the rank that blocks the others is named during the hang and at the end."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import run_cpuft
from tests.launch import hanging

SCRIPT = hanging.__file__
LINES = {text.strip(): number for number, text in enumerate(Path(SCRIPT).read_text(encoding="utf-8").splitlines(), 1)}
ADDS = LINES["dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)"]
LEAVES = LINES["dist.barrier()"]
KEEPS = LINES["sum(itertools.repeat(0, 1 << 36))"]


def start(*words: str) -> subprocess.Popen[str]:
    Path("hosts").write_text("localhost slots=3\n", encoding="utf-8")
    command = [sys.executable, "-m", "cpuft", "launch", "--hostfile", "hosts", "--no-check", "--run-dir", "run", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.proof
def test_a_hang_in_torchs_own_gloo_is_diagnosed_during_the_hang_and_at_the_timeout() -> None:
    with start("--np", "3", "--", SCRIPT, "torch", "elsewhere", "1", "30") as launch:
        limit = time.monotonic() + 120
        verdict = "cpuft: rank 1 on localhost blocks the others (ranks 0, 2 wait in all_reduce #6 of group 1): "
        verdict += f"it is in barrier #1 of the world, at {SCRIPT}:{LEAVES} in go_elsewhere"
        said = ""
        while verdict not in said and launch.poll() is None and time.monotonic() < limit:
            time.sleep(0.2)
            asked = run_cpuft("stacks", "run")
            said = asked.stdout
        assert launch.stderr
        errors = launch.stderr.read()
    assert verdict in said.splitlines(), errors
    assert asked.returncode == 0
    rows = [line.split() for line in said.splitlines() if re.match(r" [012] ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[-3].rpartition(":")[2] for row in rows] == [str(ADDS), str(LEAVES), str(ADDS)]
    assert errors.splitlines()[-1] == verdict
    assert launch.returncode == 1
    assert f"location: {SCRIPT}:{ADDS} in main" in Path("run/logs/rank-2.stack").read_text()
    over = run_cpuft("stacks", "run")
    assert (over.returncode, over.stderr) == (
        2,
        "cpuft: error: no run is active in the folder run: the run has ended, or no cpuft launch of yours on "
        "this machine started it; look into run/logs for what its ranks printed\n",
    )


@pytest.mark.proof
def test_c_code_that_holds_the_gil_is_named_with_its_line() -> None:
    with start("--np", "2", "--", SCRIPT, "gloo", "gil", "1", "4") as launch:
        assert launch.stderr
        lines = launch.stderr.read().splitlines()
    assert launch.returncode == 75
    assert lines[-1] == (
        "cpuft: rank 1 on localhost blocks the others (rank 0 waits in all_reduce #6 of group 1): "
        f"it is at {SCRIPT}:{KEEPS} in keep_the_gil, running in C code that keeps the GIL"
    )


@pytest.mark.proof
def test_a_long_wait_is_reported_while_the_run_goes_on() -> None:
    begun = time.monotonic()
    with start("--np", "3", "--", SCRIPT, "torch", "elsewhere", "1", "40") as launch:
        assert launch.stderr
        line = next((line for line in launch.stderr if "waiting" in line), "")
        waited = time.monotonic() - begun
        launch.terminate()
        launch.stderr.read()
    assert line == (
        "cpuft: ranks have been waiting for 20 s: rank 1 on localhost blocks the others (ranks 0, 2 wait in "
        f"all_reduce #6 of group 1): it is in barrier #1 of the world, at {SCRIPT}:{LEAVES} in go_elsewhere\n"
    )
    assert waited < 40


def test_stacks_of_a_folder_that_does_not_exist() -> None:
    done = run_cpuft("stacks", "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"cpuft: error: there is no folder {Path.cwd()}/none: give the folder of a run that is "
        "running now, for example runs/mrpc-np2\n"
    )
