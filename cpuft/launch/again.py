"""What the next start of a run is: its hosts, its plan, and the update that it goes on from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from cpuft.errors import CpuftError, counted
from cpuft.files import remove_command
from cpuft.hosts.cluster import FROM_STDIN, Cluster, gather_cluster, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, attempt
from cpuft.launch.job import Job, Launch, plan_run
from cpuft.launch.kept import check_kept, find_update, gather_kept, keep_checkpoints
from cpuft.launch.remote import LEFT_THERE, MasterLost, fetch_finished
from cpuft.launch.restarts import Ended, choose_hosts
from cpuft.launch.resume import Resumed, read_resumed
from cpuft.plan import RunPlan
from cpuft.rank import kill

T = TypeVar("T")
_END_SECONDS = 15.0
_AGAIN_SECONDS = 2.5
"""For a host that was lost earlier to answer: a restart does not wait for it as for the others."""
_PAUSE_SECONDS = 2.0
_MORE_TIMES = 2
"""Hosts are asked so often again, after a pause, where the way to one of them failed."""


@dataclass(frozen=True)
class Tried:
    """A start that ended before its time."""

    ended: Ended
    since: float
    """Since when nothing went on, in seconds since 1970."""
    error: CpuftError | None = None

    @property
    def ran(self) -> bool:
        """Whether its folder was made."""
        return self.error is None or isinstance(self.error, MasterLost)

    @property
    def unfetched(self) -> str:
        """The master that has alone what was recorded; empty for none."""
        return self.error.unfetched if isinstance(self.error, MasterLost) else ""

    def give(self) -> int:
        """Its exit code. Raises CpuftError: it has none."""
        if self.error:
            raise self.error
        return self.ended.code


@dataclass
class Course:
    """What all starts share."""

    first: Cluster
    leaving: frozenset[str] = frozenset()
    """Hosts that were told that they are about to go."""
    used: dict[str, Host] = field(default_factory=dict)
    """Hosts of the starts before the last, by name."""


def patiently(plan: Callable[[], T], pause: float = _PAUSE_SECONDS) -> T:
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


def plan_again(
    launch: Launch, course: Course, plan: RunPlan, last: Cluster, tried: Tried, why: str
) -> tuple[RunPlan, Cluster, int]:
    """The plan of the next start, its hosts, and the update that it goes on from.

    `plan` and `last`: of the start that ended, as `tried` and `why` tell.

    Raises CpuftError: fewer ranks are left than --min-np says, or what is wrong with the hosts.
    """
    job, transport, run_dir = launch.job, last.access.transport, launch.run_dir
    course.used.update({one.host.name: one.host for one in last.assignments})
    end_ranks(last, run_dir)
    hosts, before = read_hosts(job.config), {one.host.name: one.ranks for one in course.first.assignments}
    silent = _ask(transport, hosts, tried.ended.silent)
    left, np = choose_hosts(hosts, silent | course.leaving, before, job.config.np)
    if not np:
        raise CpuftError("no other host is left")
    if np < job.config.min_np:
        raise CpuftError(f"{counted(np, 'rank')} would be left where --min-np asks for {job.config.min_np}: lower it")
    end_ranks(last, run_dir, [host for host in left if host.name not in last.rank_hosts])
    leave_hosts(launch, plan, last, left)
    job = replace(job, config=replace(job.config, np=np))
    cluster = gather_cluster(job.config, left, last.access)
    kept = gather_kept(left, cluster.access, run_dir)[0] if cluster.away else ()
    updates, fetched = (-1, "") if tried.unfetched else (tried.ended.update, last.master if last.away else "")
    resumed = Resumed(run_dir, updates=updates, kept=kept, since=tried.since, because=why, fetched=fetched)
    resumed = find_resumed(launch.job, resumed)
    check_kept(resumed.kept, cluster, run_dir)
    return plan_run(job, cluster, run_dir, launch.environ, resumed), cluster, find_update(run_dir, kept)


def _ask(transport: Transport, hosts: Sequence[Host], lost: Collection[str]) -> set[str]:
    """The hosts that do not answer: those that were `lost` just now, and others. Who was lost before is asked again,
    and nobody waits long for them."""
    names = [host.name for host in hosts if host.name not in lost]
    before = transport.silent.intersection(names)
    transport.find_silent([name for name in names if name not in before])
    transport.find_silent(sorted(before), _AGAIN_SECONDS)
    return transport.silent


def leave_hosts(launch: Launch, plan: RunPlan, last: Cluster, left: Sequence[Host]) -> None:
    """Take the run away, but for its checkpoints, from hosts that the next start does without, and from a master that
    is none any more: its lock would say that it is one."""
    gone = {one.host.name for one in last.assignments} - {host.name for host in left}
    gone |= {last.master} - {left[0].name}
    if gone - last.access.transport.silent:
        others = {one.host.name for one in last.assignments} - gone
        keep_checkpoints(plan, launch.run_dir, launch.environ, others | last.access.transport.silent)


def fetch_if_finished(launch: Launch, plan: RunPlan, cluster: Cluster, say: Callable[[str], None]) -> bool:
    """Whether the run had come to its end on a head host to which only the connection was lost; then it is fetched."""
    head = [one.host for one in cluster.assignments if one.host.name == cluster.master]
    if not cluster.away or cluster.access.transport.find_silent([cluster.master]):
        return False
    kept, _ = gather_kept(head, cluster.access, launch.run_dir)
    if not any(one.finished for one in kept):
        return False
    try:
        fetch_finished(plan, launch.run_dir, cluster, say)
    except MasterLost:
        return False
    return True


def take_away(course: Course, last: Cluster, run_dir: str, say: Callable[[str], None]) -> None:
    """Take what a run that has come to its end left on hosts that it lost on the way, where they answer again, and
    say which do not."""
    used, transport = {one.host.name for one in last.assignments}, last.access.transport
    lost = [host for name, host in course.used.items() if name not in used] if last.away else []
    transport.find_silent([host.name for host in lost], _AGAIN_SECONDS)
    there = [host for host in lost if host.name not in transport.silent]
    work = last.work_dir(run_dir)
    sent = os.path.dirname(last.sent_file(work, 0))
    end_ranks(last, run_dir, there)
    words = remove_command(last.folder, sent, os.path.dirname(work))
    attempt(lambda host: transport.run(host, words, seconds=_END_SECONDS), there)
    if silent := ", ".join(host.name for host in lost if host not in there):
        say(f"cpuft: {silent} did not answer at the end: {LEFT_THERE}")


def find_resumed(job: Job, resumed: Resumed) -> Resumed:
    """What is known of a run that broke off under our eyes: where nothing was recorded yet, what it was to be.

    `resumed` has below 0 updates where the record of the last start is lost: hosts may know of some.
    """
    train, kept = job.train, resumed.kept
    batch = train.batch_size * train.accumulation * job.config.np
    try:
        known = read_resumed(resumed.run_dir, bool(job.script), kept)
    except CpuftError:
        known = Resumed(resumed.run_dir, train, job.config.np, 0, batch)
    made = [resumed.updates] if resumed.updates >= 0 else [max(one.steps, one.update) for one in kept]
    known = replace(known, kept=kept, updates=max([0, *made]))
    return replace(known, since=resumed.since, because=resumed.because, fetched=resumed.fetched)


def end_ranks(cluster: Cluster, run_dir: str, hosts: Sequence[Host] | None = None) -> None:
    """End what is left of a run's processes on hosts that answer: mpirun may have been lost with its own.

    `hosts`: without, those of the cluster, where there are several.
    """
    words, transport = cluster.access.any_python("-c", FROM_STDIN, cluster.work_dir(run_dir)), cluster.access.transport
    source = Path(kill.__file__).read_text(encoding="utf-8")
    own = [one.host for one in cluster.assignments] if len(cluster.assignments) > 1 else []
    left = [host for host in (own if hosts is None else hosts) if host.name not in transport.silent]
    attempt(lambda host: transport.run(host, words, source, _END_SECONDS), left)
