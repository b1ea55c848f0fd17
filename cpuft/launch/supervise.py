"""Watches a run from its start to its end: shows rank 0, keeps the logs, says why it failed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.errors import AGAIN, CpuftError, DiskFullError, Interrupted
from cpuft.files import remove_command, write_text
from cpuft.hosts.door import Door
from cpuft.hosts.hostfile import Host
from cpuft.launch.asking import StopRequest
from cpuft.launch.failures import (
    describe_failures,
    ended_to_go_on,
    is_for_users,
    name_absent,
    read_failures,
    worst_exit_code,
)
from cpuft.launch.kept import note_silent
from cpuft.launch.renewal import Renewal
from cpuft.launch.stacks.gather import look_at_hang
from cpuft.launch.stacks.verdict import Verdict
from cpuft.plan import RunPlan, Step, format_plan
from cpuft.rank.notice import SIGN
from cpuft.rank.process import FAILURE
from cpuft.rank.reporting import HANGS, SUPERVISED

_GIVES_UP = ("Error: Downstream from host", "assert (!closed) failed")
"""What Intel MPI's and MPICH's mpirun say when a host of theirs is lost. They have ended all ranks then, but in a job
of Slurm's they wait for the srun of their proxies, and that for Slurm, which misses the host minutes later."""
_CHECK_FAILED = 2
"""Exit code of a step that refused its input with one line."""
_END_SECONDS = 25.0
"""How long ranks may take to end once one has failed: those that save something have time, a lost host has not."""
_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 150.0
"""Without a sign of life, which ranks give every 20 s: hosts may be lost, all at once, and mpirun waits for them."""
_ASK_SECONDS = 0.5
"""From a rank's failure to the question whether all hosts are there. One that goes down may still answer at once."""
_REMOVE_SECONDS = 60.0
_UNSAID = (FAILURE, "|CCL_WARN| value of CCL_LOG_LEVEL changed")
"""Lines of rank 0 that only its log keeps: the mark for this supervisor; oneCCL's word on our own setting."""


@dataclass
class Tail:
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
    """A rank has failed or all are lost, and mpirun waits all the same."""


@dataclass
class Ending:
    """Watches for the end of a run in which a rank has failed, or none is alive: mpirun waits without limit for a host
    that is lost, and srun does so for all of them."""

    logs: Path
    find_silent: Callable[[], set[str]]
    """Asks all hosts, and tells which do not answer."""
    look: Callable[[], tuple[Verdict, set[str]]]
    """Looks at ranks that hang; the hosts that do not answer."""
    verdict: Verdict | None = None
    asking: StopRequest | None = None
    renewal: Renewal | None = None
    failed_at: float = 0.0
    looked_at: float = 0.0
    sign: int = 0
    """When a rank last gave one, in ns as the disk's host counts them; and when that was noticed here."""
    signed_at: float = 0.0
    silent: set[str] | None = None
    asked: Future[set[str]] | None = None
    """The question who does not answer, while nobody waits for it."""

    def check(self) -> None:
        """Look now and then. Raises StuckError: a host is lost, and a rank has failed or all are silent; or a rank has
        failed, and time is up."""
        now = time.monotonic()
        if now - self.looked_at < _LOOK_SECONDS or self.verdict:
            return
        self.looked_at = now
        if self.asking:
            self.asking.check()
        if self.renewal:
            self.renewal.check()
        ranks, starter = self.logs.glob("rank-*.err"), self.logs.parent.glob(SIGN)
        if not self.failed_at and (_any_says(ranks, FAILURE) or _any_says(starter, *_GIVES_UP)):
            self.failed_at = now
        if _any_says(self.logs.glob("rank-*.err"), HANGS):
            self.verdict, self.silent = self.look()
            raise StuckError("ranks that waited in vain were ended")
        since = now - self.failed_at if self.failed_at else 0.0
        quiet = self._is_quiet(now)
        if self.silent is None and self.asked is None and (quiet or since > _ASK_SECONDS):
            self.asked = _begin(self.find_silent)
        if self.asked and self.asked.done():
            self.silent = self.asked.result()
        if self.silent or since > _END_SECONDS:
            why = f"within {since:.0f} s of a rank's failure" if since else "though no rank gives a sign of life"
            raise StuckError(f"mpirun did not end {why}, so it was ended")
        if self.silent is not None and not since:  # all hosts are there: ranks on other disks give no signs here
            self.silent, self.asked, self.signed_at = None, None, now

    def _is_quiet(self, now: float) -> bool:
        """Whether no rank has given a sign of life for long."""
        with suppress(OSError):
            sign = (self.logs.parent / SIGN).stat().st_mtime_ns
            if sign != self.sign:
                self.sign, self.signed_at = sign, now
        return bool(self.sign) and now - self.signed_at > _QUIET_SECONDS

    def name_silent(self) -> set[str]:
        """Once it is over: the hosts that do not answer. One that did when it was asked may have gone since."""
        if self.asked:
            self.silent = self.asked.result()
        return self.silent or self.find_silent()


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


def _any_says(logs: Iterable[Path], *marks: str) -> bool:
    """Whether one of the logs ends with a mark of failure."""
    for log in logs:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            end = file.read()
        if any(mark.encode() in end for mark in marks):
            return True
    return False


def run_plan(
    plan: RunPlan,
    run_dir: str,
    hosts: tuple[str, ...],
    environ: Mapping[str, str],
    seconds: float,
    door: Door,
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
    try:
        for step in (step for stage in plan.prepare for step in stage):
            _run_before(here(step), environ)
        write_plan(plan, run_dir)
    except BaseException as error:
        if not plan.resumed:
            execute.run_quietly(remove_command(os.path.dirname(run_dir), run_dir), _REMOVE_SECONDS)
        if isinstance(error, RuntimeError) and (silent := door.find_silent(sorted(set(hosts)))):
            for line in (str(error).splitlines()[0], *name_absent([], hosts, silent)):
                print(f"cpuft: {line}", file=sys.stderr, flush=True)
            return AGAIN
        raise
    ((ranks,),) = plan.ranks
    ending = _make_ending(plan, run_dir, hosts, door, asking)
    return _run_ranks(here(ranks), ending, hosts, environ, seconds)


def _make_ending(plan: RunPlan, run_dir: str, hosts: tuple[str, ...], door: Door, asking: StopRequest | None) -> Ending:
    names = tuple(sorted(set(hosts)))
    return Ending(
        Path(run_dir) / "logs",
        lambda: door.find_silent(names),
        lambda: look_at_hang(run_dir, hosts, door, _say),
        asking=asking,
        renewal=Renewal(plan.renewal, names, lambda host, words, limit: door.run(Host(host), words, "", limit), _say),
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


def _run_before(step: Step, environ: Mapping[str, str]) -> None:
    with execute.open_memory() as output:
        waiting = execute.remind(lambda passed: _say(f"{step.why}: not finished after {passed:.0f} s"))
        code = execute.run_step(step, environ, output, waiting)
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if code == _CHECK_FAILED:
        line = next((line for line in said.splitlines() if line.startswith("cpuft: error: ")), said)
        raise CpuftError(line.removeprefix("cpuft: error: "))
    if code:
        raise RuntimeError(f"{step.why}: exit code {code}\n{said}")


def _run_ranks(step: Step, ending: Ending, hosts: tuple[str, ...], environ: Mapping[str, str], seconds: float) -> int:
    logs = ending.logs
    tails = [Tail(logs / "rank-0.out", sys.stdout), Tail(logs / "rank-0.err", sys.stderr)]

    def watch() -> None:
        for tail in tails:
            tail.copy()
        ending.check()

    stuck = False
    with (logs.parent / SIGN).open("wb") as output:
        try:
            takes = ending.asking.takes if ending.asking else lambda signal_number: False
            code = execute.run_step(step, {**environ, SUPERVISED: "1"}, output, watch, seconds, takes)
        except StuckError as error:
            print(f"cpuft: {error}", file=sys.stderr)
            stuck, code = True, 1
        except TimeoutError as error:
            raise CpuftError(f"the run was stopped: {error}: raise --time-limit, or train for less") from None
    if not code:
        return 0
    failures = read_failures(logs, hosts)
    if not stuck and ended_to_go_on(failures):
        return AGAIN
    if ending.asking and ending.asking.signal_number == signal.SIGINT:
        raise Interrupted(signal.SIGINT)
    silent = ending.name_silent()
    note_silent(logs, silent)
    # mpirun ends without a word where it cannot write what ranks say.
    if not failures and not silent and shutil.disk_usage(logs).free < 1 << 16:
        raise DiskFullError(str(logs.parent))
    said, absent = (logs.parent / SIGN).read_text(errors="replace"), name_absent(failures, hosts, silent)
    if ending.verdict and not silent:
        absent = [ending.verdict.text]
    print(describe_failures(failures, said, absent), file=sys.stderr, flush=True)
    return worst_exit_code(failures, AGAIN if silent else code)
