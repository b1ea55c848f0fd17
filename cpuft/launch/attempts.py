"""Runs a job to its end: where a host or a rank is lost, it is started again on the hosts that answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cpuft.errors import AGAIN, CpuftError, counted
from cpuft.hosts.cluster import Cluster, gather_cluster, read_hosts
from cpuft.hosts.door import attempt
from cpuft.hosts.hostfile import Host
from cpuft.launch.failures import ended_to_go_on, find_failures, read_errors
from cpuft.launch.job import Job, plan_run
from cpuft.launch.kept import Kept, check_kept, gather_kept, silent_at_the_end
from cpuft.launch.remote import MasterLost
from cpuft.launch.restarts import Ended, choose_hosts, count_restarts, describe_restart, judge
from cpuft.launch.resume import Resumed, read_resumed
from cpuft.plan import RunPlan
from cpuft.record import FILE_NAME, InterruptedLine, parse_lines, read_record

_END = Path(__file__).with_name("end.sh").read_text(encoding="utf-8")
_END_SECONDS = 15.0
Start = Callable[[RunPlan, str, Cluster, float], int]
"""Runs a plan of a run, which lies there, on a cluster within so many seconds (0: no limit); its exit code."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Launch:
    """A job, where its run lies, and what its ranks inherit."""

    job: Job
    run_dir: str
    environ: Mapping[str, str]


@dataclass(frozen=True)
class _Tried:
    ended: Ended
    since: float
    """Since when nothing went on, in seconds since 1970."""
    error: CpuftError | None = None


def find_limit(job: Job, cluster: Cluster) -> int:
    """How often this job may be started again. With IPEX there are no checkpoints.

    Raises CpuftError: --min-np is more than --np.
    """
    if job.config.min_np > job.config.np:
        raise CpuftError(f"--min-np {job.config.min_np} is more than --np {job.config.np}: lower it")
    no_checkpoints = not job.script and job.train.engine == "ipex"
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
    limit, marks, begun, first = find_limit(launch.job, cluster), set[str](), time.monotonic(), cluster
    number, stop, leaving = 0, "", frozenset[str]()
    while True:
        left = _time_left(launch.job, begun) if number else launch.job.config.time_limit
        tried = _try(launch, cluster, partial(start, plan, launch.run_dir, cluster, left))
        if not tried.ended.code:
            return 0
        end_ranks(cluster, [one.host for one in cluster.assignments if len(cluster.assignments) > 1], launch.run_dir)
        verdict = judge(tried.ended, marks)
        if number == limit or not verdict.again:
            stop = verdict.why if not verdict.again else f"that was restart {number} of {limit}"
            break
        marks.add(verdict.mark)
        leaving |= tried.ended.leaving
        try:
            resumed = Resumed(launch.run_dir, since=tried.since, because=verdict.why)
            plan, cluster, update = plan_again(launch, first, cluster, resumed, leaving)
        except CpuftError as error:
            stop = f"{verdict.why}, and {error}"
            break
        number += 1
        hosts = [assignment.host.name for assignment in cluster.assignments]
        say("cpuft: " + describe_restart(number, limit, verdict.why, hosts, len(cluster.rank_hosts), update))
    if limit and (number or verdict.again):
        say(f"cpuft: not started again: {stop}")
    if tried.error:
        raise tried.error
    return tried.ended.code


def _time_left(job: Job, begun: float) -> float:
    """Seconds of the time limit that are left; 0 for no limit. Raises CpuftError: none."""
    limit = job.config.time_limit
    left = limit - (time.monotonic() - begun)
    if limit and left < 1:
        raise CpuftError(f"{limit:.0f} s passed: raise --time-limit, or train for less")
    return left if limit else 0.0


def _try(launch: Launch, cluster: Cluster, start: Callable[[], int]) -> _Tried:
    """Start it once. Raises CpuftError: what it was given was refused, and no host is lost."""
    begun, hosts, door = time.time(), cluster.rank_hosts, cluster.access.door
    error: CpuftError | None = None
    try:
        code = start()
    except MasterLost as lost:
        code, error = AGAIN, lost
    except CpuftError as refusal:
        if len(set(hosts)) == 1 or not door.find_silent(sorted(set(hosts))):
            raise
        code, error = AGAIN, refusal
    if not code:
        return _Tried(Ended(0), 0.0)
    logs = Path(launch.run_dir, "logs")
    failures = () if error else find_failures(read_errors(logs, len(hosts)), hosts)
    door.silent.update(set() if error else silent_at_the_end(launch.run_dir))
    silent = frozenset(door.silent.intersection(hosts))
    cut = isinstance(error, MasterLost)
    leaving = find_leaving(launch.run_dir, hosts) if ended_to_go_on(list(failures)) else frozenset()
    ended = Ended(code, tuple(failures), silent, _count_updates(launch.run_dir), cut, leaving)
    return _Tried(ended, _find_end(launch.run_dir, begun), error)


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


def end_ranks(cluster: Cluster, hosts: Sequence[Host], run_dir: str) -> None:
    """End what is left of a run's processes on hosts that answer: mpirun may have been lost with its own."""
    words = ("sh", "-c", _END, "end", cluster.work_dir(run_dir))
    door = cluster.access.door
    left = [host for host in hosts if host.name not in door.silent]
    attempt(lambda host: door.run(host, words, seconds=_END_SECONDS), left)


def plan_again(
    launch: Launch, first: Cluster, last: Cluster, resumed: Resumed, leaving: frozenset[str] = frozenset()
) -> tuple[RunPlan, Cluster, int]:
    """The plan of the next start, its hosts, and the update that it goes on from.

    `first` and `last`: the clusters of the first start, and of the one that ended; `leaving`: hosts that are about to
    go.

    Raises CpuftError: fewer ranks are left than --min-np says, or what is wrong with the hosts.
    """
    job, door = launch.job, last.access.door
    hosts = read_hosts(job.config)
    door.find_silent([host.name for host in hosts if host.name not in door.silent])
    before = {one.host.name: one.ranks for one in first.assignments}
    left, np = choose_hosts(hosts, door.silent | leaving, before, job.config.np)
    if not np:
        raise CpuftError("no other host is left")
    if np < job.config.min_np:
        raise CpuftError(f"{counted(np, 'rank')} would be left where --min-np asks for {job.config.min_np}: lower it")
    end_ranks(last, [host for host in left if host.name not in last.rank_hosts], launch.run_dir)
    job = replace(job, config=replace(job.config, np=np))
    cluster = gather_cluster(job.config, left)
    kept = gather_kept(left, cluster.access, launch.run_dir)[0] if cluster.away else ()
    resumed = find_resumed(launch.job, resumed, kept)
    check_kept(resumed.kept, cluster, launch.run_dir)
    plan = plan_run(job, cluster, launch.run_dir, launch.environ, resumed)
    return plan, cluster, find_update(launch.run_dir, kept)


def find_resumed(job: Job, resumed: Resumed, kept: tuple[Kept, ...]) -> Resumed:
    """What is known of a run that broke off under our eyes: where nothing was recorded yet, what it was to be."""
    train = job.train
    batch = train.batch_size * train.accumulation * job.config.np
    try:
        known = read_resumed(resumed.run_dir, bool(job.script), kept)
    except CpuftError:
        known = Resumed(resumed.run_dir, train, job.config.np, 0, batch)
    return replace(known, kept=kept, since=resumed.since, because=resumed.because)


def find_update(run_dir: str, kept: tuple[Kept, ...]) -> int:
    """The last update of the newest checkpoint; 0 for none."""
    folder = Path(run_dir, "checkpoints")
    names = os.listdir(folder) if folder.is_dir() else []
    here = [int(name.split(".")[0]) for name in names if name.replace(".", "").isdecimal()]
    return max([0, *here, *(one.update for one in kept)])
