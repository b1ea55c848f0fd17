"""Runs plans; the only module that starts local processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, TextIO

from cpuft.errors import CpuftError, Interrupted
from cpuft.plan import Plan, Step

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
SSH_FAILED = 255
"""ssh's own exit code."""
PIPE = subprocess.PIPE
_POLL_SECONDS = 0.05
_PROGRESS_SECONDS = 20.0
"""How often whoever waits is told how far a task of many steps is."""
_LAST_LINES = 6
_REMIND_SECONDS = 30.0
"""Between lines that tell a waiting user what is not finished."""
_GRACE_SECONDS = 3.0
"""From a polite signal to SIGKILL; with what mpirun needs to follow, all is gone within 5 s."""


@dataclass(frozen=True)
class Answer:
    """What a command said, and how it ended."""

    exit_code: int
    output: str
    errors: str = ""

    @property
    def said(self) -> str:
        """Both streams."""
        return self.output + self.errors


def find_program(name: str) -> str:
    """Return the path of a program, found in PATH or in the system's sbin folders; empty if it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") or ""


def run_quietly(command: Sequence[str], seconds: float, stdin: str = "") -> Answer:
    """Run a short command and return what it said; exit code 127 when there is no such program, 126 for no end."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, input=stdin.encode(), check=False)
    except FileNotFoundError:
        return Answer(127, "", f"no such program: {command[0]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(126, "", str(error))
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def run_step(
    step: Step,
    environ: Mapping[str, str],
    output: IO[bytes] | None,
    watch: Callable[[], None],
    seconds: float = 0.0,
    takes: Callable[[int], bool] = lambda signal_number: False,
) -> int:
    """Run one local step to its end and return its exit code (128 + N when signal N ended it).

    Parameters
    ----------
    output: where its two streams go; passed on to this process's own when None.
    watch: called about 20 times a second while it runs, and once after.
    seconds: how long it may take; 0 for no limit.
    takes: called in a signal's handler; true when that signal is to raise nothing.

    Raises Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; the step and all it started are gone by then.
    Raises TimeoutError: `seconds` passed; likewise.

    If this process is killed outright, the kernel sends SIGTERM to the step, and mpirun ends its ranks.
    """
    with _signals_raise(takes), _input_of(step) as given:
        process = _start(step, environ, given, output)
        relays = [] if output else [_relay(process.stdout, sys.stdout), _relay(process.stderr, sys.stderr)]
        try:
            _wait([process], watch, seconds)
        finally:
            end([process])
            for relay in relays:
                relay.join(_GRACE_SECONDS)
            watch()
    return exit_code(process)


def run_stage(
    stage: Sequence[Step],
    environ: Mapping[str, str],
    seconds: float,
    say_left: Callable[[list[int], float], None] = lambda left, passed: None,
) -> list[Answer]:
    """Run local steps side by side to their ends; what each said, on both streams, and its exit code.

    `say_left` is called every 30 s with the numbers of the steps that have not ended, and with the seconds until then.

    Raises Interrupted, TimeoutError: as `run_step`.
    """
    with _signals_raise(lambda signal_number: False), ExitStack() as stack:
        outputs = [stack.enter_context(open_memory()) for _ in stage]
        inputs = [stack.enter_context(_input_of(step)) for step in stage]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += (_start(step, environ, *pair) for step, *pair in zip(stage, inputs, outputs))
            left = remind(lambda passed: say_left([n for n, one in enumerate(processes) if one.poll() is None], passed))
            _wait(processes, left, seconds)
        finally:
            end(processes)
        return [Answer(exit_code(process), _read(output)) for process, output in zip(processes, outputs)]


def run_stages(plan: Plan, environ: Mapping[str, str], seconds: float, say: Callable[[str], None], advice: str) -> None:
    """Stages one after another, `seconds` for each; whoever waits is told what begins.

    Raises CpuftError: naming every step of a stage that failed, with its host and the last lines it said; ends with
    `advice`.
    Raises Interrupted: as `run_step`.
    """
    steps = [step for stage in plan.stages for step in stage]
    told: dict[str, float] = {}
    done = 0
    for stage in plan.stages:
        for part in dict.fromkeys(step.part for step in stage if step.part):
            if part in told and time.monotonic() - told[part] < _PROGRESS_SECONDS:
                continue
            number = [one.part for one in steps[:done]].count(part)
            say(f"{part}: {number} of {[one.part for one in steps].count(part)} done" if part in told else part)
            told[part] = time.monotonic()
        for why in dict.fromkeys(step.why for step in stage if not step.part):
            hosts = [step.host for step in stage if step.why == why and step.host]
            say(f"{why}{f' ({len(hosts)} hosts)' if len(hosts) > 1 else ''}")
        done += len(stage)
        try:
            left = partial(_say_left, stage, say)
            answers = run_stage([plan.here(step) for step in stage], environ, seconds, left)
            failures = [_describe(step, answer.said) for step, answer in zip(stage, answers) if answer.exit_code]
            passes = {answer.exit_code for answer in answers if answer.exit_code} == {SSH_FAILED}
        except (FileNotFoundError, TimeoutError) as error:
            failures, passes = [_describe(stage[0], str(error))], False
        if failures:
            failure = CpuftError(f"{'; '.join(failures)}: {advice}")
            failure.passes = passes
            raise failure


def remind(say: Callable[[float], None], every: float | None = None) -> Callable[[], None]:
    """Return a function to call often while something is waited for; every 30 s it calls `say` with the seconds so far.

    `every`: seconds between two calls, in the place of 30.
    """
    begun, every = time.monotonic(), every or _REMIND_SECONDS
    told = 0

    def watch() -> None:
        nonlocal told
        passed = time.monotonic() - begun
        if passed >= (told + 1) * every:
            told = int(passed / every)
            say(passed)

    return watch


def _say_left(stage: Sequence[Step], say: Callable[[str], None], left: list[int], passed: float) -> None:
    """Tell which steps of a stage have not ended."""
    whys = dict.fromkeys(stage[number].why for number in left)
    for why in whys:
        hosts = [stage[number].host for number in left if stage[number].why == why and stage[number].host]
        where = f" on {', '.join(dict.fromkeys(hosts))}" if hosts else ""
        say(f"{why}: not finished{where} after {passed:.0f} s")


def _describe(step: Step, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()][-_LAST_LINES:]
    where = f"{step.host}: " if step.host else ""
    return f"{where}{step.why}: failed ({' | '.join(lines) or 'it said nothing'})"


def open_memory() -> IO[bytes]:
    """A file for a child's sake on no disk: those may be full, or read-only."""
    return open(os.memfd_create("cpuft"), "w+b")


def _relay(source: IO[bytes] | None, stream: TextIO) -> threading.Thread:
    """Pass on what a child says. With our own streams for its own, ssh stalls once nobody reads them."""

    def copy() -> None:
        while source and (block := os.read(source.fileno(), 1 << 16)):
            stream.buffer.write(block)
            stream.buffer.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


@contextmanager
def _input_of(step: Step) -> Iterator[IO[bytes]]:
    """What a step reads, as a file: nobody has to feed a pipe, and its end needs no care."""
    with open(step.stdin_file or os.devnull, "rb") if not step.stdin else open_memory() as file:
        if step.stdin:
            file.write(step.stdin.encode())
            file.seek(0)
        yield file


def _start(
    step: Step, environ: Mapping[str, str], given: IO[bytes], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    assert not step.host, "it is for another host"
    return subprocess.Popen(
        step.command,
        env=dict(environ) | {setting.name: setting.value for setting in step.settings},
        stdin=given,
        stdout=output or subprocess.PIPE,
        stderr=subprocess.STDOUT if output else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def start(command: Sequence[str], environ: Mapping[str, str], streams: int | None = None) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; it gets SIGTERM once the thread that called this is gone.

    `streams`: PIPE for all three; None: it reads nothing, and writes where this process does.
    """
    given, end = subprocess.DEVNULL if streams is None else streams, _end_with_parent
    return subprocess.Popen(
        command, env=environ, stdin=given, stdout=streams, stderr=streams, start_new_session=True, preexec_fn=end
    )


def start_sender(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process whose standard output this process reads. Otherwise as `start` without `streams`."""
    null, end = subprocess.DEVNULL, _end_with_parent
    return subprocess.Popen(
        command, env=environ, stdin=null, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=end
    )


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit code of a process that is about to end, or 0 if it has not ended after `seconds`."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return exit_code(process) if process.returncode is not None else 0


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """That of a process which has ended; 128 + N when signal N did it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(processes: Sequence[subprocess.Popen[bytes]], watch: Callable[[], None], seconds: float) -> None:
    start, pause = time.monotonic(), _POLL_SECONDS / 64  # of what takes no longer, nobody waits for the end
    while any(process.poll() is None for process in processes):
        watch()
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
        if seconds and time.monotonic() - start > seconds:
            raise TimeoutError(f"{seconds:.0f} s passed")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave nothing of the processes' sessions behind: SIGTERM, a moment's grace, SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if _signal(process, signal_number)]
        end = time.monotonic() + _GRACE_SECONDS
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        process.wait()


def _signal(process: subprocess.Popen[bytes], signal_number: int) -> bool:
    """Whether there was anyone to get it."""
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _signals_raise(takes: Callable[[int], bool]) -> Iterator[None]:
    """SIGINT, SIGTERM, SIGHUP and SIGUSR1 raise `Interrupted` inside, but those that `takes` takes; a second one does
    not disturb the cleaning up.

    Under nohup SIGHUP goes on being ignored.
    """
    received: list[int] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        if not received and not takes(signal_number):
            received.append(signal_number)
            raise Interrupted(signal_number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
