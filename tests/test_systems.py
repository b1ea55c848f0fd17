"""Heads with macOS or Windows, which `tests.system` imitates: what they do and refuse without ranks of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.record import GradientSizes
from tests.records import make_record, make_steps
from tests.report.test_comparison import write_record
from tests.system import imitate
from tests.test_architecture import MODULES, folder_of

ON_HOSTS = ("rank", "comm", "train", "kernels", "api", "__main__")
"""Folders and modules that are only for machines with ranks."""
ON_A_MAC = sorted(name for name in MODULES if name != "cpuft" and folder_of(name) not in ON_HOSTS)
MPIRUN = Path(sys.executable).with_name("mpirun")
NOT_ON_WINDOWS = {"cpuft.hosts.mpijob": "only pods of Kubernetes import it, and they have Linux"}
"""Modules for a Mac that Windows cannot import, and why no verb needs them there."""


def run_there(system: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"HOME": str(folder), "CPUFT_STATE": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
    environ = os.environ | places | (imitate(system) if system != "linux" else {})
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "system, modules", [("darwin", ON_A_MAC), ("win32", [name for name in ON_A_MAC if name not in NOT_ON_WINDOWS])]
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
        ("quickstart",),
        ("provision", "local", "--name", "lab"),
    ],
)
def test_ranks_on_windows_are_refused_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run_there("win32", tmp_path, "-m", "cpuft", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert " needs Linux, and this machine has Windows: " in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--np", "2", "--task", "demo", "--detach", f"--mpirun={MPIRUN}"),
        ("provision", "local", "--name", "lab"),
        ("doctor",),
    ],
)
def test_a_mac_refuses_in_one_line_what_needs_linux(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run_there("darwin", tmp_path, "-m", "cpuft", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert " needs Linux, and this machine has macOS: " in done.stderr


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


@pytest.mark.parametrize("kind", ["kubernetes", "trainjob", "batch", "dstack", "skypilot"])
def test_windows_submits_the_job_that_linux_submits(kind: str, tmp_path: Path) -> None:
    more = ("--queue", "q", "--secret", "s", "--role", "r") if kind == "batch" else ()
    words = ("-m", "cpuft", "submit", kind, "--name", "x", "--image", "i", *more)
    launch = ("--", "launch", "--np", "2", "--task", "mrpc", "--", "a b.py", "$x")
    done = [run_there(system, tmp_path, *words, "--dry-run", *launch) for system in ("linux", "win32")]
    assert (done[1].returncode, done[1].stdout) == (0, done[0].stdout), done[1].stderr
    assert " --np 2 --task mrpc " in done[1].stdout


def test_windows_gives_a_client_the_job_and_refuses_other_submissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("-m", "cpuft", "submit", "dstack", "--name", "x", "--image", "i")
    launch = ("--", "launch", "--np", "2")
    without = run_there("win32", tmp_path, *words, *launch)
    assert without.stderr.startswith("cpuft: error: dstack failed (no such program: dstack): "), without.stderr
    # Windows starts no program of the working folder if this variable is there.
    none = '[ $1 != ps ] || exec echo "{\\"runs\\": []}"'
    shows = 'cat > given; echo "${#CPUFT_JOB_TOKEN} $NODEFAULTCURRENTDIRECTORYINEXEPATH" >> given'
    with_program(tmp_path, monkeypatch, "dstack", f"{none}; {shows}")
    shown, done = (run_there("win32", tmp_path, *words, *more, *launch) for more in (["--dry-run"], []))
    assert (done.returncode, done.stdout) == (0, "dstack:x\n"), done.stderr
    assert (tmp_path / "given").read_text() == f"{shown.stdout}64 1\n"
    for system, name in (("win32", "Windows"), ("darwin", "macOS")):
        refused = run_there(system, tmp_path, "-m", "cpuft", "submit", "slurm", "--dry-run", *launch)
        said = f"cpuft submit slurm needs Linux, and this machine has {name}: run it on a login node"
        assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", f"cpuft: error: {said}\n")


def test_windows_lists_what_it_would_push(tmp_path: Path) -> None:
    words = ("-m", "cpuft", "push", "run", "team/model", "--dry-run")
    missing = run_there("win32", tmp_path, *words)
    said = "cpuft: error: there is no folder run: give the folder of an earlier run\n"
    assert (missing.returncode, missing.stderr) == (2, said)
    (tmp_path / "run/model/1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json", "train.csv"):
        (tmp_path / "run/model" / name).write_text("{}")
    done = run_there("win32", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()[1:-1]] == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
    ]
    assert done.stderr.endswith("\nnot uploaded: train.csv\n")


def test_windows_asks_a_host_that_does_not_answer_for_logs(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 port=1\n")
    done = run_there("win32", tmp_path, "-m", "cpuft", "logs", "0123456789ab", "--hostfile", "hosts")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (75, "", 1), done.stderr
    said = "cpuft: error: detached run 0123456789ab was not found, and host 127.0.0.1 cannot be used over ssh ("
    assert done.stderr.startswith(said)


SHOW_PAST = """
from cpuft.cli import main
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.launch import find_runs
from cpuft.launch.detached import Detached, Head
from cpuft.launch.detached_head import Order
run = Detached(Head(Host("node1", port=22), Access()), Order("0123456789ab", "launch", "/there/run", ()), "")
find_runs.find_run = lambda *given: (run, None)  # the host has answered
main(["logs", "0123456789ab"])
"""


def test_windows_shows_logs_through_an_ssh_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = """'7 {"kind": "output", "text": "step 1"}' '9 {"kind": "past"}'"""
    with_program(tmp_path, monkeypatch, "ssh", f"echo $$ > process; printf '%s\\n' {events}; exec sleep 30")
    done = run_there("win32", tmp_path, "-c", SHOW_PAST)
    assert (done.returncode, done.stdout, done.stderr) == (0, "step 1", "")
    assert not Path("/proc", (tmp_path / "process").read_text().strip()).exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    without = run_there("win32", tmp_path, "-c", SHOW_PAST)
    said = "run 0123456789ab is shown through ssh, which this machine does not have: install it\n"
    assert (without.returncode, without.stderr) == (2, f"cpuft: error: {said}")


def with_program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a shell script first into PATH."""
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")


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


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_one_provision_at_a_time_changes_a_cluster(system: str, tmp_path: Path) -> None:
    done = run_there(system, tmp_path, "-c", LOCK_TWICE)
    said = "another cpuft provision has been changing lab for 0 s: wait until it ends"
    assert done.stdout.splitlines() == ["held", said], done.stderr
