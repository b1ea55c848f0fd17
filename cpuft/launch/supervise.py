"""Run one attempt on this machine: start mpirun, watch the ranks, and ask or force them to stop."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.config import is_count
from cpuft.errors import AGAIN, CpuftError, DiskFullError, Interrupted
from cpuft.execute import Answer
from cpuft.files import remove_command, write_text
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, attempt
from cpuft.launch.failures import (
    describe_absent,
    describe_failures,
    ended_to_be_resumed,
    is_for_users,
    list_error_logs,
    read_failures,
    worst_exit_code,
)
from cpuft.launch.resume import write_lost_hosts
from cpuft.launch.stack_dumps import Diagnosis, diagnose_run
from cpuft.plan import Plan, RunPlan, Step, format_plan
from cpuft.rank.interruption import HEARTBEAT_FILE, REQUEST_FILE
from cpuft.rank.process import ENDED, FAILURE, MARKS, STARTED
from cpuft.rank.reporting import HANGS, SUPERVISED

_GIVES_UP = ("Error: Downstream from host", "assert (!closed) failed")
"""What Intel MPI's and MPICH's mpirun say when a host of theirs is lost. They have ended all ranks then, but in a job
of Slurm's they wait for the srun of their proxies, and that for Slurm, which misses the host minutes later."""
_CANNOT_RUN = (126, 127)
"""Exit codes of a shell for a program that is not there or may not be run: another start would not help."""
_CHECK_FAILED = 2
"""Exit code of a step that refused its input with one line."""
_END_SECONDS = 25.0
"""How long ranks may take to end once one has failed: those that save something have time, a lost host has not."""
_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 30.0
"""Without a heartbeat, which ranks give every 5 s: hosts may be lost, all at once, and mpirun waits for them."""
_STARTS_SECONDS = 10.0
"""After which the hosts are asked, if ranks have not started."""
_START_LIMIT = 45.0
_START_LIMIT_PER_RANK = 0.5
"""Seconds within which a rank has to start. A stranger's connection to mpirun's port can hold up all of them."""
_MOST_STARTS = 3
"""How often mpirun is started where no rank starts; its port is another one each time, and its time twice as long."""
_ENDS_SECONDS = 5.0
"""After which the hosts are asked, if some ranks have ended and others have not."""
_ASK_AGAIN_SECONDS = 10.0
"""Between two questions to hosts that all answered."""
_PREPARE_SECONDS = 5.0
"""The same while rows are prepared, when no rank is disturbed by a question."""
_MARK_BYTES = 4096
"""Of a log's beginning and of its end, in which a rank's marks are looked for."""
_ASK_SECONDS = 0.5
"""From a rank's failure to the question whether all hosts are there. One that goes down may still answer at once."""
_REMOVE_SECONDS = 60.0
_UNSAID = (*MARKS, "|CCL_WARN| value of CCL_LOG_LEVEL changed")
"""Lines of rank 0 that only its log keeps: the marks for this supervisor; oneCCL's word on our own setting."""


@dataclass
class LogTail:
    """Copies what is appended to a file onto a stream of ours."""

    path: Path
    stream: IO[str]
    position: int = 0

    def copy(self) -> None:
        """Copy what has come since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
        except FileNotFoundError:
            return
        self.position += len(new)
        if new:
            lines = new.decode(errors="replace").splitlines(keepends=True)
            shown = (line for line in lines if is_for_users(line) and not any(mark in line for mark in _UNSAID))
            self.stream.write("".join(shown))
            self.stream.flush()


class StuckError(Exception):
    """A rank has failed or a host is lost, and mpirun waits all the same."""


class NotStartedError(Exception):
    """No rank has started in time, though all hosts answer."""


class HostsLostError(Exception):
    """Hosts do not answer any more."""

    def __init__(self, silent: set[str]) -> None:
        super().__init__(", ".join(sorted(silent)))
        self.silent = silent


@dataclass
class Watchdog:
    """Notices that a run cannot come to its end: mpirun and srun wait without limit for a host that is lost.

    All hosts are asked whether they answer whenever something looks wrong: ranks have not started, some ranks have
    ended and others have not, no rank has given a heartbeat for a while, or a rank has failed.
    """

    logs: Path
    find_silent: Callable[[], set[str]]
    """Asks all hosts, and returns those that do not answer."""
    look: Callable[[], tuple[Diagnosis, set[str]]]
    """Looks at ranks that hang; the hosts that do not answer."""
    ranks: int = 0
    """How many ranks there are; 0: nobody waits for their start and their end."""
    several: bool = False
    """Whether the ranks are on several hosts."""
    start_seconds: float = 0.0
    """Within which at least one rank has to start; 0 for no limit."""
    verdict: Diagnosis | None = None
    asking: StopRequest | None = None
    renewal: LeaseRenewal | None = None
    begun: float = field(default_factory=time.monotonic)
    failed_at: float = 0.0
    ended_at: float = 0.0
    """When the first rank was seen to have ended well."""
    looked_at: float = 0.0
    sign: int = 0
    """When a rank last gave a heartbeat, in ns as the disk's host counts them; and when that was noticed here."""
    signed_at: float = 0.0
    started: int = 0
    """How many ranks have started."""
    silent: set[str] | None = None
    asked: Future[set[str]] | None = None
    """The question which hosts do not answer, while nobody waits for the answer."""
    suspicion: str = "a host is lost"
    """Why they were asked."""
    ask_after: float = 0.0
    """No earlier than then: all hosts answered a moment ago."""

    def check(self) -> None:
        """Look now and then.

        Raises StuckError: a host is lost, or ranks have not ended within their time after one of them failed.
        Raises NotStartedError: no rank has started in time.
        """
        now = time.monotonic()
        if now - self.looked_at < _LOOK_SECONDS or self.verdict:
            return
        self.looked_at = now
        if self.asking:
            self.asking.check()
        if self.renewal:
            self.renewal.check()
        ends, starter = [_read_end(log) for log in list_error_logs(self.logs)], self.logs.parent.glob(HEARTBEAT_FILE)
        if not self.failed_at and (_any_says(ends, FAILURE) or _any_says(map(_read_end, starter), *_GIVES_UP)):
            self.failed_at = now
        if _any_says(ends, HANGS):
            self.verdict, self.silent = self.look()
            raise StuckError("ranks that waited in vain were ended")
        since = now - self.failed_at if self.failed_at else 0.0
        suspicion = self._suspect(now, ends)
        asks = since > _ASK_SECONDS or bool(suspicion and now > self.ask_after)
        if asks and self.silent is None and self.asked is None:
            self.asked, self.suspicion = _begin(self.find_silent), suspicion or self.suspicion
        if self.asked and self.asked.done():
            self.silent = self.asked.result()
        if self.silent or since > _END_SECONDS:
            why = f"within {since:.0f} s of a rank's failure" if since else f"though {self.suspicion}"
            raise StuckError(f"mpirun did not end {why}, so it was ended")
        if self.silent is not None and not since:  # all hosts answer: ranks on other disks give no heartbeat here
            self.silent, self.asked, self.signed_at = None, None, now
            self.ask_after = now + _ASK_AGAIN_SECONDS
        if self.start_seconds and not self.has_started() and not since and now - self.begun > self.start_seconds:
            raise NotStartedError(f"no rank has started within {self.start_seconds:.0f} s")

    def _suspect(self, now: float, ends: Sequence[bytes]) -> str:
        """Why a host may be lost; empty for no reason."""
        if self._is_quiet(now):
            return "no rank gives a sign of life"
        if self.started < self.ranks:
            starts = [_read_start(log) for log in list_error_logs(self.logs)]
            self.started = sum(STARTED.encode() in start for start in starts)
            if self.started < self.ranks and now - self.begun > _STARTS_SECONDS:
                return f"{self.ranks - self.started} of {self.ranks} ranks have not started"
            return ""
        ended = sum(ENDED.encode() in end for end in ends)
        if 0 < ended < self.ranks:
            self.ended_at = self.ended_at or now
            if now - self.ended_at > _ENDS_SECONDS:
                return f"{self.ranks - ended} of {self.ranks} ranks have not ended"
        return ""

    def has_started(self) -> bool:
        """Whether a rank has started, as far as its log tells."""
        return self.started > 0 or any(log.stat().st_size for log in list_error_logs(self.logs))

    def _is_quiet(self, now: float) -> bool:
        """Whether no rank has given a heartbeat for long."""
        with suppress(OSError):
            sign = (self.logs.parent / HEARTBEAT_FILE).stat().st_mtime_ns
            if sign != self.sign:
                self.sign, self.signed_at = sign, now
        return bool(self.sign) and now - self.signed_at > _QUIET_SECONDS

    def name_silent(self) -> set[str]:
        """Once it is over: the hosts that do not answer. One that did when it was asked may have gone since."""
        if self.asked:
            self.silent = self.asked.result()
        return self.silent or self.find_silent()


@dataclass
class HostMonitor:
    """Asks now and then whether all hosts answer, while one step on the head host prepares the run."""

    find_silent: Callable[[], set[str]]
    asked: Future[set[str]] | None = None
    ask_after: float = field(default_factory=lambda: time.monotonic() + _PREPARE_SECONDS)

    def check(self) -> None:
        """Look now and then. Raises HostsLostError."""
        now = time.monotonic()
        if self.asked is None and now > self.ask_after:
            self.asked = _begin(self.find_silent)
        if self.asked and self.asked.done():
            if silent := self.asked.result():
                raise HostsLostError(silent)
            self.asked, self.ask_after = None, now + _PREPARE_SECONDS


def _begin(function: Callable[[], set[str]]) -> Future[set[str]]:
    """Call it on a thread that nothing waits for."""
    found = Future[set[str]]()

    def call() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found


def _read_end(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MARK_BYTES))
        return file.read()


def _read_start(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(_MARK_BYTES)


def _any_says(ends: Iterable[bytes], *marks: str) -> bool:
    """Whether the end of one of the logs holds one of these marks."""
    return any(mark.encode() in end for end in ends for mark in marks)


def run_on_this_machine(
    plan: RunPlan,
    run_dir: str,
    hosts: tuple[str, ...],
    environ: Mapping[str, str],
    seconds: float,
    transport: Transport,
    asking: StopRequest | None = None,
) -> int:
    """Run a launch's plan to its end; the exit code of its worst rank, 75 when none could give one for a lost host.

    `hosts` names each rank's host. The plan is kept as `plan.sh` in the run directory. Without `asking`, SIGUSR1 ends
    the ranks as SIGTERM does.

    Raises CpuftError: a step before the ranks refused the input; the run directory is taken away again. Or it existed.
    Raises Interrupted: a signal came; all ranks are gone, and the record up to then is kept.
    """
    here = plan.whole.here
    for (step,) in plan.make:
        _make_run_dir(here(step), environ)
    names = sorted(set(hosts))
    watch = HostMonitor(lambda: transport.find_silent(names)).check if len(names) > 1 else lambda: None
    try:
        for step in (step for stage in plan.prepare for step in stage):
            _run_before(here(step), environ, watch)
        write_plan(plan, run_dir)
    except BaseException as error:
        silent = error.silent if isinstance(error, HostsLostError) else set()
        if isinstance(error, RuntimeError):
            silent = transport.find_silent(names)
        if silent:
            said = [str(error).splitlines()[0]] if isinstance(error, RuntimeError) else []
            for line in (*said, *describe_absent([], hosts, silent)):
                _say(line)
            write_lost_hosts(Path(run_dir, "logs"), silent)  # whoever starts the run again need not ask these hosts
            return AGAIN
        if not plan.resumed:
            execute.run_quietly(remove_command(os.path.dirname(run_dir), run_dir), _REMOVE_SECONDS)
        raise
    ((ranks,),) = plan.ranks
    ending = _make_watchdog(plan, run_dir, hosts, transport, asking)
    return _run_ranks(here(ranks), ending, hosts, environ, seconds)


def _make_watchdog(
    plan: RunPlan, run_dir: str, hosts: tuple[str, ...], transport: Transport, asking: StopRequest | None
) -> Watchdog:
    names = tuple(sorted(set(hosts)))
    return Watchdog(
        Path(run_dir) / "logs",
        lambda: transport.find_silent(names),
        lambda: diagnose_run(run_dir, hosts, transport, _say),
        len(hosts),
        len(names) > 1,
        _START_LIMIT + _START_LIMIT_PER_RANK * len(hosts),
        asking=asking,
        renewal=LeaseRenewal(
            plan.renewal, names, lambda host, words, limit: transport.run(Host(host), words, "", limit), _say
        ),
    )


def _say(line: str) -> None:
    print(f"cpuft: {line}", file=sys.stderr, flush=True)


def write_plan(plan: RunPlan, run_dir: str) -> None:
    """Keep the plan beside what came of it."""
    write_text(Path(run_dir) / "plan.sh", format_plan(plan.whole, os.getcwd()))


def _make_run_dir(step: Step, environ: Mapping[str, str]) -> None:
    try:
        _run_before(step, environ)
    except RuntimeError as error:
        said = str(error).splitlines()[-1]
        raise CpuftError(f"the run's directory cannot be made ({said}): name a new one with --run-dir") from None


def _run_before(step: Step, environ: Mapping[str, str], watch: Callable[[], None] = lambda: None) -> None:
    waiting = execute.remind(lambda passed: _say(f"{step.why}: not finished after {passed:.0f} s"))

    def look() -> None:
        waiting()
        watch()

    with execute.open_memory() as output:
        code = execute.run_step(step, environ, output, look)
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if code == _CHECK_FAILED:
        line = next((line for line in said.splitlines() if line.startswith("cpuft: error: ")), said)
        raise CpuftError(line.removeprefix("cpuft: error: "))
    if code:
        raise RuntimeError(f"{step.why}: exit code {code}\n{said}")


def _run_ranks(
    step: Step, watchdog: Watchdog, hosts: tuple[str, ...], environ: Mapping[str, str], seconds: float
) -> int:
    """Start mpirun, again if no rank starts, and wait for its end; returns the exit code of the run."""
    logs, begun = watchdog.logs, time.monotonic()
    for number in range(2, _MOST_STARTS + 2):
        left = max(1.0, seconds - (time.monotonic() - begun)) if seconds else 0.0
        code, stuck, nobody = _start_ranks(step, watchdog, environ, left)
        if not nobody or number > _MOST_STARTS or (len(set(hosts)) > 1 and watchdog.find_silent()):
            break
        _say(f"{nobody}, though all hosts answer: starting mpirun again ({number} of {_MOST_STARTS})")
        watchdog = replace(watchdog, begun=time.monotonic(), start_seconds=2 * watchdog.start_seconds)
        watchdog = replace(watchdog, failed_at=0.0, silent=None, asked=None)
    if not code:
        return 0
    if nobody and stuck:
        _say(f"{nobody}: does another program connect to mpirun's port? cpuft doctor looks for ports open to strangers")
    failures = read_failures(logs, hosts)
    if not stuck and ended_to_be_resumed(failures):
        return AGAIN
    if watchdog.asking and watchdog.asking.signal_number == signal.SIGINT:
        raise Interrupted(signal.SIGINT)
    silent = watchdog.name_silent()
    write_lost_hosts(logs, silent)
    # mpirun ends without a word where it cannot write what ranks say.
    if not failures and not silent and shutil.disk_usage(logs).free < 1 << 16:
        raise DiskFullError(str(logs.parent))
    said, absent = (logs.parent / HEARTBEAT_FILE).read_text(errors="replace"), describe_absent(failures, hosts, silent)
    if watchdog.verdict and not silent:
        absent = [watchdog.verdict.text]
    print(describe_failures(failures, said, absent), file=sys.stderr, flush=True)
    return worst_exit_code(failures, AGAIN if silent else code)


def _start_ranks(step: Step, watchdog: Watchdog, environ: Mapping[str, str], seconds: float) -> tuple[int, bool, str]:
    """Start mpirun once, and wait for its end.

    Returns
    -------
    Its exit code; whether it had to be ended; and if another start may help, because no rank started: what happened.
    """
    logs = watchdog.logs
    tails = [LogTail(logs / "rank-0.out", sys.stdout), LogTail(logs / "rank-0.err", sys.stderr)]

    def watch() -> None:
        for tail in tails:
            tail.copy()
        watchdog.check()

    with (logs.parent / HEARTBEAT_FILE).open("wb") as output:
        try:
            takes = watchdog.asking.takes if watchdog.asking else lambda signal_number: False
            code = execute.run_step(step, {**environ, SUPERVISED: "1"}, output, watch, seconds, takes)
        except StuckError as error:
            _say(str(error))
            return 1, True, ""
        except NotStartedError as error:
            return 1, True, str(error)
        except TimeoutError as error:
            raise CpuftError(f"the run was stopped: {error}: raise --time-limit, or train for less") from None
    nobody = code not in (0, *_CANNOT_RUN) and watchdog.several and not watchdog.has_started()
    return code, False, f"mpirun ended (exit code {code}) before any rank had started" if nobody else ""


TRAINING_SECONDS = 120.0
"""How long a training may take to end after the first Ctrl-C: the current update, and a checkpoint."""
SCRIPT_SECONDS = 30.0
"""The same for a Python script of the user's: most do not listen, and then the user need not wait for long."""
_TELL_SECONDS = 20.0


@dataclass
class StopRequest:
    """Asks the ranks once, by a file in the run's directory on the head host, because mpirun passes no signal on."""

    run_dir: str
    """The run's directory as the ranks see it."""
    master: str
    ways: dict[str, tuple[str, ...]]
    """As `cpuft.plan.Plan.ways`."""
    grace: float
    """Seconds from SIGTERM until the ranks are killed; with 0, SIGTERM kills them at once."""
    patience: float = 0.0
    """Seconds from the first Ctrl-C until the ranks are killed; with 0, Ctrl-C kills them at once."""
    signal_number: int = 0
    end: float = math.inf
    told: bool = False

    def takes(self, signal_number: int) -> bool:
        """Whether a signal only asks the ranks to end. Called in the signal's handler."""
        first = math.isinf(self.end) and not self.signal_number
        seconds = 0.0
        if signal_number == signal.SIGTERM and math.isinf(self.end):
            seconds = self.grace
        elif signal_number == signal.SIGINT and first:
            seconds = self.patience
        if seconds > 0:
            self.end = time.monotonic() + seconds
        if seconds > 0 or signal_number == signal.SIGUSR1:
            self.signal_number = self.signal_number or signal_number
            return True
        return False

    def check(self) -> None:
        """Pass a request on to the ranks. Called now and then while they run.

        Raises Interrupted: the time that the ranks had to end has passed.
        """
        if self.signal_number and not self.told:
            self.told = True
            name = signal.Signals(self.signal_number).name
            if self.signal_number == signal.SIGINT:
                _print_line(
                    f"the ranks are asked to save a checkpoint and end, within {self.patience:.0f} s; "
                    "press Ctrl-C again to end them at once"
                )
            answer = execute.run_quietly(self.plan_telling(name).command, _TELL_SECONDS)
            if answer.exit_code:
                _print_line(f"ranks cannot be told of {name} ({answer.said.strip()})")
        if time.monotonic() > self.end:
            raise Interrupted(signal.SIGINT if self.signal_number == signal.SIGINT else signal.SIGTERM)

    def plan_telling(self, name: str) -> Step:
        """The step that writes the file, as this machine runs it."""
        path = f"{self.run_dir}/{REQUEST_FILE}"
        words = ("sh", "-c", 'echo "$1" >"$0.new" && mv "$0.new" "$0"', path, name)
        return Plan(ways=self.ways).here(Step("ask ranks to end", words, host=self.master))


def _print_line(line: str) -> None:
    print(f"cpuft: {line}", file=sys.stderr, flush=True)


_EVERY_SECONDS = 300.0
_ANSWER_SECONDS = 20.0
Run = Callable[[str, tuple[str, ...], float], Answer]
"""Runs a command on a host, for so many seconds at most."""


def describe_lease_renewal(words: tuple[str, ...]) -> tuple[str, ...]:
    """What a plan's notes tell of it: no script of steps does that."""
    if not words:
        return ()
    return (f"while ranks run, for the lease to go on, every {_EVERY_SECONDS:.0f} s on each host: {shlex.join(words)}",)


@dataclass
class LeaseRenewal:
    """Has the hosts of a run renew their leases, side by side and beside what waits for the ranks."""

    words: tuple[str, ...]
    hosts: tuple[str, ...]
    run: Run
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _next: float = 0.0
    _said: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Called now and then while ranks run."""
        if self.words and self.now() >= self._next:
            self._next = self.now() + _EVERY_SECONDS
            threading.Thread(target=self.renew, daemon=True).start()

    def renew(self) -> None:
        """Renew them now; say each limit and each trouble once."""
        answers = attempt(lambda host: self.run(host, self.words, _ANSWER_SECONDS), self.hosts)
        for host, answer in zip(self.hosts, answers):
            line = _describe(host, answer)
            if line not in self._said:
                self._said.add(line)
                self.say(line)


def _describe(host: str, answer: Answer | CpuftError) -> str:
    """The limit, the same for all hosts of a lease; or why a host goes as its lease was."""
    words = [] if isinstance(answer, CpuftError) else answer.output.partition("\n")[0].split()
    if isinstance(answer, Answer) and not answer.exit_code and len(words) == 2 and is_count(words[1]):
        limit = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(words[1])))
        return f"the lease of the hosts goes on while the run does, to {limit} at most"
    said = str(answer) if isinstance(answer, CpuftError) else answer.said.strip()[-200:]
    return f"the lease of {host} cannot be renewed ({said}): look at it with cpuft provision status"
