"""The loop of provisioning: gather facts, plan what is missing, do it, look again."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.files import hash_text
from cpuft.plan import Plan, Step

F = TypeVar("F")
Say = Callable[[str], None]
_STAGE_SECONDS = 3600.0
"""A gigabyte of wheels over a slow line."""


def reconcile(
    gather: Callable[[], F], plan: Callable[[F], Plan], say: Say, run: Callable[[Plan, Say], None] | None = None
) -> F:
    """Execute plans until one is empty, by `run_stages` or by `run`; the facts that were found last.

    Raises CpuftError: a step failed (all that failed are named), or the same plan came twice.
    """
    before: Plan | None = None
    while True:
        facts = gather()
        missing = plan(facts)
        if not missing.stages:
            return facts
        if missing == before:
            steps = "; ".join(step.why for stage in missing.stages for step in stage)
            raise CpuftError(f"these steps ran and changed nothing: {steps}: look at what they do with --dry-run")
        (run or run_stages)(missing, say)
        before = missing


def run_stages(plan: Plan, say: Say) -> None:
    """Execute a plan. Raises CpuftError that names every step that failed."""
    execute.run_stages(plan, os.environ, _STAGE_SECONDS, say, "correct that and run the same command again")


def plan_file(path: str, text: str, why: str, mode: str = "644", host: str = "") -> Step:
    """Write a file beside its place and rename it, making its directory. A link that lies there is not followed.

    A folder that is made is writable by its owner only: cpuft trusts no entry in a folder that others may write to.
    """
    script = 'set -eC; umask go-w; mkdir -p "${1%/*}"; rm -f "$1.new"; cat >"$1.new"; chmod "$2" "$1.new"; '
    script += 'mv -f "$1.new" "$1"'
    return Step(why, ("sh", "-c", script, "write", path, mode), host=host, stdin=text)


def plan_files(texts: Mapping[str, str], found: Mapping[str, str], why: str) -> list[Step]:
    """Write those of `texts`, by path, that are not what was `found`, on this machine."""
    return [plan_file(path, text, why) for path, text in texts.items() if found.get(path) != text]


@contextmanager
def lock(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """Keep a second `cpuft provision` off the cluster at `path`, by a socket's name: it ends with whoever has it.

    Raises CpuftError: another one works on it for `seconds`.
    """
    end = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as mark:
        while True:
            try:
                mark.bind(f"\0cpuft-provision-{hash_text(os.path.realpath(path), 32)}")
                break
            except OSError:
                if time.monotonic() > end:
                    held = f"another cpuft provision has worked on {path.name} for {seconds:.0f} s"
                    raise CpuftError(f"{held}: wait for its end") from None
                time.sleep(0.2)
        yield
