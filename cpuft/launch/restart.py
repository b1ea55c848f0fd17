"""Run a job to its end: after the loss of a host or a rank, restart it on the hosts that answer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cpuft.errors import AGAIN, FULL, CpuftError, counted
from cpuft.files import remove_command
from cpuft.hosts.cluster import FROM_STDIN, Cluster, gather_cluster, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, attempt
from cpuft.launch.failures import Failure, describe_exit, ended_to_be_resumed, read_failures
from cpuft.launch.plan import Job, Launch, plan_run
from cpuft.launch.remote import FILES_LEFT, HeadHostLostError, fetch_finished, report_partial_cleanup
from cpuft.launch.results import NotStoredError
from cpuft.launch.resume import (
    ResumedRun,
    check_newest_checkpoint,
    find_newest_checkpoint,
    gather_host_copies,
    read_lost_hosts,
    read_resumed_run,
    remove_all_but_checkpoints,
    remove_empty_run,
)
from cpuft.plan import RunPlan
from cpuft.rank import kill
from cpuft.record import FILE_NAME, InterruptedLine, parse_lines, read_record

Start = Callable[[RunPlan, str, Cluster, float], int]
"""Runs a plan of a run, which lies there, on a cluster within so many seconds (0: no limit); its exit code."""
Say = Callable[[str], None]


def find_limit(job: Job, cluster: Cluster) -> int:
    """How often this job may be started again. With engines of others there are no checkpoints.

    Raises CpuftError: --min-np is more than --np.
    """
    if job.config.min_np > job.config.np:
        raise CpuftError(f"--min-np {job.config.min_np} is more than --np {job.config.np}: lower it")
    no_checkpoints = not job.script and job.train.engine != "torch"
    return 0 if no_checkpoints else count_restarts(job.config.max_restarts, len(cluster.assignments))


def describe_limit(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """What a plan does not show: no script of steps decides that."""
    limit = find_limit(job, cluster)
    if not limit:
        return ()
    again = f"cpuft launch starts it again up to {counted(limit, 'time')}, on the hosts that answer"
    least = f", {job.config.min_np} ranks at least" if job.config.min_np > 1 else ""
    return (f"where a host or a rank is lost, {again}{least}",)


def run_with_restarts(launch: Launch, plan: RunPlan, cluster: Cluster, start: Start, say: Say) -> int:
    """Run a job until it comes to its end, or another start would be in vain; the exit code of the last one.

    Raises CpuftError: as `start`, where its error is none of the hosts, or the last start raised one.
    """
    limit, marks, begun, course = find_limit(launch.job, cluster), set[str](), time.monotonic(), RestartHistory(cluster)
    number, stop = 0, ""
    while True:
        try:
            left = _time_left(launch.job, begun) if number else launch.job.config.time_limit
            tried = _try(launch, cluster, partial(start, replace(plan, stays=True), launch.run_dir, cluster, left))
        except NotStoredError:
            raise  # the hosts' copies are the only ones
        except CpuftError:
            if number:
                report_partial_cleanup(plan, launch.run_dir, launch.environ, cluster.access.transport.silent, say)
            raise
        if not tried.ended.code or (tried.unfetched and fetch_if_finished(launch, plan, cluster, say)):
            clean_up_lost_hosts(course, cluster, launch.run_dir, say)
            return 0
        verdict = judge(tried.ended, marks)
        if number == limit or not verdict.again:
            stop = verdict.why if not verdict.again else f"that was restart {number} of {limit}"
            break
        marks.add(verdict.mark)
        course.leaving |= tried.ended.leaving
        try:
            with cluster.access.transport.staying():
                ask = partial(plan_next_attempt, launch, course, plan, cluster, tried, verdict.why)
                plan, cluster, update = retry_connections(ask)
        except CpuftError as error:
            stop = f"{verdict.why}, and {error}"
            break
        number += 1
        hosts = [assignment.host.name for assignment in cluster.assignments]
        say("cpuft: " + describe_restart(number, limit, verdict.why, hosts, len(cluster.rank_hosts), update))
    kill_ranks(cluster, launch.run_dir)
    if limit and (number or verdict.again):
        say(f"cpuft: not started again: {stop}")
    if number or tried.ran:
        report_partial_cleanup(
            plan, launch.run_dir, launch.environ, {tried.unfetched, *cluster.access.transport.silent}, say
        )
    remove_empty_run(launch.run_dir)
    return tried.give()


def _time_left(job: Job, begun: float) -> float:
    """Seconds of the time limit that are left; 0 for no limit. Raises CpuftError: none."""
    limit = job.config.time_limit
    left = limit - (time.monotonic() - begun)
    if limit and left < 1:
        raise CpuftError(f"{limit:.0f} s passed: raise --time-limit, or train for less")
    return left if limit else 0.0


def _try(launch: Launch, cluster: Cluster, start: Callable[[], int]) -> Attempt:
    """Start it once. Raises CpuftError: what it was given was refused, and no host is lost."""
    begun, hosts, transport = time.time(), cluster.rank_hosts, cluster.access.transport
    error: CpuftError | None = None
    try:
        code = start()
    except HeadHostLostError as lost:
        code, error = AGAIN, lost
    except NotStoredError:
        raise
    except CpuftError as refusal:
        if not (len(set(hosts)) > 1 and transport.find_silent(sorted(set(hosts)))) and not refusal.passes:
            raise
        code, error = AGAIN, refusal
    if not code:
        return Attempt(AttemptResult(0), 0.0)
    failures = [] if error else read_failures(Path(launch.run_dir, "logs"), hosts)
    transport.silent.update(set() if error else read_lost_hosts(launch.run_dir))
    silent = frozenset(transport.silent.intersection(hosts))
    cut = isinstance(error, HeadHostLostError)
    leaving = find_leaving(launch.run_dir, hosts) if ended_to_be_resumed(failures) else frozenset()
    unreached = str(error) if error and error.passes else ""
    ended = AttemptResult(code, tuple(failures), silent, _count_updates(launch.run_dir), cut, leaving, unreached, hosts)
    return Attempt(ended, _find_end(launch.run_dir, begun), error)


def _count_updates(run_dir: str) -> int:
    try:
        return len(read_record(run_dir).steps)
    except CpuftError:
        return 0


def find_leaving(run_dir: str, hosts: Sequence[str]) -> frozenset[str]:
    """Of the hosts of the ranks those that were about to go when the run was told to stop."""
    try:
        record = Path(run_dir, FILE_NAME)
        *_, last = parse_lines(record.read_text(encoding="utf-8"), str(record))
    except (OSError, ValueError, CpuftError):
        return frozenset()
    return frozenset(hosts[rank] for rank in last.leaving) if isinstance(last, InterruptedLine) else frozenset()


def _find_end(run_dir: str, begun: float) -> float:
    """When the last update was recorded in a start that began then; now, where its record is lost."""
    try:
        changed = Path(run_dir, FILE_NAME).stat().st_mtime
    except OSError:
        changed = 0.0
    return changed if changed > begun else time.time()


T = TypeVar("T")
_END_SECONDS = 15.0
_AGAIN_SECONDS = 2.5
"""For a host that was lost earlier to answer: a restart does not wait for it as for the others."""
_PAUSE_SECONDS = 2.0
_MORE_TIMES = 2
"""Hosts are asked so often again, after a pause, where the way to one of them failed."""


@dataclass(frozen=True)
class Attempt:
    """A start that ended before its time."""

    ended: AttemptResult
    since: float
    """Since when nothing went on, in seconds since 1970."""
    error: CpuftError | None = None

    @property
    def ran(self) -> bool:
        """Whether its folder was made."""
        return self.error is None or isinstance(self.error, HeadHostLostError)

    @property
    def unfetched(self) -> str:
        """The master that has alone what was recorded; empty for none."""
        return self.error.unfetched if isinstance(self.error, HeadHostLostError) else ""

    def give(self) -> int:
        """Its exit code. Raises CpuftError: it has none."""
        if self.error:
            raise self.error
        return self.ended.code


@dataclass
class RestartHistory:
    """What all starts share."""

    first: Cluster
    leaving: frozenset[str] = frozenset()
    """Hosts that were told that they are about to go."""
    used: dict[str, Host] = field(default_factory=dict)
    """Hosts of the starts before the last, by name."""


def retry_connections(plan: Callable[[], T], pause: float = _PAUSE_SECONDS) -> T:
    """What `plan` gives; where the way to a host failed, it is tried once more, and again. Raises CpuftError: so it
    did."""
    for _ in range(_MORE_TIMES):
        try:
            return plan()
        except CpuftError as error:
            if not error.passes:
                raise
        time.sleep(pause)
    return plan()


def plan_next_attempt(
    launch: Launch, course: RestartHistory, plan: RunPlan, last: Cluster, tried: Attempt, why: str
) -> tuple[RunPlan, Cluster, int]:
    """The plan of the next start, its hosts, and the update that it goes on from.

    `plan` and `last`: of the start that ended, as `tried` and `why` tell.

    Raises CpuftError: fewer ranks are left than --min-np says, or what is wrong with the hosts.
    """
    job, transport, run_dir = launch.job, last.access.transport, launch.run_dir
    course.used.update({one.host.name: one.host for one in last.assignments})
    kill_ranks(last, run_dir)
    hosts, before = read_hosts(job.config), {one.host.name: one.ranks for one in course.first.assignments}
    silent = _ask(transport, hosts, tried.ended.silent)
    left, np = choose_hosts(hosts, silent | course.leaving, before, job.config.np)
    if not np:
        raise CpuftError("no other host is left")
    if np < job.config.min_np:
        raise CpuftError(f"{counted(np, 'rank')} would be left where --min-np asks for {job.config.min_np}: lower it")
    kill_ranks(last, run_dir, [host for host in left if host.name not in last.rank_hosts])
    clean_up_left_out_hosts(launch, plan, last, left)
    job = replace(job, config=replace(job.config, np=np))
    cluster = gather_cluster(job.config, left, last.access)
    kept = gather_host_copies(left, cluster.access, run_dir)[0] if cluster.away else ()
    updates, fetched = (-1, "") if tried.unfetched else (tried.ended.update, last.master if last.away else "")
    resumed = ResumedRun(run_dir, updates=updates, kept=kept, since=tried.since, because=why, fetched=fetched)
    resumed = complete_resumed_run(launch.job, resumed)
    check_newest_checkpoint(resumed.kept, cluster, run_dir)
    return plan_run(job, cluster, run_dir, launch.environ, resumed), cluster, find_newest_checkpoint(run_dir, kept)


def _ask(transport: Transport, hosts: Sequence[Host], lost: Collection[str]) -> set[str]:
    """The hosts that do not answer: those that were `lost` just now, and others. Who was lost before is asked again,
    and nobody waits long for them."""
    names = [host.name for host in hosts if host.name not in lost]
    before = transport.silent.intersection(names)
    transport.find_silent([name for name in names if name not in before])
    transport.find_silent(sorted(before), _AGAIN_SECONDS)
    return transport.silent


def clean_up_left_out_hosts(launch: Launch, plan: RunPlan, last: Cluster, left: Sequence[Host]) -> None:
    """Take the run away, but for its checkpoints, from hosts that the next start does without, and from a master that
    is none any more: its lock would say that it is one."""
    gone = {one.host.name for one in last.assignments} - {host.name for host in left}
    gone |= {last.master} - {left[0].name}
    if gone - last.access.transport.silent:
        others = {one.host.name for one in last.assignments} - gone
        remove_all_but_checkpoints(plan, launch.run_dir, launch.environ, others | last.access.transport.silent)


def fetch_if_finished(launch: Launch, plan: RunPlan, cluster: Cluster, say: Callable[[str], None]) -> bool:
    """Whether the run had come to its end on a head host to which only the connection was lost; then it is fetched."""
    head = [one.host for one in cluster.assignments if one.host.name == cluster.master]
    if not cluster.away or cluster.access.transport.find_silent([cluster.master]):
        return False
    kept, _ = gather_host_copies(head, cluster.access, launch.run_dir)
    if not any(one.finished for one in kept):
        return False
    try:
        fetch_finished(plan, launch.run_dir, cluster, say)
    except HeadHostLostError:
        return False
    return True


def clean_up_lost_hosts(course: RestartHistory, last: Cluster, run_dir: str, say: Callable[[str], None]) -> None:
    """Take what a run that has come to its end left on hosts that it lost on the way, where they answer again, and
    say which do not."""
    used, transport = {one.host.name for one in last.assignments}, last.access.transport
    lost = [host for name, host in course.used.items() if name not in used] if last.away else []
    transport.find_silent([host.name for host in lost], _AGAIN_SECONDS)
    there = [host for host in lost if host.name not in transport.silent]
    work = last.work_dir(run_dir)
    sent = os.path.dirname(last.sent_file(work, 0))
    kill_ranks(last, run_dir, there)
    words = remove_command(last.folder, sent, os.path.dirname(work))
    attempt(lambda host: transport.run(host, words, seconds=_END_SECONDS), there)
    if silent := ", ".join(host.name for host in lost if host not in there):
        say(f"cpuft: {silent} did not answer at the end: {FILES_LEFT}")


def complete_resumed_run(job: Job, resumed: ResumedRun) -> ResumedRun:
    """What is known of a run that broke off under our eyes: where nothing was recorded yet, what it was to be.

    `resumed` has below 0 updates where the record of the last start is lost: hosts may know of some.
    """
    train, kept = job.train, resumed.kept
    batch = train.batch_size * train.gradient_accumulation * job.config.np
    try:
        known = read_resumed_run(resumed.run_dir, bool(job.script), kept)
    except CpuftError:
        known = ResumedRun(resumed.run_dir, train, job.config.np, 0, batch)
    made = [resumed.updates] if resumed.updates >= 0 else [max(one.steps, one.update) for one in kept]
    known = replace(known, kept=kept, updates=max([0, *made]))
    return replace(known, since=resumed.since, because=resumed.because, fetched=resumed.fetched)


def kill_ranks(cluster: Cluster, run_dir: str, hosts: Sequence[Host] | None = None) -> None:
    """End what is left of a run's processes on hosts that answer: mpirun may have been lost with its own.

    `hosts`: without, those of the cluster, where there are several.
    """
    words, transport = cluster.access.any_python("-c", FROM_STDIN, cluster.work_dir(run_dir)), cluster.access.transport
    source = Path(kill.__file__).read_text(encoding="utf-8")
    own = [one.host for one in cluster.assignments] if len(cluster.assignments) > 1 else []
    left = [host for host in (own if hosts is None else hosts) if host.name not in transport.silent]
    attempt(lambda host: transport.run(host, words, source, _END_SECONDS), left)


DEFAULT = 3
"""Restarts of a run on several hosts, where nobody asked for a number."""
_IN_VAIN = {2: "refused its options or data", FULL: "found a full disk"}
"""What an exit code says of a process that ended with one line, and would do so again."""
_FROM_OUTSIDE = (137, 143)
"""SIGKILL and SIGTERM: no program does that to itself."""
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class AttemptResult:
    """How a start of a run ended, as far as it can be told from here."""

    code: int
    failures: tuple[Failure, ...] = ()
    """Whom to blame first stands first."""
    silent: frozenset[str] = frozenset()
    """Its hosts that do not answer."""
    update: int = 0
    """The last one recorded; 0 for none, and for a script."""
    cut: bool = False
    """Whether the connection to the master was lost."""
    leaving: frozenset[str] = frozenset()
    """Its hosts that were told that they are about to go."""
    unreached: str = ""
    """Which way to a host failed before ranks started, though the host answers."""
    hosts: tuple[str, ...] = ()
    """Of each rank."""


@dataclass(frozen=True)
class RestartDecision:
    """What to do about it."""

    again: bool
    why: str
    """What was lost, or why another start would be in vain."""
    mark: str = ""
    """By which the same error is known when it comes again; empty for what can come any number of times."""


def count_restarts(asked: int, hosts: int) -> int:
    """How often a run on so many hosts may be started again; `asked` is below 0 where nobody said so."""
    return asked if asked >= 0 else DEFAULT * (hosts > 1)


def judge(ended: AttemptResult, earlier: Collection[str]) -> RestartDecision:
    """Whether to start again what ended with another exit code than 0; `earlier`: the marks of starts before."""
    for names, how in ((sorted(ended.silent), "lost"), (sorted(ended.leaving), "told to go")):
        if names:
            return RestartDecision(True, f"host{'s' * (len(names) > 1)} {', '.join(names)} {_were(names)} {how}")
    if ended.cut:
        return RestartDecision(True, "the connection to the master was lost")
    if ended.unreached:
        return RestartDecision(True, ended.unreached)
    if not ended.failures:
        if ended.code in _IN_VAIN:
            return RestartDecision(
                False, "a disk was full" if ended.code == FULL else "its options or data were refused"
            )
        return _judge_error(ended, "mpirun failed", f"mpirun {ended.code}", earlier)
    first = ended.failures[0]
    blame = f"rank {first.rank} on {first.host}"
    if first.missed:
        where = dict(enumerate(ended.hosts))
        told = ", ".join(f"rank {rank} on {where.get(rank, 'its host')}" for rank in sorted(first.missed))
        return _judge_error(ended, f"{told} did not answer the others", _last_line(first.text), earlier)
    if first.code == AGAIN:
        return RestartDecision(
            False, f"{blame} was interrupted"
        )  # who told it to end wants its hosts, or takes them away
    if first.ran_out_of_memory:
        return _judge_error(ended, f"{blame} ran out of memory", "out of memory", earlier)
    if first.code in _FROM_OUTSIDE or first.lost_its_peer:
        how = describe_exit(first.code).partition(" (")[0]
        return RestartDecision(True, f"{blame} was {how}" if first.code > 128 else f"{blame} lost another rank")
    if first.code in _IN_VAIN:
        return RestartDecision(False, f"{blame} {_IN_VAIN[first.code]}")
    return _judge_error(ended, f"{blame} failed ({describe_exit(first.code)})", _find_mark(first), earlier)


def _judge_error(ended: AttemptResult, what: str, mark: str, earlier: Collection[str]) -> RestartDecision:
    """An error that may be the job's own: it is, when it comes again at the same update."""
    mark = f"{ended.update} {mark}"
    if mark in earlier:
        where = f" at update {ended.update}" if ended.update else ""
        return RestartDecision(False, f"{what}, as it had before{where}", mark)
    return RestartDecision(True, what, mark)


def _find_mark(failure: Failure) -> str:
    """What a rank's last traceback says, without addresses of memory."""
    start = failure.text.rfind(_TRACEBACK)
    said = failure.text[start:].strip() if start >= 0 else ""
    return f"{failure.code} {re.sub('0x[0-9a-f]+', '0x', said)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def choose_hosts(
    hosts: Sequence[Host], silent: Collection[str], before: Mapping[str, int], np: int
) -> tuple[tuple[Host, ...], int]:
    """The hosts that answer, in the order of the hostfile, and the ranks to start on them: `np` at most.

    No host gets more than it had: `before` has the ranks of each host of the first start; one that had none gets as
    many as the fullest.
    """
    left = tuple(host for host in hosts if host.name not in silent)
    most = max(before.values())
    room = [before.get(host.name) or min(most, host.slots or most) for host in left]
    return left, min(np, sum(room))


def describe_restart(number: int, limit: int, why: str, hosts: Sequence[str], ranks: int, update: int) -> str:
    """The line that a user sees when a run is started again; `update`: the last one that is kept, 0 for none."""
    plural = "s" * (ranks == 1)
    start = f"continue{plural} after update {update}"
    if update <= 0:
        start = f"start{plural} from the beginning, because no checkpoint had been saved yet"
    return f"restart {number} of {limit}: {why}; {counted(ranks, 'rank')} on {', '.join(hosts)} {start}"


def _were(names: Collection[str]) -> str:
    return "were" if len(names) > 1 else "was"
