"""Runs a job to its end: where a host or a rank is lost, it is started again on the hosts that answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cpuft.errors import AGAIN, CpuftError, counted
from cpuft.hosts.cluster import Cluster
from cpuft.launch.again import Course, Tried, end_ranks, fetch_if_finished, patiently, plan_again, take_away
from cpuft.launch.failures import ended_to_go_on, read_failures
from cpuft.launch.fetch import NotStored
from cpuft.launch.job import Job, Launch
from cpuft.launch.kept import remove_empty_run, silent_at_the_end
from cpuft.launch.remote import MasterLost, say_kept
from cpuft.launch.restarts import Ended, count_restarts, describe_restart, judge
from cpuft.plan import RunPlan
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
    return 0 if no_checkpoints else count_restarts(job.config.restarts, len(cluster.assignments))


def describe_limit(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """What a plan does not show: no script of steps decides that."""
    limit = find_limit(job, cluster)
    if not limit:
        return ()
    again = f"cpuft launch starts it again up to {counted(limit, 'time')}, on the hosts that answer"
    least = f", {job.config.min_np} ranks at least" if job.config.min_np > 1 else ""
    return (f"where a host or a rank is lost, {again}{least}",)


def run_attempts(launch: Launch, plan: RunPlan, cluster: Cluster, start: Start, say: Say) -> int:
    """Run a job until it comes to its end, or another start would be in vain; the exit code of the last one.

    Raises CpuftError: as `start`, where its error is none of the hosts, or the last start raised one.
    """
    limit, marks, begun, course = find_limit(launch.job, cluster), set[str](), time.monotonic(), Course(cluster)
    number, stop = 0, ""
    while True:
        try:
            left = _time_left(launch.job, begun) if number else launch.job.config.time_limit
            tried = _try(launch, cluster, partial(start, replace(plan, stays=True), launch.run_dir, cluster, left))
        except NotStored:
            raise  # the hosts' copies are the only ones
        except CpuftError:
            if number:
                say_kept(plan, launch.run_dir, launch.environ, cluster.access.transport.silent, say)
            raise
        if not tried.ended.code or (tried.unfetched and fetch_if_finished(launch, plan, cluster, say)):
            take_away(course, cluster, launch.run_dir, say)
            return 0
        verdict = judge(tried.ended, marks)
        if number == limit or not verdict.again:
            stop = verdict.why if not verdict.again else f"that was restart {number} of {limit}"
            break
        marks.add(verdict.mark)
        course.leaving |= tried.ended.leaving
        try:
            with cluster.access.transport.staying():
                ask = partial(plan_again, launch, course, plan, cluster, tried, verdict.why)
                plan, cluster, update = patiently(ask)
        except CpuftError as error:
            stop = f"{verdict.why}, and {error}"
            break
        number += 1
        hosts = [assignment.host.name for assignment in cluster.assignments]
        say("cpuft: " + describe_restart(number, limit, verdict.why, hosts, len(cluster.rank_hosts), update))
    end_ranks(cluster, launch.run_dir)
    if limit and (number or verdict.again):
        say(f"cpuft: not started again: {stop}")
    if number or tried.ran:
        say_kept(plan, launch.run_dir, launch.environ, {tried.unfetched, *cluster.access.transport.silent}, say)
    remove_empty_run(launch.run_dir)
    return tried.give()


def _time_left(job: Job, begun: float) -> float:
    """Seconds of the time limit that are left; 0 for no limit. Raises CpuftError: none."""
    limit = job.config.time_limit
    left = limit - (time.monotonic() - begun)
    if limit and left < 1:
        raise CpuftError(f"{limit:.0f} s passed: raise --time-limit, or train for less")
    return left if limit else 0.0


def _try(launch: Launch, cluster: Cluster, start: Callable[[], int]) -> Tried:
    """Start it once. Raises CpuftError: what it was given was refused, and no host is lost."""
    begun, hosts, transport = time.time(), cluster.rank_hosts, cluster.access.transport
    error: CpuftError | None = None
    try:
        code = start()
    except MasterLost as lost:
        code, error = AGAIN, lost
    except NotStored:
        raise
    except CpuftError as refusal:
        if not (len(set(hosts)) > 1 and transport.find_silent(sorted(set(hosts)))) and not refusal.passes:
            raise
        code, error = AGAIN, refusal
    if not code:
        return Tried(Ended(0), 0.0)
    failures = [] if error else read_failures(Path(launch.run_dir, "logs"), hosts)
    transport.silent.update(set() if error else silent_at_the_end(launch.run_dir))
    silent = frozenset(transport.silent.intersection(hosts))
    cut = isinstance(error, MasterLost)
    leaving = find_leaving(launch.run_dir, hosts) if ended_to_go_on(failures) else frozenset()
    unreached = str(error) if error and error.passes else ""
    ended = Ended(code, tuple(failures), silent, _count_updates(launch.run_dir), cut, leaving, unreached, hosts)
    return Tried(ended, _find_end(launch.run_dir, begun), error)


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
