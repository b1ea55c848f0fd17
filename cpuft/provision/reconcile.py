"""The loop of every provisioning verb: gather facts, plan what is missing, do it, look again."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.door import Door, attempt
from cpuft.hosts.hostfile import Host
from cpuft.plan import Plan, Step

F = TypeVar("F")
_LAST_LINES = 6
_AT_ONCE = 4
"""Connections to one host: sshd drops new ones at random from its tenth on (MaxStartups 10:30:100)."""

_HERE = Door()
Run = Callable[[Step], Answer]
"""Runs one step."""


def reconcile(
    gather: Callable[[], F], plan: Callable[[F], Plan], run: Run, say: Callable[[str], None], found: F | None = None
) -> F:
    """Execute plans until one is empty; the facts that were found last. `found` are facts gathered just now.

    Raises
    ------
    CpuftError: a step failed (all that failed are named), or the same plan came twice.
    """
    before: Plan | None = None
    while True:
        facts, found = gather() if found is None else found, None
        missing = plan(facts)
        if not missing.stages:
            return facts
        if missing == before:
            steps = "; ".join(step.why for stage in missing.stages for step in stage)
            raise CpuftError(f"these steps ran and changed nothing: {steps}: look at what they do with --dry-run")
        run_stages(missing, run, say)
        before = missing


def run_stages(plan: Plan, run: Run, say: Callable[[str], None]) -> None:
    """Stages one after another, the steps of a stage side by side.

    Raises
    ------
    CpuftError: naming every step of a stage that failed with its host and the last lines it said.
    """
    for stage in plan.stages:
        for why in dict.fromkeys(step.why for step in stage):
            hosts = [step.host for step in stage if step.why == why and step.host]
            say(f"{why}{f' ({len(hosts)} hosts)' if len(hosts) > 1 else ''}")
        answers = attempt(run, stage)
        failures = [_describe(step, answer) for step, answer in zip(stage, answers) if _said(answer) is not None]
        if failures:
            raise CpuftError("; ".join(failures) + ": correct that and run the same command again")


def _said(answer: Answer | CpuftError) -> str | None:
    """What a step said that failed; None of one that did not."""
    if isinstance(answer, CpuftError):
        return str(answer)
    return answer.said if answer.exit_code else None


def _describe(step: Step, answer: Answer | CpuftError) -> str:
    lines = [line.strip() for line in (_said(answer) or "").strip().splitlines() if line.strip()][-_LAST_LINES:]
    where = f"{step.host}: " if step.host else ""
    return f"{where}{step.why}: failed ({' | '.join(lines) or 'it said nothing'})"


def make_runner(door: Door = _HERE, hosts: tuple[Host, ...] = (), seconds: float = 900.0) -> Run:
    """What takes each step to the one of `hosts` that it names, and runs it on this machine when it names none."""
    known = {host.name: host for host in hosts}
    turns = {host.name: threading.BoundedSemaphore(_AT_ONCE) for host in hosts}

    def run(step: Step) -> Answer:
        settings = {setting.name: setting.value for setting in step.settings}
        if not step.host:
            return execute.run_quietly(step.command, seconds, step.stdin, settings, step.stdin_file)
        with turns[step.host]:
            return door.run(known[step.host], step.command, step.stdin, seconds, settings, step.stdin_file)

    return run


def plan_file(path: str, text: str, why: str, mode: str = "644", host: str = "") -> Step:
    """Write a file beside its place and rename it, making its directory. A link that lies there is not followed."""
    script = 'set -eC; mkdir -p "${1%/*}"; rm -f "$1.new"; cat >"$1.new"; chmod "$2" "$1.new"; mv -f "$1.new" "$1"'
    return Step(why, ("sh", "-c", script, "write", path, mode), host=host, stdin=text)


@contextmanager
def lock(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """Keep a second `cpuft provision` off the same cluster. The lock file goes away with the last one that holds it.

    Raises
    ------
    CpuftError: another one works on it for `seconds`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    end = time.monotonic() + seconds
    while True:
        with path.open("w") as file:
            if _try_lock(file.fileno()) and _is_still_there(path, file.fileno()):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                    _remove_empty(path.parent)
                return
        if time.monotonic() > end:
            raise CpuftError(f"another cpuft provision has worked on {path.stem} for {seconds:.0f} s: wait for its end")
        time.sleep(0.2)


def _remove_empty(folder: Path) -> None:
    """Directories that only ever held clusters go away with the last cluster."""
    for path in (folder, *folder.parents):
        if path.name not in ("clusters", "cpuft") or any(path.iterdir()):
            return
        path.rmdir()


def _is_still_there(path: Path, number: int) -> bool:
    """Whether the locked file is the one that others will open, not one that its last holder took away."""
    try:
        return path.stat().st_ino == os.fstat(number).st_ino
    except FileNotFoundError:
        return False


def _try_lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
