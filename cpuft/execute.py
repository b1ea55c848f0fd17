"""Runs plans; the only module that starts local processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO

from cpuft.plan import Step

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0
"""From a polite signal to SIGKILL; with what mpirun needs to follow, all is gone within 5 s."""


class Interrupted(Exception):
    """The run was stopped by a signal to this process."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class Answer:
    """What a command said, and how it ended."""

    exit_code: int
    output: str


def run_quietly(
    command: tuple[str, ...], seconds: float, stdin: str = "", settings: Mapping[str, str] | None = None
) -> Answer:
    """Run a short command and return what it said on both streams; exit code 127 when there is no such program."""
    environ = dict(os.environ) | dict(settings or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, input=stdin, env=environ)
    except FileNotFoundError:
        return Answer(127, f"no such program: {command[0]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(126, str(error))
    return Answer(done.returncode, done.stdout + done.stderr)


def run_step(
    step: Step, environ: Mapping[str, str], output: IO[bytes] | None, watch: Callable[[], None], seconds: float = 0.0
) -> int:
    """Run one local step to its end and return its exit code (128 + N when signal N ended it).

    Parameters
    ----------
    output: where its two streams go; this process's own when None.
    watch: called about 20 times a second while it runs, and once after.
    seconds: how long it may take; 0 for no limit.

    Raises
    ------
    Interrupted: SIGINT, SIGTERM or SIGHUP came; the step and all it started are gone by then.
    TimeoutError: `seconds` passed; likewise.

    If this process is killed outright, the kernel sends SIGTERM to the step, and mpirun ends its ranks.
    """
    settings = {setting.name: setting.value for setting in step.settings}
    with _signals_raise():
        process = subprocess.Popen(
            step.command,
            env=dict(environ) | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            _wait(process, watch, seconds)
        finally:
            _end(process)
            watch()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], watch: Callable[[], None], seconds: float) -> None:
    start = time.monotonic()
    while process.poll() is None:
        watch()
        time.sleep(_POLL_SECONDS)
        if seconds and time.monotonic() - start > seconds:
            raise TimeoutError(f"{seconds:.0f} s passed")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the process's session behind: SIGTERM, a moment's grace, SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted` inside; a second one does not disturb the cleaning up."""
    received: list[int] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signal_number)
            raise Interrupted(signal_number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
