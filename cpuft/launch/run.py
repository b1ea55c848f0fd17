"""`cpuft launch` from options to results: check what is asked for, plan it, run it, and describe how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from cpuft.config.launch import LaunchConfig, ScriptConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.execute import Say
from cpuft.hosts.cluster import LOCAL, Cluster, find_access, gather_cluster, read_hosts
from cpuft.hosts.rank_counts import describe_ranks
from cpuft.launch.attempt import run_attempt
from cpuft.launch.failures import describe_end
from cpuft.launch.inputs import LaunchNote, list_input_paths, load_note, make_note, save_note
from cpuft.launch.lease_renewal import renew_leases
from cpuft.launch.plan import Job, plan_fetching, plan_run
from cpuft.launch.progress_bar import show_progress
from cpuft.launch.restart import kill_ranks, run_with_restarts
from cpuft.launch.results import fetch_and_clean_up
from cpuft.launch.resume import gather_resumed_run, has_begun
from cpuft.launch.run_folder import choose_run_dir
from cpuft.launch.run_locks import lock_run
from cpuft.launch.script_command import name_script, plan_script, refuse_other_launchers, wrap_script
from cpuft.launch.stop_request import SCRIPT_STOP_SECONDS, TRAINING_STOP_SECONDS, StopRequest
from cpuft.plans import RunPlan


@dataclass(frozen=True)
class LaunchRequest:
    """What the user asks `cpuft launch` for."""

    config: LaunchConfig
    train: TrainConfig
    script_options: ScriptConfig
    script: tuple[str, ...]
    """The user's own script and its arguments; empty for a training."""
    resume: str
    given: frozenset[str]
    """Names of the options that the command line or the file of --config gives, such as "batch_size"."""
    progress: str
    call_file: str = ""
    """This machine's file with a function of the user's, if the script is the module that calls it; else empty."""


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch that is ready to start."""

    run_dir: str
    """Absolute path of the run folder on this machine."""
    cluster: Cluster
    plan: RunPlan
    job: Job | None = None
    """None if the run has finished on the head host, and its results are only to be fetched."""
    note: LaunchNote = LaunchNote()
    """What is noted on this machine for the time when the run is resumed."""


def plan_request(
    request: LaunchRequest, environ: Mapping[str, str], say: Say, locks: ExitStack | None, sessions: ExitStack
) -> PlannedLaunch:
    """Check a request and plan it. Asks the hosts for their facts; nothing starts, and nothing changes but the locks.

    `locks` gets the lock of the run's folder, and is None for a dry run. `sessions` keeps the ssh sessions with the
    hosts open until it is closed, so that the check before the launch needs no further logins. Raises CpuftError:
    options contradict each other, or hosts, run folder or script cannot be used.
    """
    options = request.script_options
    if options.independent and not request.script:
        raise CpuftError("--independent is for a script of your own: cpuft launch --independent -- train.py ...")
    command = plan_script(request.script) if request.script else ()
    if options.wrap:
        wrap_script(command, sys.executable, options.wrap)  # refuses what is no Python script
    if request.resume and locks:  # before the state of the run is read: another launch would change it
        locks.enter_context(lock_run(request.resume))
    config, train = request.config, request.train
    note = load_note(os.path.realpath(request.resume), environ) if request.resume else LaunchNote()
    if note.id and not has_begun(request.resume):
        say(f"cpuft: run {note.id} was detached: if its head host answers, fetch it with cpuft attach {note.id}")
    config = _take_hosts(config, note, request.given, say)
    resumed = gather_resumed_run(request.resume, config, bool(request.script)) if request.resume else None
    if resumed and resumed.finished_on:
        head = tuple(host for host in resumed.hosts if host.name == resumed.finished_on)
        cluster = gather_cluster(replace(config, np=1), head, is_on_host_disk=True)
        return PlannedLaunch(resumed.run_dir, cluster, plan_fetching(cluster, resumed))
    run_dir = ""
    if resumed:
        config, train = resumed.take_over(config, train, request.given)
        for reason in resumed.unreachable:
            say(f"{reason}; the run continues without it")
        run_dir = resumed.run_dir
    elif config.run_dir:
        run_dir = _take_folder(config.run_dir, "", locks)
    access = find_access(config)
    sessions.enter_context(access.transport.keep_sessions())
    is_on_host_disk = any(copy.exists for copy in resumed.host_copies) if resumed else False
    cluster = gather_cluster(config, resumed.hosts if resumed else (), access, is_on_host_disk)
    reason = "" if config.np else describe_ranks(cluster.assignments, cluster.facts, config.ppn)
    config = replace(config, np=cluster.ranks)
    if config.min_np > config.np:
        raise CpuftError(f"--min-np {config.min_np} is more than --np {config.np}: lower --min-np")
    if request.script and config.np > 1 and not options.independent:
        refuse_other_launchers(request.script)
    if not run_dir:
        name = name_script(command) if command else train.task
        run_dir = _take_folder("", f"{name}-np{config.np}", locks)
    paths = list_input_paths(train, request.given) | {*note.paths} if resumed else list_input_paths(train)
    allowed = frozenset(paths) if resumed else None
    job = Job(run_dir, config, train, command, options, request.progress, request.call_file, allowed, environ)
    plan = plan_run(job, cluster, resumed)
    if reason:
        say(reason)
    return PlannedLaunch(run_dir, cluster, plan, job, make_note(config, () if command else paths))


def _take_folder(wanted: str, name: str, locks: ExitStack | None) -> str:
    run_dir = choose_run_dir(wanted, name)
    if locks:
        locks.enter_context(lock_run(run_dir))
    return run_dir


def _take_hosts(config: LaunchConfig, note: LaunchNote, given: Collection[str], say: Say) -> LaunchConfig:
    """Return the options with the hosts of the launch that started the run, unless this one or its job names others."""
    if not (note.cluster or note.hostfile) or {"cluster", "hostfile"} & {*given}:
        return config
    if read_hosts(replace(config, only_hosts="")) != (LOCAL,):
        return config
    where = f"--cluster {note.cluster}" if note.cluster else f"--hostfile {note.hostfile}"
    say(f"cpuft: the run was started with {where}, which is used again")
    ssh_config = config.ssh_config or note.ssh_config
    return replace(config, cluster=note.cluster, hostfile=note.hostfile, ssh_config=ssh_config)


def run_launch(request: LaunchRequest, planned: PlannedLaunch, environ: Mapping[str, str], say: Say) -> tuple[int, str]:
    """Carry out a planned launch, with restarts; return the exit code, and a closing line for the user or "". Raises
    the CpuftError of the last attempt; a signal ends this program.
    """
    job, run_dir, cluster = planned.job, planned.run_dir, planned.cluster
    if not job:
        say(f"cpuft: the run has finished on {cluster.head}: fetching its results")
        with renew_leases(cluster.access, say):
            fetch_and_clean_up(planned.plan, run_dir, cluster, True, say)
        save_note(run_dir, LaunchNote(), environ)
        return 0, f"run: {run_dir}"
    save_note(run_dir, planned.note, environ)
    # A head host that does not answer may have left ranks on others.
    if planned.plan.resumed and cluster.works_remotely:
        kill_ranks(cluster, run_dir, planned.plan.owner - 1, list(cluster.hosts.values()))
    ctrl_c_seconds = TRAINING_STOP_SECONDS
    if job.script:
        ctrl_c_seconds = SCRIPT_STOP_SECONDS if job.script[0] == sys.executable else 0.0
    stop = StopRequest(job.config.grace_period if job.train.engine == "torch" else None, ctrl_c_seconds)
    start = partial(run_attempt, say=say, request=stop)
    with renew_leases(cluster.access, say), show_progress(request.progress):
        code = run_with_restarts(job, planned.plan, cluster, start, say, stop)
    if not code:
        save_note(run_dir, LaunchNote(), environ)
    return describe_end(code, run_dir, cluster.rank_hosts, planned.plan)
