"""Run a job to its end: after the loss of a host or a rank, restart it on the hosts that answer.

`run_with_restarts` makes one attempt after another. After each failed attempt, `RestartPolicy` decides from its
`AttemptResult` whether another attempt makes sense, and `plan_next_attempt` chooses hosts and checkpoint for it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cpuft.errors import IO_ERROR, RESUMABLE, CpuftError, counted, last_line
from cpuft.execute import Say
from cpuft.files import remove_command
from cpuft.hosts.cluster import Cluster, gather_cluster, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, try_hosts
from cpuft.launch.failures import Failure, explain_exit, read_failures
from cpuft.launch.plan import Job, plan_fetching, plan_run
from cpuft.launch.results import (
    HeadHostLostError,
    NotStoredError,
    describe_left,
    fetch_and_clean_up,
    remove_all_but_checkpoints,
)
from cpuft.launch.resume import (
    HostCopy,
    ResumedRun,
    find_newest_update,
    gather_host_copies,
    read_resumed_run,
    remove_empty_run,
)
from cpuft.launch.run_state import LaterStartError, find_end, read_state
from cpuft.launch.stop_request import StopRequest
from cpuft.plans import RunPlan
from cpuft.rank import kill
from cpuft.record import FILE_NAME, read_record
from cpuft.retry import retry

Start = Callable[[RunPlan, str, Cluster, float], int]
"""Carries out a plan in a run folder on a cluster within a time limit in seconds (0: none); returns its exit code."""

DEFAULT_RESTARTS = 3
_REPEATS = {2: "rejected its options or data", IO_ERROR: "found a full disk"}
"""Exit codes of a process that ended with a one-line error, which would be the same after a restart."""
_FROM_OUTSIDE = (137, 143)
"""Exit codes for SIGKILL and SIGTERM, which no program sends to itself."""
_TRACEBACK = "Traceback (most recent call last)"
_KILL_SECONDS = 15.0
_LOST_HOST_SECONDS = 2.5
"""How long a host that was lost earlier may take to answer at the end of the run."""
_RETRY_PAUSES = (2.0, 2.0)
"""Seconds before each new try to plan a restart after a failed connection."""


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, as far as this machine can know."""

    code: int
    failures: tuple[Failure, ...] = ()
    """The most likely cause first."""
    unreachable: frozenset[str] = frozenset()
    """Hosts of the attempt that do not answer."""
    update: int = 0
    """The last recorded update; 0 for none, and for a script."""
    leaving: frozenset[str] = frozenset()
    """Hosts of the attempt that received an interruption notice."""
    hosts: tuple[str, ...] = ()
    """The host of each rank."""
    stopped_at: float = 0.0
    """Since when the run made no progress, in seconds since 1970."""
    error: CpuftError | None = None
    """None if the ranks of the attempt ended with an exit code."""

    @property
    def unfetched_from(self) -> str:
        """Name of the head host that has the only copy of the record; empty if the record was fetched."""
        return getattr(self.error, "unfetched_from", "")


@dataclass
class RestartHistory:
    """What the attempts of a run have in common."""

    first_cluster: Cluster
    leaving: frozenset[str] = frozenset()
    """Hosts that have received an interruption notice."""
    used_hosts: dict[str, Host] = field(default_factory=dict)
    """Hosts of the attempts before the last one, by name."""


@dataclass(frozen=True)
class RestartDecision:
    """Whether to restart, and why."""

    restart: bool
    reason: str
    """What was lost, or why a restart would not help; a phrase such as "host node2 was lost"."""
    error_id: str = ""
    """Identifies an error that may occur again; empty for a loss, which may happen any number of times."""


@dataclass
class RestartPolicy:
    """Decides after each failed attempt whether the run is restarted."""

    limit: int
    restarts: int = 0
    errors: set[str] = field(default_factory=set)
    """`RestartDecision.error_id` of earlier attempts."""

    def decide(self, result: AttemptResult) -> RestartDecision:
        """Decide whether to restart after an attempt with another exit code than 0. Changes no attribute.

        The answer is yes after any loss from outside, such as a host, a connection or a killed rank, and once after an
        error that may be the job's own: the same error at the same update would come a third time. It is no after
        `limit` restarts, and if a rank was interrupted, rejected its options or data, or found a full disk.
        """
        decision = self._explain(result)
        if decision.restart and self.restarts >= self.limit:
            return RestartDecision(
                False, f"this was restart {self.restarts} of {self.limit}, and --max-restarts allows no more"
            )
        return decision

    def _explain(self, result: AttemptResult) -> RestartDecision:
        for names, what in ((result.unreachable, "{} lost"), (result.leaving, "received an interruption notice")):
            if names:
                hosts = f"host{'s' * (len(names) > 1)} {', '.join(sorted(names))}"
                return RestartDecision(True, f"{hosts} {what.format('were' if len(names) > 1 else 'was')}")
        if isinstance(result.error, HeadHostLostError):
            return RestartDecision(True, "the connection to the head host was lost")
        if result.error and result.error.is_transient:
            return RestartDecision(True, str(result.error))
        if not result.failures:
            if result.code in _REPEATS:
                what = "a disk was full" if result.code == IO_ERROR else "its options or data were rejected"
                return RestartDecision(False, what)
            return self._retry_once(result, "mpirun failed", f"mpirun {result.code}")
        first = result.failures[0]
        rank = f"rank {first.rank} on {first.host}"
        if first.missed:
            hosts_by_rank = dict(enumerate(result.hosts))
            missed = ", ".join(f"rank {one} on {hosts_by_rank.get(one, 'its host')}" for one in sorted(first.missed))
            return self._retry_once(result, f"{missed} did not answer the other ranks", last_line(first.text, ""))
        if first.code == RESUMABLE:
            # Whoever interrupted the run needs its hosts, or takes them away.
            return RestartDecision(False, f"{rank} was interrupted")
        if first.ran_out_of_memory:
            return self._retry_once(result, f"{rank} ran out of memory", "out of memory")
        cause, _ = explain_exit(first.code)
        if first.code in _FROM_OUTSIDE or first.lost_its_peer:
            return RestartDecision(True, f"{rank} was {cause}" if first.code > 128 else f"{rank} lost another rank")
        if first.code in _REPEATS:
            return RestartDecision(False, f"{rank} {_REPEATS[first.code]}")
        return self._retry_once(result, f"{rank} failed ({cause})", _identify_error(first))

    def _retry_once(self, result: AttemptResult, what: str, error: str) -> RestartDecision:
        """Restart after an error that may be the job's own, unless it came before at the same update."""
        error_id = f"{result.update} {error}"
        if error_id in self.errors:
            where = f" at update {result.update}" if result.update else ""
            return RestartDecision(False, f"{what}, the same error as before{where}", error_id)
        return RestartDecision(True, what, error_id)


def _identify_error(failure: Failure) -> str:
    start = failure.text.rfind(_TRACEBACK)
    traceback = failure.text[start:].strip() if start >= 0 else ""
    return f"{failure.code} {re.sub('0x[0-9a-f]+', '0x', traceback)}"


def find_limit(job: Job, cluster: Cluster) -> int:
    """Return the number of restarts that a job may have: `config.max_restarts`, by default (-1) 3 on several hosts and
    0 on one; 0 for a training whose engine is not torch, which has no checkpoints.
    """
    config = job.config
    if not job.script and job.train.engine != "torch":
        return 0
    return config.max_restarts if config.max_restarts >= 0 else DEFAULT_RESTARTS * (len(cluster.assignments) > 1)


def describe_restart(number: int, limit: int, reason: str, hosts: Sequence[str], ranks: int, update: int) -> str:
    """Return "restart 1 of 3: REASON; 4 ranks on a, b continue after update 40", and for an `update` of 0 or less
    "start from the beginning, because no checkpoint had been saved yet" at its end.
    """
    plural = "s" * (ranks == 1)
    start = f"continue{plural} after update {update}"
    if update <= 0:
        start = f"start{plural} from the beginning, because no checkpoint had been saved yet"
    return f"restart {number} of {limit}: {reason}; {counted(ranks, 'rank')} on {', '.join(hosts)} {start}"


def run_with_restarts(
    job: Job, plan: RunPlan, cluster: Cluster, start: Start, say: Say, request: StopRequest | None = None
) -> int:
    """Run a job until it succeeds or another attempt would not help; return the exit code of the last attempt.

    A run that is known to have finished is never started again: the code is 0 also if the last attempt lost the head
    host, and the results could be fetched from there later. After a signal of `request` there is no restart, and an
    error of the attempt becomes the code 128 + the signal's number. After the last attempt has failed, ranks that are
    left are killed, the run is removed from its hosts except its checkpoints, and an empty run folder is removed here.
    NotStoredError and LaterStartError leave everything as it is. Raises the CpuftError of the last attempt.
    """
    is_new = not plan.resumed
    # A host that did not answer when the run was resumed may have files of it.
    earlier = read_state(job.run_dir) if plan.resumed else None
    known = read_hosts(job.config) if earlier else ()
    used = {host.name: host for host in known if earlier and host.name in earlier.hosts}
    history = RestartHistory(cluster, used_hosts=used)
    policy, begun = RestartPolicy(find_limit(job, cluster)), time.monotonic()
    while True:
        try:
            time_limit = _time_left(job, begun) if policy.restarts else job.config.time_limit
            # The hosts keep what they have until the last attempt has ended.
            start_now = partial(start, replace(plan, keep_host_copies=True), job.run_dir, cluster, time_limit)
            tried = make_attempt(job.run_dir, cluster, plan.owner, start_now)
        except (NotStoredError, LaterStartError):
            raise  # the hosts have the only copies of the results, or work for another launcher: nothing is removed
        except CpuftError:
            if policy.restarts:
                unreachable = cluster.access.transport.unreachable
                remove_all_but_checkpoints(plan, job.run_dir, unreachable, say)
            raise
        if not tried.code or (tried.unfetched_from and _fetch_if_finished(job.run_dir, plan, cluster, say)):
            clean_up_lost_hosts(history, cluster, job.run_dir, plan.owner, say)
            return 0
        decision = policy.decide(tried)
        reason, signal_number = decision.reason, request.signal_number if request else 0
        if decision.restart and signal_number:
            reason = f"{reason}, and {signal.Signals(signal_number).name} had asked the run to end"
        if not decision.restart or signal_number:
            break
        policy.errors.add(decision.error_id)
        history.leaving |= tried.leaving
        try:
            with cluster.access.transport.keep_sessions():
                plan_next = partial(plan_next_attempt, job, history, plan, cluster, tried, reason)
                plan, cluster, update = retry(plan_next, _RETRY_PAUSES)
        except CpuftError as error:
            reason = f"{reason}, and {error}"
            break
        if not plan.ranks:
            fetch_and_clean_up(plan, job.run_dir, cluster, True, say)
            clean_up_lost_hosts(history, cluster, job.run_dir, plan.owner, say)
            return 0
        policy.restarts += 1
        where = list(cluster.hosts), cluster.ranks
        say(f"cpuft: {describe_restart(policy.restarts, policy.limit, reason, *where, update)}")
    kill_ranks(cluster, job.run_dir, plan.owner)
    if policy.limit and (policy.restarts or decision.restart):
        say(f"cpuft: not restarted: {reason}")
    # Errors other than the loss of the head host may have come before the run folder was made.
    if policy.restarts or isinstance(tried.error, HeadHostLostError | None):
        without = {tried.unfetched_from, *cluster.access.transport.unreachable}
        remove_all_but_checkpoints(plan, job.run_dir, without, say)
    if is_new and not tried.unfetched_from:
        remove_empty_run(job.run_dir)
    if tried.error and signal_number:
        say(f"cpuft: {tried.error}")
        return 128 + signal_number
    if tried.error:
        raise tried.error
    return tried.code


def _time_left(job: Job, begun: float) -> float:
    limit = job.config.time_limit
    left = limit - (time.monotonic() - begun)
    if limit and left < 1:
        raise CpuftError(f"the time limit of {limit:.0f} s is over: raise --time-limit, or train for less")
    return left if limit else 0.0


def make_attempt(run_dir: str, cluster: Cluster, owner: int, start: Callable[[], int]) -> AttemptResult:
    """Start the ranks once, as start number `owner` of the run, and find out how they ended; AttemptResult(0) if well.
    Raises the CpuftError of `start`; if a lost host or connection is its reason, returns code 75 with this `error`.
    """
    begun, hosts, transport = time.time(), cluster.rank_hosts, cluster.access.transport
    names = sorted(set(hosts))
    error: CpuftError | None = None
    try:
        code = start()
    except HeadHostLostError as lost:
        code, error = RESUMABLE, lost
    except (NotStoredError, LaterStartError):
        raise
    except CpuftError as refusal:
        if not (len(names) > 1 and transport.find_unreachable(names)) and not refusal.is_transient:
            raise
        code, error = RESUMABLE, refusal
    if not code:
        return AttemptResult(0)
    failures = [] if error else read_failures(Path(run_dir, "logs"), hosts)
    end = None if error else find_end(run_dir, owner)
    transport.unreachable.update(end.unreachable if end else ())
    if transport.unreachable.intersection(hosts):
        # Another host may have been lost at the same moment: it has to be named, and nothing should wait for it later.
        transport.find_unreachable([name for name in names if name not in transport.unreachable])
    update = 0
    with suppress(CpuftError):
        update = len(read_record(run_dir).steps)
    return AttemptResult(
        code,
        failures=tuple(failures),
        unreachable=frozenset(transport.unreachable.intersection(hosts)),
        update=update,
        leaving=frozenset(end.leaving if end else ()),
        hosts=hosts,
        stopped_at=_find_last_progress(run_dir, begun),
        error=error,
    )


def _find_last_progress(run_dir: str, begun: float) -> float:
    """Return when an attempt that began at `begun` recorded its last line; now, if its record is lost."""
    try:
        changed = Path(run_dir, FILE_NAME).stat().st_mtime
    except OSError:
        changed = 0.0
    return changed if changed > begun else time.time()


def plan_next_attempt(
    job: Job, history: RestartHistory, plan: RunPlan, last: Cluster, tried: AttemptResult, reason: str
) -> tuple[RunPlan, Cluster, int]:
    """Choose hosts for the next attempt and plan it, after one on `last` that ended as `tried`.

    Kills ranks that are left, and removes the run, except its checkpoints, from hosts that the next attempt does not
    use. Returns the plan, its cluster, and the update of the checkpoint to continue from (0 for none). If the run has
    finished on a host, the plan only fetches it. Raises CpuftError: too few hosts are left, those left lack the newest
    checkpoint, or one cannot be used.
    """
    transport, run_dir = last.access.transport, job.run_dir
    history.used_hosts.update(last.hosts)
    kill_ranks(last, run_dir, plan.owner)
    hosts, first_ranks = read_hosts(job.config), {one.host.name: one.ranks for one in history.first_cluster.assignments}
    unreachable = _find_unreachable(transport, hosts, tried.unreachable)
    remaining, np = choose_hosts(hosts, unreachable | history.leaving, first_ranks, job.config.np)
    if not np:
        raise CpuftError("no other host is left")
    if np < job.config.min_np:
        raise CpuftError(f"only {counted(np, 'rank')} would be left: lower --min-np, which is {job.config.min_np}")
    kill_ranks(last, run_dir, plan.owner, [host for host in remaining if host.name not in last.rank_hosts])
    if not tried.unfetched_from:  # otherwise the head host has the only record, and may even have finished
        clean_up_left_out_hosts(run_dir, plan, last, remaining)
    config = replace(job.config, np=np)
    cluster = gather_cluster(config, remaining, last.access, last.works_remotely)
    # The same folder on hosts, also if the run folder here is not made yet.
    cluster = replace(cluster, token=last.token)
    copies = _ask_hosts(remaining, cluster, run_dir, history.used_hosts.keys()) if cluster.works_remotely else ()
    if finished := [copy.host for copy in copies if copy.is_finished]:
        cluster = gather_cluster(replace(config, np=1), tuple(finished[:1]), last.access, last.works_remotely)
        return plan_fetching(cluster, ResumedRun(run_dir, owner=plan.owner, host_copies=copies)), cluster, 0
    updates, fetched_from = -1, ""
    if not tried.unfetched_from:
        updates, fetched_from = tried.update, last.head if last.works_remotely else ""
    resumed = find_resumed_run(job, copies, updates)
    resumed = replace(resumed, owner=plan.owner, stopped_at=tried.stopped_at)
    resumed = replace(resumed, restart_reason=reason, fetched_from=fetched_from)
    return plan_run(replace(job, config=config), cluster, resumed), cluster, find_newest_update(run_dir, copies)


def _ask_hosts(hosts: Sequence[Host], cluster: Cluster, run_dir: str, owners: Set[str]) -> tuple[HostCopy, ...]:
    """Return what hosts have of the run. Raises CpuftError: one of `owners`, which have files of it, does not say."""
    owners_first = sorted(hosts, key=lambda host: host.name not in owners)
    copies, errors = gather_host_copies(owners_first, cluster.access, run_dir)
    if owners & {host.name for host in hosts} - {copy.host.name for copy in copies}:
        raise errors[0]
    return copies


def choose_hosts(
    hosts: Sequence[Host], excluded: Collection[str], first_ranks: Mapping[str, int], np: int
) -> tuple[tuple[Host, ...], int]:
    """Return the `hosts` that are not `excluded`, and how many ranks they get together: at most `np`, 0 without a host.
    A host gets as many as in `first_ranks`. One that is missing there gets its slots, but no more than the fullest host
    there, and as many as that without slots.
    """
    left = tuple(host for host in hosts if host.name not in excluded)
    most = max(first_ranks.values())
    slots = [first_ranks.get(host.name) or min(most, host.slots or host.max_slots or most) for host in left]
    return left, min(np, sum(slots))


def _find_unreachable(transport: Transport, hosts: Sequence[Host], just_lost: Collection[str]) -> set[str]:
    """Return the hosts that do not answer. Those just lost are not asked."""
    transport.hosts.update({host.name: host for host in hosts})
    transport.find_unreachable([host.name for host in hosts if host.name not in just_lost])
    return transport.unreachable


def clean_up_left_out_hosts(run_dir: str, plan: RunPlan, last: Cluster, remaining: Sequence[Host]) -> None:
    """Remove the run, except its checkpoints, from hosts of the last attempt that the next one does not use, and from a
    former head host: its lock file would make it look like the current one, the first of `remaining`. Hosts known to be
    unreachable are skipped, and one that does not answer raises nothing.
    """
    names = set(last.hosts)
    left_out = (names - {host.name for host in remaining}) | ({last.head} - {remaining[0].name})
    unreachable = last.access.transport.unreachable
    if left_out - unreachable:
        remove_all_but_checkpoints(plan, run_dir, (names - left_out) | unreachable)


def _fetch_if_finished(run_dir: str, plan: RunPlan, cluster: Cluster, say: Say) -> bool:
    if not cluster.works_remotely or cluster.access.transport.find_unreachable([cluster.head]):
        return False
    copies: Sequence[HostCopy] = ()
    with suppress(CpuftError):
        head_host = [cluster.hosts[cluster.head]]
        copies = retry(partial(_ask_hosts, head_host, cluster, run_dir, {cluster.head}), _RETRY_PAUSES)
    if not any(copy.is_finished for copy in copies):
        return False
    return fetch_and_clean_up(plan, run_dir, cluster, True, say)


def clean_up_lost_hosts(history: RestartHistory, last: Cluster, run_dir: str, owner: int, say: Say) -> None:
    """Remove a finished run from hosts that it lost, if they answer again, and name with `say` those that do not."""
    transport = last.access.transport
    lost = [host for name, host in history.used_hosts.items() if name not in last.hosts and last.works_remotely]
    transport.find_unreachable([host.name for host in lost], _LOST_HOST_SECONDS)
    reachable = [host for host in lost if host.name not in transport.unreachable]
    secrets = os.path.dirname(last.sent_file(last.work_dir(run_dir), 0))
    kill_ranks(last, run_dir, owner, reachable)
    if reachable:  # an mpirun that was frozen there may have started proxies on the others since
        kill_ranks(last, run_dir, owner - 1, list(last.hosts.values()))
    command = remove_command(last.folder, secrets, *last.list_folders(run_dir))
    answers = try_hosts(lambda host: transport.run(host, command, seconds=_KILL_SECONDS), reachable)
    cleaned = [host for host, one in zip(reachable, answers) if not isinstance(one, CpuftError) and not one.exit_code]
    if left := [host.name for host in lost if host not in cleaned]:
        say(describe_left(left))


def find_resumed_run(job: Job, copies: tuple[HostCopy, ...], updates: int) -> ResumedRun:
    """Return what is known about a run that is restarted: its recorded options, or those of `job` without a record, and
    `updates` as its number of updates or, if that is below 0 because the record is lost, the largest in `copies`.
    """
    batch = job.train.batch_size * job.train.gradient_accumulation * job.config.np
    try:
        known = read_resumed_run(job.run_dir, bool(job.script), copies)
    except CpuftError:
        known = ResumedRun(job.run_dir, job.train, job.config.np, 0, batch)
    if updates < 0:
        updates = max([0, *(max(one.steps, one.checkpoint_update) for one in copies)])
    return replace(known, host_copies=copies, updates=updates)


def kill_ranks(cluster: Cluster, run_dir: str, owner: int, hosts: Sequence[Host] | None = None) -> None:
    """Kill the processes of start number `owner` and earlier ones of a run on hosts that answer: a lost mpirun does not
    end its ranks. Errors are ignored. Without `hosts`, those of the cluster are asked if there are several.
    """
    if hosts is None:
        hosts = list(cluster.hosts.values()) if len(cluster.hosts) > 1 else []
    reachable = [host for host in hosts if host.name not in cluster.access.transport.unreachable]
    run = partial(cluster.access.run_module, seconds=_KILL_SECONDS)
    try_hosts(lambda host: run(host, kill, cluster.work_dir(run_dir), str(owner)), reachable)
