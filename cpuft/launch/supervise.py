"""Run one attempt on the head host, where this process is: start mpirun, watch the ranks, ask or force them to stop."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.argv import make_shell_line
from cpuft.errors import RESUMABLE, CpuftError, DiskFullError, Interrupted
from cpuft.files import remove_command
from cpuft.hosts.cluster import STATE_FILE
from cpuft.hosts.transport import Transport
from cpuft.launch.failures import (
    describe_absent,
    describe_failures,
    ended_to_be_resumed,
    find_interruption,
    is_for_users,
    list_error_logs,
    read_failures,
    worst_exit_code,
)
from cpuft.launch.results import write_plan
from cpuft.launch.run_state import PREPARING, TRAINING, UNSAVED_MODEL, RunState, StateWriter
from cpuft.launch.stack_dumps import LONG_SECONDS, NO_WAIT, diagnose_run
from cpuft.plans import RunPlan, Step
from cpuft.rank.diagnostics import HANG_MARK, SUPERVISED_VARIABLE, WAIT_SECONDS
from cpuft.rank.interruption import HEARTBEAT_FILE, REQUEST_FILE
from cpuft.rank.kill import SSH_NAME, kill_processes
from cpuft.rank.process import ENDED_MARK, FAILED_MARK, MARKS, OWNER_VARIABLE, STARTED_MARK, WAITS_MARK
from cpuft.record import FILE_NAME

TRAINING_STOP_SECONDS = 120.0
"""How long a training may take after the first Ctrl-C to finish one or two updates and save a checkpoint."""
SCRIPT_STOP_SECONDS = 30.0
"""How long a user's script may take after the first Ctrl-C. Most ignore the request, and users should not wait long."""
_STOP_REQUEST_SECONDS = 20.0
_STOP_REQUEST_TRIES = 3
_HOST_LOST = ("Error: Downstream from host", "assert (!closed) failed")
"""What Hydra's mpirun prints when it has lost a host and ended all ranks. In a Slurm job it exits minutes later."""
_CANNOT_RUN = (126, 127)
"""Exit codes of a shell for a program that does not exist or cannot be executed. Another start would not help."""
_REJECTED = 2
_CHECK_SECONDS = 0.5
_END_SECONDS = 25.0
"""How long mpirun may run on after a rank has failed: other ranks may be saving something."""
_HEARTBEAT_SECONDS = 30.0
"""How long ranks, which give a heartbeat every 5 s, may give none before the hosts are asked whether they answer."""
_STARTS_SECONDS, _STARTS_SECONDS_PER_RANK = 5.0, 0.1
"""How long ranks may take to start before the hosts are asked."""
_ENDS_SECONDS = 5.0
"""How long ranks may run on after the first has ended before the hosts are asked."""
_FAILURE_SECONDS = 0.5
"""Time from the failure of a rank until the hosts are asked, because a host that shuts down may still answer before."""
_NEXT_CHECK_SECONDS = 10.0
"""Time until the hosts are asked again after all of them have answered."""
_START_LIMIT = 45.0
_START_LIMIT_PER_RANK = 0.5
"""Seconds within which the first rank has to start. A foreign connection to mpirun's port can block all ranks."""
_MOST_STARTS = 3
"""How often mpirun is started if no rank starts. Each time its port is another one and the limit is twice as long."""
_BOOTSTRAP = "I_MPI_HYDRA_BOOTSTRAP"
_MARK_BYTES = 4096
_REMOVE_SECONDS = 60.0
_HIDDEN = (*MARKS, "|CCL_WARN| value of CCL_LOG_LEVEL changed")
"""Lines of rank 0 that the terminal does not show: marks for this module, and oneCCL's warning about our setting."""


def _print(line: str) -> None:
    print(f"cpuft: {line}", file=sys.stderr, flush=True)


@dataclass
class StopRequest:
    """Asks the ranks to save a checkpoint and end after Ctrl-C, SIGUSR1, or SIGTERM with a grace period. The request is
    a file in the run folder on the head host, because mpirun does not forward signals.
    """

    grace: float | None = None
    """Seconds from SIGTERM until the ranks are killed; with 0, at once. None: no signal asks the ranks first."""
    ctrl_c_seconds: float = 0.0
    """Seconds from the first Ctrl-C until the ranks are killed; with 0, at once."""
    run_dir: str = ""
    """The run folder of this attempt as the ranks see it."""
    prefix: tuple[str, ...] = ()
    """What to put before a shell line to run it on the head host, if that is not this machine."""
    signal_number: int = 0
    """The first signal that requested the end; 0 for none yet."""
    deadline: float = math.inf
    """When the ranks are killed, in seconds of the monotonic clock."""
    is_sent: bool = False

    def handle_signal(self, signal_number: int) -> bool:
        """Return True and record the signal for `check` if it asks the ranks to end; False if they are to be killed.
        SIGUSR1 asks, SIGTERM if no deadline is set and `grace` is above 0, and SIGINT as the first signal if
        `ctrl_c_seconds` is above 0. With `grace` None, no signal asks.
        """
        if self.grace is None:
            return False
        is_first = math.isinf(self.deadline) and not self.signal_number
        seconds = 0.0
        if signal_number == signal.SIGTERM and math.isinf(self.deadline):
            seconds = self.grace
        elif signal_number == signal.SIGINT and is_first:
            seconds = self.ctrl_c_seconds
        if seconds > 0:
            self.deadline = time.monotonic() + seconds
        if seconds > 0 or signal_number == signal.SIGUSR1:
            self.signal_number = self.signal_number or signal_number
            return True
        return False

    def check(self) -> None:
        """Pass a recorded signal on to the ranks, once, and raise Interrupted if the deadline has passed. The sending
        may take up to 20 s, three times if the connection fails.
        """
        if self.signal_number and not self.is_sent:
            self.is_sent = True
            name = signal.Signals(self.signal_number).name
            if self.signal_number == signal.SIGINT:
                _print(
                    f"asked the ranks to save a checkpoint and end within {self.ctrl_c_seconds:.0f} s; "
                    "a second Ctrl-C or cpuft stop ends them at once"
                )
            for _ in range(_STOP_REQUEST_TRIES):
                answer = execute.run_command(self.plan_command(name), _STOP_REQUEST_SECONDS)
                if answer.exit_code != execute.SSH_FAILED:
                    break
            if answer.exit_code:
                _print(f"{name} could not be passed on to the ranks ({answer.text.strip()})")
        if time.monotonic() > self.deadline:
            raise Interrupted(signal.SIGINT if self.signal_number == signal.SIGINT else signal.SIGTERM)

    def plan_command(self, name: str) -> tuple[str, ...]:
        """Return the argv with which this machine writes a signal's name as the request on the head host."""
        path = f"{self.run_dir}/{REQUEST_FILE}"
        command = ("sh", "-c", 'echo "$1" >"$0.new" && mv "$0.new" "$0"', path, name)
        return (*self.prefix, make_shell_line(command)) if self.prefix else command


@dataclass
class LogTail:
    """Copies what is appended to a log to a stream, except lines that are not for users and the ranks' marks."""

    path: Path
    stream: IO[str]
    position: int = 0

    def copy(self) -> None:
        """Copy what was appended since the last call; nothing if there is no such file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
        except FileNotFoundError:
            return
        self.position += len(new)
        if new:
            lines = new.decode(errors="replace").splitlines(keepends=True)
            shown = (line for line in lines if is_for_users(line) and not any(mark in line for mark in _HIDDEN))
            self.stream.write("".join(shown))
            self.stream.flush()


class StuckError(Exception):
    """mpirun does not end although a rank has failed or a host is lost, or ranks wait in vain for others."""


class NotStartedError(Exception):
    """No rank has started in time."""


@dataclass
class RunMonitor:
    """Detects that a run cannot finish, because mpirun and srun wait without limit for a host that is lost. All hosts
    are asked whether they answer whenever something looks wrong.
    """

    logs: Path
    hosts: tuple[str, ...]
    """The host of each rank."""
    transport: Transport
    start_limit: float = 0.0
    """Seconds within which the first rank has to start; 0 for no limit."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    check_state: Callable[[], None] = lambda: None
    """Updates the run state. Raises LaterStartError if another launcher has started the run again."""
    diagnosis: str = ""
    has_hang: bool = False
    """Whether a rank has reported that it waited in vain. `check` does nothing after that, even if a signal interrupts
    the diagnosis: by then the ranks are ended."""
    waits: set[bytes] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)
    """In seconds of the monotonic clock, as all times here that have no other unit."""
    failed_at: float = 0.0
    """When the first failure of a rank was seen; 0 for none."""
    ended_at: float = 0.0
    """When the first successful end of a rank was seen; 0 for none."""
    checked_at: float = 0.0
    heartbeat: int = 0
    """Time of the last heartbeat, in ns as the file system of the run folder gives it."""
    heartbeat_seen_at: float = 0.0
    started: int = 0
    unreachable: set[str] | None = None
    """Hosts that did not answer; None if they have not been asked."""
    host_check: Future[set[str]] | None = None
    """Nothing waits for this answer."""
    suspicion: str = "a host is lost"
    next_host_check: float = 0.0
    """The hosts are not asked again before, because all answered a moment ago."""

    def check(self) -> None:
        """Look at logs and heartbeats, at most every 0.5 s. Hosts are asked on a thread, and a later call sees the
        answer; a hang that a rank reports is diagnosed at once. Raises StuckError or NotStartedError: the ranks must be
        ended; and what `StopRequest.check` and `check_state` raise.
        """
        now = time.monotonic()
        if now - self.checked_at < _CHECK_SECONDS or self.has_hang:
            return
        self.checked_at = now
        self.stop_request.check()
        self.check_state()
        ends, mpirun_log = [_read_end(log) for log in list_error_logs(self.logs)], self.logs.parent.glob(HEARTBEAT_FILE)
        if not self.failed_at and (_has_mark(ends, FAILED_MARK) or _has_mark(map(_read_end, mpirun_log), *_HOST_LOST)):
            self.failed_at = now
        if _has_mark(ends, HANG_MARK):
            self.has_hang = True
            self.diagnosis, self.unreachable = diagnose_run(str(self.logs.parent), self.hosts, self.transport, _print)
            raise StuckError("ended the ranks, because some of them waited in vain for others")
        if waits := {wait for end in ends for wait in re.findall(WAITS_MARK.encode() + b"[^\n]*", end)} - self.waits:
            self.waits |= waits
            threading.Thread(target=self.report_wait, daemon=True).start()
        since_failure = now - self.failed_at if self.failed_at else 0.0
        suspicion = self._find_suspicion(now, ends)
        must_ask = since_failure > _FAILURE_SECONDS or bool(suspicion and now > self.next_host_check)
        if must_ask and self.unreachable is None and self.host_check is None:
            self.host_check, self.suspicion = _start_thread(self.find_unreachable), suspicion or self.suspicion
        if self.host_check and self.host_check.done():
            self.unreachable = self.host_check.result()
        if self.unreachable or since_failure > _END_SECONDS:
            why = f"{since_failure:.0f} s after a rank had failed" if since_failure else f"although {self.suspicion}"
            raise StuckError(f"ended mpirun, which was still running {why}")
        if self.unreachable is not None and not since_failure:
            # All hosts answer. Ranks whose run folder is on another disk give no heartbeat here.
            self.unreachable, self.host_check, self.heartbeat_seen_at = None, None, now
            self.next_host_check = now + _NEXT_CHECK_SECONDS
        is_late = self.start_limit and not since_failure and now - self.begun > self.start_limit
        if is_late and not self.has_started():
            raise NotStartedError(f"no rank started within {self.start_limit:.0f} s")

    def _find_suspicion(self, now: float, ends: Sequence[bytes]) -> str:
        """Return why a host may be lost; empty for no reason."""
        if self._misses_heartbeat(now):
            return "no rank gives a heartbeat"
        ranks = len(self.hosts)
        if self.started < ranks:
            self.started = 0
            for log in list_error_logs(self.logs):
                with log.open("rb") as file:
                    self.started += STARTED_MARK.encode() in file.read(_MARK_BYTES)
            if self.started < ranks and now - self.begun > _STARTS_SECONDS + _STARTS_SECONDS_PER_RANK * ranks:
                return f"{ranks - self.started} of {ranks} ranks have not started"
            return ""
        ended = sum(ENDED_MARK.encode() in end for end in ends)
        if 0 < ended < ranks:
            self.ended_at = self.ended_at or now
            if now - self.ended_at > _ENDS_SECONDS:
                return f"{ranks - ended} of {ranks} ranks have not ended"
        return ""

    def report_wait(self) -> None:
        """Print which ranks the others have been waiting for, or nothing if no rank has waited for 2 s."""
        known = set(self.transport.unresponsive)
        place = str(self.logs.parent), self.hosts, self.transport
        diagnosis, _ = diagnose_run(*place, lambda line: None, LONG_SECONDS)
        if diagnosis != NO_WAIT:  # it has not ended meanwhile
            _print(f"ranks have been waiting for {WAIT_SECONDS:.0f} s: {diagnosis}")
        self.transport.unresponsive.intersection_update(known)  # a host that was only busy goes on

    def find_unreachable(self) -> set[str]:
        """Ask all hosts, and return the names of those that do not answer."""
        return self.transport.find_unresponsive(sorted(set(self.hosts)))

    def has_started(self) -> bool:
        """Return True if `check` has counted a rank that started, or any rank has written to its error log."""
        return self.started > 0 or any(log.stat().st_size for log in list_error_logs(self.logs))

    def _misses_heartbeat(self, now: float) -> bool:
        """Whether ranks that gave heartbeats have stopped to do so."""
        with suppress(OSError):
            heartbeat = (self.logs.parent / HEARTBEAT_FILE).stat().st_mtime_ns
            if heartbeat != self.heartbeat:
                self.heartbeat, self.heartbeat_seen_at = heartbeat, now
        return bool(self.heartbeat) and now - self.heartbeat_seen_at > _HEARTBEAT_SECONDS

    def find_lost_hosts(self) -> set[str]:
        """Return the names of the hosts that do not answer. If `check` has found none, all are asked once more."""
        if self.host_check and not self.unreachable:
            self.unreachable = self.host_check.result()
        self.unreachable = self.unreachable or self.find_unreachable()
        return self.unreachable


def _start_thread(function: Callable[[], set[str]]) -> Future[set[str]]:
    """Call a function on a thread that does not keep this process from exiting."""
    future = Future[set[str]]()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def _read_end(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MARK_BYTES))
        return file.read()


def _has_mark(texts: Iterable[bytes], *marks: str) -> bool:
    return any(mark.encode() in text for text in texts for mark in marks)


def run_as_head_host(
    plan: RunPlan,
    work: str,
    state: RunState,
    time_limit: float,
    transport: Transport,
    request: StopRequest | None = None,
) -> int:
    """Carry out `make`, `prepare` and `ranks` of a plan with this machine as the head host, keep the run state up to
    date, and return the exit code.

    It is 75 if the ranks ended to be resumed, or a host was lost during the preparation or without a failure of a rank;
    else that of the worst rank or, without one, of mpirun, and 1 if mpirun had to be ended. If the preparation fails
    and no host was lost, a new run folder is removed again. Raises CpuftError: the run folder cannot be made, the data
    are rejected, the time limit is over, the disk is full, or a later start has begun. Raises RuntimeError: the
    preparation failed. Raises Interrupted: a signal came.
    """
    here = plan.full_plan.as_local
    try:
        for (step,) in plan.make:
            _run_step(here(step))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        raise CpuftError(f"the run folder cannot be made ({reason}): give a new folder with --run-dir") from None
    with StateWriter(work, state) as writer:
        writer.check()
        writer.write(phase=PREPARING)
        if lost := _prepare(plan, work, writer, transport):
            return writer.end(RESUMABLE, lost)
        ((ranks,),) = plan.ranks
        # Of a start of this training that was killed. A script, which has no record, may use such a name itself.
        for unsaved in Path(work).glob(UNSAVED_MODEL) if Path(work, FILE_NAME).exists() else ():
            shutil.rmtree(unsaved, ignore_errors=True)
        limit = _START_LIMIT + _START_LIMIT_PER_RANK * len(state.hosts)
        what = Path(work) / "logs", state.hosts, transport
        monitor = RunMonitor(*what, limit, request or StopRequest(), writer.check)
        writer.write(phase=TRAINING)
        code = 1
        try:
            code = _run_ranks(here(ranks), monitor, writer, time_limit)
        finally:
            if code:  # mpirun may have left ssh processes, which have sessions of their own
                kill_processes(work, state.owner)
            with suppress(OSError):
                Path(work).with_name(f"{SSH_NAME}{state.owner}").unlink()
        writer.refuse_later_start()
        return writer.end(code, writer.state.reason)


def _prepare(plan: RunPlan, run_dir: str, writer: StateWriter, transport: Transport) -> str:
    """Prepare the examples, and write `plan.sh`; return which host was lost if that fails, "" if the ranks can start.
    Nobody asks the hosts meanwhile: examples that are prepared are there for the restart.
    """
    hosts = writer.state.hosts
    try:
        for step in (step for stage in plan.prepare for step in stage):
            _run_step(plan.full_plan.as_local(step))
        write_plan(plan, run_dir)
    except BaseException as error:
        if isinstance(error, RuntimeError) and (lost := transport.find_unresponsive(sorted(set(hosts)))):
            lines = describe_absent([], hosts, lost)
            for line in (str(error).splitlines()[0], *lines):
                _print(line)
            writer.note(silent=tuple(sorted(lost)))
            return lines[0]
        if not plan.resumed:
            execute.run_command(remove_command(os.path.dirname(run_dir), run_dir), _REMOVE_SECONDS)
        raise
    return ""


def _run_step(step: Step) -> None:
    remind = execute.make_reminder(lambda passed: _print(f"{step.why}: not finished after {passed:.0f} s"))
    with execute.open_memory_file() as output:
        code = execute.run_step(step, os.environ, output, remind)
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if code == _REJECTED:
        line = next((line for line in text.splitlines() if line.startswith("cpuft: error: ")), text)
        raise CpuftError(line.removeprefix("cpuft: error: "))
    if code:
        raise RuntimeError(f"{step.why}: exit code {code}\n{text}")


def _run_ranks(step: Step, monitor: RunMonitor, writer: StateWriter, time_limit: float) -> int:
    """Start mpirun, up to three times if no rank starts, and wait for its end; return the exit code of the run."""
    logs, hosts, begun = monitor.logs, monitor.hosts, time.monotonic()
    environ = os.environ | _mark_processes(step, logs.parent, writer.state.owner)
    for number in range(2, _MOST_STARTS + 2):
        left = max(1.0, time_limit - (time.monotonic() - begun)) if time_limit else 0.0
        code, was_stuck, not_started = _start_ranks(step, monitor, environ, left)
        if not not_started or number > _MOST_STARTS or (len(set(hosts)) > 1 and monitor.find_lost_hosts()):
            break
        _print(f"{not_started}, although all hosts answer: starting mpirun again ({number} of {_MOST_STARTS})")
        monitor = RunMonitor(
            logs, hosts, monitor.transport, 2 * monitor.start_limit, monitor.stop_request, monitor.check_state
        )
    if not code:
        return 0
    if not_started and was_stuck:
        _print(
            f"{not_started}: another program may be connecting to mpirun's port; cpuft doctor looks for ports that "
            "are open to other machines"
        )
    failures = read_failures(logs, hosts)
    if ended_to_be_resumed(failures):
        line = find_interruption(str(logs.parent))
        leaving = tuple(sorted({hosts[rank] for rank in line.leaving})) if line else ()
        writer.note(leaving=leaving, reason="the ranks ended to be resumed")
        if not was_stuck:
            return RESUMABLE
    if monitor.stop_request.signal_number == signal.SIGINT:
        raise Interrupted(signal.SIGINT)
    lost = monitor.find_lost_hosts()
    writer.note(silent=tuple(sorted(lost)))
    # mpirun ends without a message if it cannot write the output of the ranks.
    if not failures and not lost and shutil.disk_usage(logs).free < 1 << 16:
        raise DiskFullError(str(logs.parent))
    mpirun_output = (logs.parent / HEARTBEAT_FILE).read_text(errors="replace")
    absent = describe_absent(failures, hosts, lost)
    if monitor.diagnosis and not lost:
        absent = [monitor.diagnosis]
    text = describe_failures(failures, mpirun_output, absent)
    print(text, file=sys.stderr, flush=True)
    writer.note(reason=text.splitlines()[-1].removeprefix("cpuft: "))
    return worst_exit_code(failures, RESUMABLE if lost else code)


def _mark_processes(step: Step, run_dir: Path, owner: int) -> dict[str, str]:
    """Return variables for mpirun by which `cpuft.rank.kill` finds it and what it starts, even before there are ranks.

    On other hosts, Hydra's proxies have no variables of the run, but those of Intel MPI have the name of mpirun's ssh
    program on their command line. So in a run folder on a host's own disk, mpirun gets such a program of its own.
    """
    mark = {"CPUFT_RUN_DIR": str(run_dir), OWNER_VARIABLE: str(owner)}
    ssh, link = execute.find_program("ssh"), run_dir.parent / f"{SSH_NAME}{owner}"
    given = {setting.name for setting in step.settings} | os.environ.keys()
    if ssh and (run_dir.parent / STATE_FILE).exists() and not given & {_BOOTSTRAP, f"{_BOOTSTRAP}_EXEC"}:
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(ssh)
            mark[f"{_BOOTSTRAP}_EXEC"] = str(link)
    return mark


def _start_ranks(
    step: Step, monitor: RunMonitor, environ: Mapping[str, str], time_limit: float
) -> tuple[int, bool, str]:
    """Start mpirun once; return its exit code, whether the monitor had to end it, and why another start may help."""
    logs = monitor.logs
    tails = [LogTail(logs / "rank-0.out", sys.stdout), LogTail(logs / "rank-0.err", sys.stderr)]

    def watch() -> None:
        for tail in tails:
            tail.copy()
        monitor.check()

    with (logs.parent / HEARTBEAT_FILE).open("wb") as output:
        try:
            takes, environ = monitor.stop_request.handle_signal, {**environ, SUPERVISED_VARIABLE: "1"}
            code = execute.run_step(step, environ, output, watch, time_limit, takes)
        except StuckError as error:
            _print(str(error))
            return 1, True, ""
        except NotStartedError as error:
            return 1, True, str(error)
        except TimeoutError as error:
            raise CpuftError(
                f"the run was stopped at its time limit ({error}): raise --time-limit, or train for less"
            ) from None
    may_help = code not in (0, *_CANNOT_RUN) and len(set(monitor.hosts)) > 1
    not_started = may_help and not monitor.has_started()
    return code, False, f"mpirun ended with exit code {code} before any rank started" if not_started else ""
