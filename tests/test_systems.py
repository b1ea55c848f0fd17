"""Heads with macOS or Windows, which `tests.system` imitates: what they do without a rank on their own machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.cli import VERBS
from cpuft.record import GradientSizes
from tests.records import make_record, make_steps
from tests.report.test_comparison import write_record
from tests.system import imitate
from tests.test_architecture import MODULES, folder_of

ON_HOSTS = ("rank", "comm", "train", "kernels", "api", "__main__")
"""Folders and modules that are only for machines with ranks."""
ON_A_MAC = sorted(name for name in MODULES if name != "cpuft" and folder_of(name) not in ON_HOSTS)
ON_WINDOWS = ("errors", "estimate", "report", "runs", "stop")
LATER_ON_WINDOWS = [
    *("cpuft.hosts.transport", "cpuft.judge.errors", "cpuft.judge.judgement", "cpuft.launch.detached"),
    *("cpuft.record", "cpuft.report.comparison", "cpuft.report.estimate", "cpuft.report.page", "cpuft.sweep.results"),
]
"""What these verbs import when they are called, apart from what that imports."""


def run_there(system: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"HOME": str(folder), "CPUFT_STATE": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
    environ = os.environ | places | imitate(system)
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "system, modules",
    [("darwin", ON_A_MAC), ("win32", [*(f"cpuft.cli.{verb}" for verb in ON_WINDOWS), *LATER_ON_WINDOWS])],
)
def test_what_a_head_imports_is_on_every_system(system: str, modules: list[str], tmp_path: Path) -> None:
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = run_there(system, tmp_path, "-c", program, *modules)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--np", "2", "--task", "demo", "--dry-run"),
        ("launch", "--np", "2", "--task", "demo", "--detach"),
        ("compare", "--np", "1,2", "--task", "demo"),
        ("sweep", "--task", "demo", "--seed", "1..2"),
        ("predict", "--model", "sentence", "--file", "rows.csv"),
        ("bench", "comm"),
        ("env",),
        ("provision", "local", "--name", "lab"),
    ],
)
def test_a_mac_refuses_ranks_of_its_own_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run_there("darwin", tmp_path, "-m", "cpuft", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert " needs Linux, and this machine has macOS: " in done.stderr


EACH = """
import contextlib, sys
from cpuft.cli import main
for verb in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main([verb, "--help"])
"""


def test_windows_refuses_all_other_verbs_in_one_line(tmp_path: Path) -> None:
    others = sorted(VERBS.keys() - {*ON_WINDOWS})
    done = run_there("win32", tmp_path, "-c", EACH, *others)
    said = "needs Linux, and this machine has Windows: install WSL2 with `wsl --install`, and cpuft in it"
    assert (done.stdout, done.stderr.splitlines()) == ("", [f"cpuft: error: cpuft {verb} {said}" for verb in others])


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_reports_and_estimates_are_made_on_every_system(system: str, tmp_path: Path) -> None:
    record = make_record(gradient_sizes=GradientSizes(10_993_538, 384, 1_000_000, {"1": 700.0}), examples=3668)
    write_record(replace(record, steps=make_steps(20, [0.1])), tmp_path / "run")
    reported = run_there(system, tmp_path, "-m", "cpuft", "report", "run")
    assert (reported.returncode, "mrpc with minilm" in reported.stdout) == (0, True), reported.stderr
    estimated = run_there(system, tmp_path, "-m", "cpuft", "estimate", "run", "--bandwidth", "1gbit")
    assert (estimated.returncode, "1 Gbit/s" in estimated.stdout) == (0, True), estimated.stderr
    listed = run_there(system, tmp_path, "-m", "cpuft", "runs")
    assert (listed.returncode, "results" in listed.stdout) == (0, True), listed.stderr


LOCK_TWICE = """
import sys
from dataclasses import replace
from pathlib import Path
from cpuft.provision.base import lock
with lock(Path("lab")):
    print("held")
    try:
        with lock(Path("lab"), 0.0):
            print("held twice")
    except Exception as error:
        print(error)
"""


def test_one_provision_at_a_time_changes_a_cluster_from_a_mac(tmp_path: Path) -> None:
    done = run_there("darwin", tmp_path, "-c", LOCK_TWICE)
    said = "another cpuft provision has been changing lab for 0 s: wait until it ends"
    assert done.stdout.splitlines() == ["held", said], done.stderr
