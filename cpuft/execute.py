"""Execute plans and commands. The launcher starts all its processes on this machine here."""

from __future__ import annotations

import codecs
import ctypes
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import IO, Any, TextIO

from cpuft.errors import NO_MORE_PROCESSES, CpuftError, Interrupted, TransientError, join_last_lines
from cpuft.plans import Plan, Step

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EXTENDED_LIMITS, _JOB_LIMITS, _KILL_ON_CLOSE = 9, 144, (16, 0x2000)
"""JobObjectExtendedLimitInformation of winnt.h, the bytes of its structure, and the place and value of the flag
JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE."""
SSH_FAILED = 255
"""Exit code of ssh itself, when the connection failed."""
_DROPPED = "_exchange_identification: "
"""In ssh's message when a server closes the connection at once, as sshd does beyond its MaxStartups."""
_DROPPED_ROUNDS = 8
"""Most further attempts of steps whose connection was closed so, which is safe: nothing of them has run."""
_TOO_LATE = 126
"""Exit code of a command that was ended at its time limit."""
PIPE = subprocess.PIPE
_POLL_SECONDS = 0.05
_PROGRESS_SECONDS = 20.0
_REMIND_SECONDS = 30.0
_GRACE_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL; together with what mpirun needs, all processes are gone within 5 s."""
_held: list[int] | None = None
"""Numbers of signals that came while a process was starting; None at other times."""
Process = subprocess.Popen[bytes]
Say = Callable[[str], None]
"""Tells the user a line."""


@dataclass(frozen=True)
class Answer:
    """The output of a command and its exit code. What is not UTF-8 in the output is replaced by U+FFFD."""

    exit_code: int
    output: str
    """Standard output; with `run_stage` standard output and standard error together."""
    errors: str = ""
    """Standard error, or why the command could not be run."""

    @property
    def text(self) -> str:
        """Standard output followed by standard error."""
        return self.output + self.errors


def find_program(name: str) -> str:
    """Return the path of a program in PATH or in the system's sbin folders; "" if it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") or ""


def run_command(
    command: Sequence[str], seconds: float, stdin: str = "", environ: Mapping[str, str] | None = None
) -> Answer:
    """Run a command, with this process's environment unless given, wait for it, and return its exit code and output.
    The exit code is 127 if there is no such program, 126 if it cannot be started or takes longer than `seconds` (its
    output is lost then), and -N if signal N ended it.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, input=stdin.encode(), env=environ, check=False
        )
    except FileNotFoundError:
        return Answer(127, "", f"no such program: {command[0]}")
    except BlockingIOError:
        return Answer(126, "", NO_MORE_PROCESSES)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(_TOO_LATE, "", str(error))
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def run_step(
    step: Step,
    environ: Mapping[str, str],
    output: IO[bytes] | None = None,
    watch: Callable[[], None] = lambda: None,
    seconds: float = 0.0,
    takes: Callable[[int], bool] = lambda signal_number: False,
) -> int:
    """Run a step of this machine to its end and return its exit code (128 + N if signal N ended it).

    Processes that the step leaves in its process group are ended, too, and if this process is killed, the kernel sends
    SIGTERM to the step, so that mpirun ends its ranks. Without a file for `output`, the step writes to this process's
    own streams. `watch` is called about 20 times a second, and once at the end; if it raises, the step is ended first.
    `takes` is called in the handler of each signal with its number; the step continues if it returns True. Only for the
    main thread.

    Raises Interrupted for a signal of `signals_raise`, TimeoutError after `seconds` (0: no limit), both when the step
    has ended; OSError if the program or the step's `stdin_file` cannot be opened.
    """
    with signals_raise(takes), _input_of(step) as given:
        _hold_signals()
        process = _start(step, environ, given, output)
        relays = [] if output else [_relay(process.stdout, sys.stdout), _relay(process.stderr, sys.stderr)]
        reason: BaseException | None = None
        try:
            _release_signals()
            _wait([process], watch, seconds)
        except BaseException as error:
            reason = error
            raise
        finally:
            stop_processes([process])
            for relay in relays:
                relay.join(_GRACE_SECONDS)
            try:
                watch()
            except Exception as error:
                # A signal must not be forgotten because of what is found after it: the caller might start again.
                if not reason or (isinstance(error, Interrupted) and not isinstance(reason, Interrupted)):
                    raise
    return exit_code_of(process)


def run_stage(plan: Plan, stage: Sequence[Step], seconds: float, say: Say = lambda line: None) -> list[Answer]:
    """Run steps at the same time, on hosts by the plan's prefixes, and return the answer of each in their order.

    A failed step does not stop the others; if its ssh connection was closed at once, it is run again, up to 8 times.
    One that takes longer than `seconds` (0: no limit) is ended and has the exit code 126. Every 30 s, `say` gets lines
    about the steps that have not ended. Only for the main thread. Raises, when all have ended, Interrupted for a
    signal, OSError: a step cannot be started.
    """
    with signals_raise():
        answers = _run_once(plan, stage, seconds, say)
        for number in range(_DROPPED_ROUNDS):
            again = [n for n, one in enumerate(answers) if one.exit_code == SSH_FAILED and _DROPPED in one.output]
            if not again:
                break
            time.sleep(random.uniform(0.1, 0.3) * (number + 1))
            new = _run_once(plan, [stage[n] for n in again], seconds, lambda line: None)
            answers = [dict(zip(again, new)).get(n, one) for n, one in enumerate(answers)]
    return answers


def _run_once(plan: Plan, stage: Sequence[Step], seconds: float, say: Say) -> list[Answer]:
    steps = [plan.as_local(step) for step in stage]
    with ExitStack() as stack:
        outputs = [stack.enter_context(open_memory_file()) for _ in steps]
        inputs = [stack.enter_context(_input_of(step)) for step in steps]
        processes: list[Process] = []
        begun, told = time.monotonic(), 0

        def remind() -> None:
            nonlocal told
            passed = time.monotonic() - begun
            if passed < (told + 1) * _REMIND_SECONDS:
                return
            told = int(passed / _REMIND_SECONDS)
            pending = [step for step, process in zip(stage, processes) if process.poll() is None]
            for why in dict.fromkeys(step.why for step in pending):
                hosts = dict.fromkeys(step.host for step in pending if step.why == why and step.host)
                where = f" on {', '.join(hosts)}" if hosts else ""
                say(f"{why}: not finished{where} after {passed:.0f} s")

        late: dict[Process, str] = {}
        try:
            _hold_signals()
            processes += (_start(step, os.environ, *pair) for step, *pair in zip(steps, inputs, outputs))
            _release_signals()
            _wait(processes, remind, seconds)
        except TimeoutError as error:
            late = {process: f"\n{error}" for process in processes if process.poll() is None}
        finally:
            stop_processes(processes)
        return [
            Answer(_TOO_LATE if one in late else exit_code_of(one), _read(output) + late.get(one, ""))
            for one, output in zip(processes, outputs)
        ]


def run_stages(plan: Plan, seconds: float, say: Say, advice: str) -> None:
    """Execute the stages of a plan up to the first with a failed step; the steps of a stage run at the same time.

    `seconds` is a time limit for each stage, or 0 for none. `say` gets lines about the progress. Only for the main
    thread. Raises CpuftError, which ends with `advice`: a step failed, its program cannot run, or it took too long. It
    is transient if ssh failed (255) for all failed steps. Raises Interrupted for a signal, when the steps have ended.
    """
    steps = [step for stage in plan.stages for step in stage]
    last_report: dict[str, float] = {}
    done = 0
    for stage in plan.stages:
        for part in dict.fromkeys(step.part for step in stage if step.part):
            if part in last_report and time.monotonic() - last_report[part] < _PROGRESS_SECONDS:
                continue
            number = [one.part for one in steps[:done]].count(part)
            total = [one.part for one in steps].count(part)
            say(f"{part}: {number} of {total} done" if part in last_report else part)
            last_report[part] = time.monotonic()
        for why in dict.fromkeys(step.why for step in stage if not step.part):
            hosts = {step.host for step in stage if step.why == why and step.host}
            say(f"{why}{f' ({len(hosts)} hosts)' if len(hosts) > 1 else ''}")
        done += len(stage)
        try:
            answers = run_stage(plan, stage, seconds, say)
            failures = [_describe(step, answer.text) for step, answer in zip(stage, answers) if answer.exit_code]
            codes = {answer.exit_code for answer in answers if answer.exit_code}
        except (FileNotFoundError, PermissionError) as error:
            failures, codes = [_describe(stage[0], str(error))], set()
        if failures:
            kind = TransientError if codes == {SSH_FAILED} else CpuftError
            raise kind(f"{'; '.join(failures)}: {advice}")


def _describe(step: Step, output: str) -> str:
    where = f"{step.host}: " if step.host else ""
    if _DROPPED in output:
        output += "\nif many log in there or to a bastion at the same time, raise MaxStartups in its sshd_config"
    return f"{where}{step.why}: failed ({join_last_lines(output)})"


@contextmanager
def open_memory_file() -> Iterator[IO[bytes]]:
    """Open an empty binary file for reading and writing. On Linux it is in memory: a disk may be full."""
    if sys.platform == "linux":
        with open(os.memfd_create("cpuft"), "w+b") as file:
            yield file
    else:
        import tempfile

        # Windows opens no NamedTemporaryFile by its name.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, open(f"{folder}/file", "w+b") as file:
            yield file


def path_of(file: IO[bytes]) -> str:
    """Return a path of a file of `open_memory_file`, by which processes on this host can open it until it is closed."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}" if sys.platform == "linux" else file.name


def _relay(source: IO[bytes] | None, stream: TextIO) -> threading.Thread:
    """Copy a child's output to our stream. If the child had our stream itself, ssh would stall once nobody reads it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy() -> None:
        is_over = not source
        while source and not is_over:
            block = os.read(source.fileno(), 1 << 16)
            is_over = not block
            encoding = getattr(stream, "encoding", None) or "utf-8"  # which may lack a character
            stream.write(decoder.decode(block, is_over).encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


@contextmanager
def _input_of(step: Step) -> Iterator[IO[bytes]]:
    """Open the standard input of a step as a file, which unlike a pipe needs nobody to write to it."""
    with open(step.stdin_file or os.devnull, "rb") if not step.stdin else open_memory_file() as file:
        if step.stdin:
            file.write(step.stdin.encode())
            file.seek(0)
        yield file


def _start(step: Step, environ: Mapping[str, str], given: IO[bytes], output: IO[bytes] | None) -> Process:
    assert not step.host, "the step is for another host"
    environ = dict(environ) | {setting.name: setting.value for setting in step.settings}
    errors = subprocess.STDOUT if output else PIPE
    return _open_process(step.command, environ, stdin=given, stdout=output or PIPE, stderr=errors)


def start_process(command: Sequence[str], environ: Mapping[str, str], streams: int | None = None) -> Process:
    """Start a process in a new session; it gets SIGTERM when this thread ends. Its input is /dev/null and its output
    this process's, or all three are `streams`, such as PIPE. Raises OSError: it cannot be started.
    """
    return _open_process(command, environ, stdin=streams or subprocess.DEVNULL, stdout=streams, stderr=streams)


def start_with_log(
    command: Sequence[str], environ: Mapping[str, str], path: str, folder: str | None = None, stays: bool = False
) -> Process:
    """Start a process as `start_process` does, in `folder` (by default this process's), with /dev/null as input and its
    output appended to the file `path`, which may be missing. If it `stays`, it gets no SIGTERM when this thread ends.
    """
    with open(path, "ab") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return _open_process(command, environ, stays, cwd=folder, **streams)


def _open_process(command: Sequence[str], environ: Mapping[str, str], stays: bool = False, **options: Any) -> Process:
    end = None if stays or sys.platform != "linux" else _end_with_parent
    if sys.platform == "win32":
        _end_children_with_this()
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP  # Ctrl-C is for this process alone
    return subprocess.Popen(command, env=environ, start_new_session=True, preexec_fn=end, **options)


def ask_to_end(process: Process) -> None:
    """Send a process of `start_process` what Ctrl-C sends; on Windows Ctrl-Break, which alone reaches other groups."""
    if sys.platform == "win32":
        process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        process.send_signal(signal.SIGINT)


def wait_for_exit(process: Process, seconds: float) -> None:
    """Wait for the end of a process, at most `seconds`: it then runs on."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def exit_code_of(process: Process) -> int:
    """Return the exit code of a process that has ended; 128 + N if signal N ended it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@cache
def _end_children_with_this() -> None:
    """Put this process into a job of Windows that ends all of its processes with the last handle to it: our own."""
    windows = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    windows.CreateJobObjectW.restype = windows.GetCurrentProcess.restype = ctypes.c_void_p
    job = ctypes.c_void_p(windows.CreateJobObjectW(None, None))
    limits = bytearray(_JOB_LIMITS)
    struct.pack_into("=I", limits, *_KILL_ON_CLOSE)
    structure = (ctypes.c_char * len(limits)).from_buffer(limits)
    windows.SetInformationJobObject(job, _EXTENDED_LIMITS, structure, len(limits))
    windows.AssignProcessToJobObject(job, ctypes.c_void_p(windows.GetCurrentProcess()))


def _wait(processes: Sequence[Process], watch: Callable[[], None], seconds: float) -> None:
    start, pause = time.monotonic(), _POLL_SECONDS / 64  # short pauses first, so that short commands cost no time
    while any(process.poll() is None for process in processes):
        watch()
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
        if seconds and time.monotonic() - start > seconds:
            raise TimeoutError(f"{seconds:.0f} s passed")


def stop_processes(processes: Sequence[Process]) -> None:
    """End processes and the groups that they lead by SIGTERM, and 3 s later by SIGKILL; return when all have ended.
    On Windows, only the processes are ended, and at once.
    """
    for name in ("SIGTERM", "SIGKILL"):
        left = [process for process in processes if _signal(process, name)]
        end = time.monotonic() + _GRACE_SECONDS
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        process.wait()


def _signal(process: Process, name: str) -> bool:
    if sys.platform == "win32":
        process.terminate()
        return True
    try:
        os.killpg(process.pid, getattr(signal, name))
    except (ProcessLookupError, PermissionError):  # the latter on macOS if only a zombie is left in the group
        return process.poll() is None
    return True


@contextmanager
def signals_raise(takes: Callable[[int], bool] = lambda signal_number: False) -> Iterator[None]:
    """Make SIGINT, SIGTERM, SIGHUP (not under nohup) and SIGUSR1 raise `Interrupted` inside, unless `takes` returns
    True for the signal's number. Signals after the first one that raised do nothing. Only for the main thread.
    """
    received: list[int] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        if signal_number == getattr(signal, "SIGBREAK", 0):
            signal_number = signal.SIGINT  # of `ask_to_end`
        if _held is not None:
            _held.append(signal_number)
        elif not received and not takes(signal_number):
            received.append(signal_number)
            raise Interrupted(signal_number)

    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK")  # Windows has the first two, and Ctrl-Break
    numbers = [int(getattr(signal, name)) for name in names if hasattr(signal, name)]
    numbers = [one for one in numbers if one != getattr(signal, "SIGHUP", 0) or signal.getsignal(one) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _release_signals()


def _hold_signals() -> None:
    """Let `signals_raise` wait for `_release_signals`: an exception while a process starts would lose that process."""
    global _held
    _held = []


def _release_signals() -> None:
    global _held
    held, _held = _held, None
    for number in held or ():
        signal.raise_signal(number)
