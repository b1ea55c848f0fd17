"""Run one attempt wherever its head host is: on this machine, or on another one over the connection to it.

On another head host, `python -m cpuft.launch.attempt` supervises the ranks as if they had been started there. It reads
its part of the plan from standard input, and ends with the connection.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import RESUMABLE, CpuftError, Interrupted
from cpuft.execute import Say
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.transport import SshTransport
from cpuft.launch.fetched_checkpoints import CheckpointCopier
from cpuft.launch.inputs import keep_bundles
from cpuft.launch.results import HeadHostLostError, fetch_and_clean_up, remove_all_but_checkpoints
from cpuft.launch.resume import find_newest_update, remove_empty_run
from cpuft.launch.run_locks import register_run
from cpuft.launch.run_state import (
    INTERRUPTED,
    LATER_START,
    WAIT_FOR_OTHER,
    LaterStartError,
    RunState,
    begin_state,
    find_end,
    note_state,
)
from cpuft.launch.secret_files import secrets_on_hosts
from cpuft.launch.stop_request import StopRequest
from cpuft.launch.supervise import run_as_head_host
from cpuft.plans import RunPlan, Setting, Step
from cpuft.rank.process import OWNER_VARIABLE, end_with_parent
from cpuft.serialization import load, parse_json
from cpuft.terminal import protect_streams
from cpuft.transfer import open_locked

_MAKE_SECONDS = _LOCK_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class AttemptOrder:
    """What the supervisor on the head host gets to know."""

    plan: RunPlan
    """The parts that the head host executes: prepare the examples and start the ranks."""
    run_dir: str
    state: RunState
    seconds: float
    """Time limit of the ranks; 0 for none."""
    ssh_config: str
    """ssh's client configuration for connections from the head host; empty for its user's own."""


def run_attempt(
    plan: RunPlan, run_dir: str, cluster: Cluster, time_limit: float, say: Say, request: StopRequest | None = None
) -> int:
    """Carry out a plan, wherever its head host is, wait for its end, and return the exit code. `run_dir` is on this
    machine; `time_limit` is that of the ranks in seconds, 0 for none.

    The code is 0 if the run succeeded, 75 if it was interrupted or a host was lost, otherwise that of the worst rank; 2
    if another head host rejects the options or data or the time limit passes there. Meanwhile the run is registered as
    active, and its hosts have the run's secret variables. A signal that `request` does not pass on to the ranks ends
    them, and then this program (SystemExit).

    Raises HeadHostLostError: another head host, or the connection to it, was lost. Raises NotStoredError: the results
    could not be stored here or, if the run has finished, not be fetched. Raises LaterStartError: another launcher has
    started the run again. Raises CpuftError: the attempt could not begin, or on this machine options or data were
    rejected or the time limit passed. Raises RuntimeError: a step on this machine that prepares the examples failed.
    """
    work = cluster.work_dir(run_dir)
    state, request = begin_state(cluster, run_dir, plan.owner), request or StopRequest()
    request.run_dir, request.prefix = work, cluster.command_prefixes.get(cluster.head, ())
    try:
        secrets, registration = secrets_on_hosts(plan, cluster, work, os.environ, state), register_run(run_dir, cluster)
        with secrets, registration, ThreadPoolExecutor(1) as background:
            background.submit(keep_bundles, plan, cluster)  # no rank waits for it, and no run fails by it
            if cluster.works_remotely:
                return run_remotely(plan, run_dir, state, cluster, time_limit, say, request)
            return run_as_head_host(plan, run_dir, state, time_limit, cluster.access.transport, request)
    except Interrupted as stopped:
        what = f"their logs are in {run_dir}" if Path(run_dir, "logs").exists() else "nothing had started"
        say(f"cpuft: stopped by {stopped}: all ranks have ended, and {what}")
        if update := find_newest_update(run_dir):
            say(f"cpuft: continue after update {update} with {plan.format_resume(run_dir)}")
        sys.exit(stopped.exit_code)
    except HeadHostLostError as lost:
        note_state(run_dir, phase=INTERRUPTED, reason=str(lost))
        raise


def run_remotely(
    plan: RunPlan, run_dir: str, state: RunState, cluster: Cluster, time_limit: float, say: Say, request: StopRequest
) -> int:
    """Carry out a plan on another head host, fetch its run folder, clean up the hosts, and return the exit code.

    A finished run is removed from the hosts, and so is a new one whose input files could not be sent. Of any other run,
    the checkpoints stay there, or everything with `plan.keep_host_copies`. Raises what `run_attempt` raises,
    LaterStartError, and after a signal, when what the ranks recorded has been fetched, Interrupted.
    """
    config = cluster.access.entry.ssh_config_there or cluster.access.transport.config
    order = AttemptOrder(plan.for_head_host(), cluster.work_dir(run_dir), state, time_limit, config)

    advice = "check the hosts with cpuft doctor"
    execute.run_stages(plan.select("claim"), _MAKE_SECONDS, lambda line: None, "give a new folder with --run-dir")
    try:
        try:
            execute.run_stages(plan.select("make"), _MAKE_SECONDS, lambda line: None, advice)
            execute.run_stages(plan.select("inputs"), 0.0, say, advice)
        except CpuftError:
            if not plan.resumed:  # otherwise the new folder would refuse the same launch when it is tried again
                remove_all_but_checkpoints(plan, run_dir, cluster.access.transport.unreachable)
                remove_empty_run(run_dir)
            raise
        step = plan.full_plan.as_local(plan_supervision(order, cluster))
        copier = CheckpointCopier(cluster, run_dir, plan.copy_seconds, say)
        with copier.keep_copying() if plan.copy_seconds else nullcontext():
            code = execute.run_step(step, os.environ, None, request.check, takes=request.handle_signal)
        if plan.copy_seconds and code == RESUMABLE:
            copier.copy_last()  # the head host may be taken away soon
    except Interrupted:
        try:
            fetch_and_clean_up(replace(plan, keep_host_copies=False), run_dir, cluster, False, say)
            if not plan.resumed:
                remove_empty_run(run_dir)
        except HeadHostLostError as lost:  # which by itself would lead to a restart
            say(f"cpuft: {lost}")
        raise
    if code == LATER_START:
        raise LaterStartError(f"another launcher has started the run again: {WAIT_FOR_OTHER}")
    if code == execute.SSH_FAILED:
        cluster.access.transport.find_unreachable(list(cluster.hosts))
    if fetch_and_clean_up(plan, run_dir, cluster, not code, say):
        return 0
    if code not in (0, RESUMABLE) and request.signal_number == signal.SIGINT:
        raise Interrupted(signal.SIGINT)
    # A killed rank also makes the exit code larger than 128, but then the supervisor has written it.
    if code == execute.SSH_FAILED or (code > 128 and not find_end(run_dir, plan.owner)):
        raise HeadHostLostError(f"the connection to head host {cluster.head} was lost: check it with cpuft doctor")
    return code


def plan_supervision(order: AttemptOrder, cluster: Cluster) -> Step:
    """Return the step that starts the supervisor on the head host, with the order on standard input."""
    # By these, `cpuft.rank.kill` finds the supervisor, mpirun and its ssh processes, even before there are ranks.
    run = Setting("CPUFT_RUN_DIR", order.run_dir, ""), Setting(OWNER_VARIABLE, str(order.state.owner), "")
    settings = (*cluster.access.settings, *run)
    command = module_command(cluster.python, "cpuft.launch.attempt")
    return Step("supervise the ranks", command, settings, cluster.head, json.dumps(dataclasses.asdict(order)))


def main() -> None:
    """Supervise the ranks on the head host, with an AttemptOrder as JSON on standard input, and exit with the code of
    the attempt. Gets SIGTERM when the ssh connection ends. Holds RUN_DIR.lock; exits with 75 if it is held for 60 s.
    """
    protect_streams()
    end_with_parent(signal.SIGTERM)
    order = load(AttemptOrder, parse_json(sys.stdin.read()))
    try:
        open_locked(f"{order.run_dir}.lock", _LOCK_SECONDS)  # released when this process ends
    except BlockingIOError:
        holder = f"an earlier start of the run, or a transfer of its files, has held {order.run_dir}.lock"
        advice = "wait until it has ended, and resume the run"
        print(f"cpuft: error: {holder} on the head host for {_LOCK_SECONDS:.0f} s: {advice}", file=sys.stderr)
        sys.exit(RESUMABLE)
    try:
        transport = SshTransport(order.ssh_config)
        code = run_as_head_host(order.plan, order.run_dir, order.state, order.seconds, transport)
        code = 1 if code == LATER_START else code  # a script's own
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        code = error.exit_code
    except Interrupted as stopped:
        code = stopped.exit_code
    # ssh itself exits with 255 if it fails, and mpirun passes on that code of its own ssh.
    sys.exit(min(code, execute.SSH_FAILED - 1))


if __name__ == "__main__":
    main()
