"""Programs that stand in for a scheduler's, and for cpuft, in the test's own folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cpuft.schedulers.base import JobLaunch

AWKWARD_MORE = [
    "$$",
    "$(HOME)",
    "$$(HOME)",
    "a\n#SBATCH --uid=0\nb",
    "#",
    "a: [b",
    "- x",
    "*a",
    "~",
    "yes",
]
SAY = "printf '%s\\0' \"$@\" >said\n"
"""Of a program: keep its words."""


def add_program(name: str, script: str) -> str:
    """A shell script on the path of `path_with`; where it is."""
    path = Path("bin", name).absolute()
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return str(path)


def path_with() -> str:
    """Those programs, and what shell scripts need."""
    return f"{Path('bin').absolute()}:/usr/bin:/bin"


def run_script(shell: str, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a job's script as its scheduler would."""
    env = {"PATH": path_with(), "HOME": "/nowhere", **environ}
    return subprocess.run([shell, "-c", text], capture_output=True, text=True, env=env, timeout=120, check=False)


def words_said() -> list[str]:
    """What a program that does SAY was told."""
    return Path("said").read_text(encoding="utf-8").split("\0")[:-1]


def make_launch(value: str) -> JobLaunch:
    """A script of one's own, with a value among the launch's words and among its own."""
    return JobLaunch(("--np", "2", "--iface", value), ("--", "train.py", value), np=2)


def told_of(value: str, *first: str, end: tuple[str, ...] = ("--run-dir", "runs/x")) -> list[str]:
    """What cpuft is to be told of that work."""
    return ["launch", *first, "--np", "2", "--iface", value, *end, "--", "train.py", value]
