"""Runs a plan whose master is another machine, or has a disk of its own: step by step, as printed.

The master's end is this file too: `python -m cpuft.launch.remote` supervises the ranks as if they were started there.
It reads its part of the plan from standard input, and lives no longer than the connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cpuft import execute
from cpuft.errors import AGAIN, NOT_STORED, CpuftError, Interrupted
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.transport import Transport
from cpuft.launch.active_runs import noted
from cpuft.launch.inputs import secrets_on_hosts
from cpuft.launch.results import SKIPPED, NotStoredError
from cpuft.launch.resume import NOTE, find_newest_checkpoint, read_lost_hosts, remove_all_but_checkpoints
from cpuft.launch.supervise import StopRequest, run_on_this_machine, write_plan
from cpuft.plan import Plan, RunPlan, Setting, Step
from cpuft.rank.process import end_with_parent
from cpuft.record import FILE_NAME
from cpuft.serialization import load, parse_json
from cpuft.terminal import keep_streams
from cpuft.words import own_module

_CODE = "exit-code"
"""Beside the ranks' logs: the supervisor's own, when it came to its end."""
_MAKE_SECONDS = 60.0
_CLEAN_SECONDS = 15.0
FILES_LEFT = "what the run left there, cpuft doctor finds a day later"
_SEND_SECONDS = 1800.0
_LAST_LINES = 6
"""Of a failed step's output, the lines that its error shows."""
Say = Callable[[str], None]


class HeadHostLostError(CpuftError):
    """The master, or the connection to it."""

    unfetched = ""
    """The master that has alone what was recorded."""


@dataclasses.dataclass(frozen=True)
class AttemptOrder:
    """What the supervisor on the master is told."""

    plan: RunPlan
    run_dir: str
    hosts: tuple[str, ...]
    """Of each rank, as the hostfile names it."""
    seconds: float
    ssh_config: str
    """By which the master reaches the other hosts; empty for its user's own."""


def run_attempt(
    plan: RunPlan,
    run_dir: str,
    cluster: Cluster,
    seconds: float,
    say: Say,
    grace: float | None = None,
    patience: float = 0.0,
) -> int:
    """Run a plan to its end, wherever its head host is; returns its exit code. A signal ends the run and the program.

    Parameters
    ----------
    grace: seconds that SIGTERM leaves the ranks to save a checkpoint; None: no signal asks them for one.
    patience: the same for the first Ctrl-C.

    Raises CpuftError: as `run_on_head_host` and `run_on_this_machine`.
    """
    work, transport, environ = cluster.work_dir(run_dir), cluster.access.transport, os.environ
    asking = None if grace is None else StopRequest(work, cluster.master, cluster.ways, grace, patience)
    try:
        with secrets_on_hosts(plan, cluster, work, environ), noted(run_dir, cluster):
            if cluster.away:
                return run_on_head_host(plan, run_dir, cluster, environ, seconds, say, asking)
            return run_on_this_machine(plan, run_dir, cluster.rank_hosts, environ, seconds, transport, asking)
    except Interrupted as stopped:
        recorded = Path(run_dir, FILE_NAME).exists()
        what = "what it recorded" if recorded else "nothing was recorded yet; what ranks said"
        kept = f"{what} is in {run_dir}" if Path(run_dir).exists() else "nothing had started"
        say(f"cpuft: stopped by {stopped}: all ranks are gone, {kept}")
        if update := find_newest_checkpoint(run_dir):
            say(f"cpuft: go on after update {update} with {shlex.join(['cpuft', 'launch', '--resume', run_dir])}")
        sys.exit(stopped.exit_code)


def run_on_head_host(
    plan: RunPlan,
    run_dir: str,
    cluster: Cluster,
    environ: Mapping[str, str],
    seconds: float,
    say: Say,
    asking: StopRequest | None,
) -> int:
    """Run a plan to its end, fetch its run directory, and leave nothing on the hosts; the exit code.

    Its output appears here as it comes. When this process is stopped, the connection ends, and with it the run.

    Raises CpuftError: the master cannot be reached, or was lost; what was not fetched stays where it is, and is named.
    Raises Interrupted: a signal came; what the ranks recorded until then has been fetched.
    """
    config = cluster.access.config_there or cluster.access.transport.config
    order = AttemptOrder(plan.on_master(), cluster.work_dir(run_dir), cluster.rank_hosts, seconds, config)
    try:
        _run(plan.only("make"), environ, _MAKE_SECONDS)
        _run(plan.only("inputs"), environ, _SEND_SECONDS, say)
        step = plan.whole.here(plan_supervision(order, cluster))
        watch, takes = (asking.check, asking.takes) if asking else (lambda: None, lambda signal_number: False)
        code = execute.run_step(step, environ, None, watch, takes=takes)
    except Interrupted:
        _bring_back(replace(plan, stays=False), run_dir, cluster, environ, False, say)
        raise
    if code == execute.SSH_FAILED:
        cluster.access.transport.find_silent([assignment.host.name for assignment in cluster.assignments])
    _bring_back(plan, run_dir, cluster, environ, not code, say)
    if code not in (0, AGAIN) and asking and asking.signal_number == signal.SIGINT:
        raise Interrupted(signal.SIGINT)
    # A rank that was killed has such a code, too, and then the supervisor told it.
    if code == execute.SSH_FAILED or (code > 128 and not Path(run_dir, "logs", _CODE).exists()):
        raise HeadHostLostError(f"the connection to the master {cluster.master} was lost: look at it with cpuft doctor")
    return code


def plan_supervision(order: AttemptOrder, cluster: Cluster) -> Step:
    """Start the supervisor on the master."""
    settings = tuple(Setting(name, value, "") for name, value in cluster.access.settings.items())
    command = own_module(cluster.python, "cpuft.launch.remote")
    return Step("supervise the ranks", command, settings, cluster.master, json.dumps(dataclasses.asdict(order)))


def fetch_finished(plan: RunPlan, run_dir: str, cluster: Cluster, say: Say) -> None:
    """Fetch a run that came to its end on the head host, and remove it from all hosts.

    Raises HeadHostLostError: the results could not be fetched; they stay where they are.
    """
    _bring_back(plan, run_dir, cluster, os.environ, True, say)


def _bring_back(
    plan: RunPlan, run_dir: str, cluster: Cluster, environ: Mapping[str, str], ended: bool, say: Say
) -> None:
    """Fetch the run, and take it away there: where it has not `ended` well, all of it but its checkpoints.

    Raises HeadHostLostError: the run could not be fetched.
    Raises NotStoredError: this machine could not store the run; nothing is taken away on the hosts.
    """
    _, *clean = plan.results
    silent = cluster.access.transport.silent
    try:
        if cluster.master in silent:
            raise CpuftError(
                f"host {cluster.master} does not answer, and it is the master: look at it with cpuft doctor"
            )
        fetch_results(plan, run_dir, cluster, environ, say)
    except NotStoredError:
        raise
    except CpuftError as error:
        report_partial_cleanup(plan, run_dir, environ, {cluster.master, *silent}, say)
        lost = HeadHostLostError(f"{error}; what was recorded is in {cluster.work_dir(run_dir)} on {cluster.master}")
        lost.unfetched = cluster.master
        raise lost from None
    if os.path.isdir(run_dir):
        write_plan(plan, run_dir)
    if not ended:
        silent |= read_lost_hosts(run_dir)
        report_partial_cleanup(plan, run_dir, environ, silent, say)
        return
    Path(run_dir, NOTE).unlink(missing_ok=True)
    for stage in clean:
        _clean_hosts([step for step in stage if step.host not in silent], plan, environ)
    if gone := sorted({step.host for stage in clean for step in stage} & silent):
        say(f"cpuft: {', '.join(gone)} did not answer at the end: {FILES_LEFT}")


def _clean_hosts(steps: Sequence[Step], plan: RunPlan, environ: Mapping[str, str]) -> None:
    """Remove the run from hosts, side by side. A host that was lost meanwhile must not hide how the run ended."""
    ways = Plan(ways=plan.ways)
    with contextlib.suppress(TimeoutError):
        execute.run_stage([ways.here(step) for step in steps], environ, _CLEAN_SECONDS)


def fetch_results(plan: RunPlan, run_dir: str, cluster: Cluster, environ: Mapping[str, str], say: Say) -> None:
    """Fetch the run's folder from the head host into `run_dir`.

    When this function returns, the whole folder is on this machine's disk, so that the copies on hosts may be removed.
    They must stay if it raises.

    Raises NotStoredError: the folder came, but this machine could not store it.
    Raises CpuftError: the head host could not send the folder.
    """
    ((step,), *_) = plan.results

    def say_waiting(passed: float) -> None:
        say(f"cpuft: {step.why}: not finished after {passed:.0f} s")

    try:
        here = Plan(ways=plan.ways).here(step)
        (answer,) = execute.run_stage([here], environ, _SEND_SECONDS, lambda _, passed: say_waiting(passed))
    except TimeoutError:
        late = f"the results of the run did not come from {cluster.master} within {_SEND_SECONDS:.0f} s"
        raise CpuftError(late) from None
    lines = [line.removeprefix("cpuft: error: ") for line in answer.said.splitlines() if line.strip()]
    if answer.exit_code == NOT_STORED:
        reason = lines[-1] if lines else "no reason was given"
        raise NotStoredError(
            f"the results of the run could not be stored in {run_dir} ({reason}). Host {cluster.master} keeps them: "
            f"make room here or remove what is in the way, then fetch them with cpuft launch --resume {run_dir}"
        )
    if answer.exit_code:
        said = " | ".join(lines[-_LAST_LINES:]) or "without a message"
        raise CpuftError(f"the results of the run could not be fetched from {cluster.master} ({said})")
    for line in lines:
        if line.startswith(SKIPPED):
            say(f"cpuft: {line}")


def report_partial_cleanup(
    plan: RunPlan, run_dir: str, environ: Mapping[str, str], without: Collection[str], say: Say
) -> None:
    """Leave nothing but checkpoints on all hosts but some, and say so, unless all `plan.stays` there."""
    if not plan.stays and (line := remove_all_but_checkpoints(plan, run_dir, environ, without)):
        say(f"cpuft: {line}")


def _run(plan: Plan, environ: Mapping[str, str], seconds: float, say: Say = lambda line: None) -> None:
    execute.run_stages(plan, environ, seconds, say, "look at the hosts with cpuft doctor")


def main() -> None:
    """The master's end. Exit code: the run's, or 2 with one line."""
    keep_streams()
    end_with_parent(15)
    order = load(AttemptOrder, parse_json(sys.stdin.read()))
    with open(f"{order.run_dir}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            code = run_on_this_machine(
                order.plan, order.run_dir, order.hosts, os.environ, order.seconds, Transport(order.ssh_config)
            )
        except CpuftError as error:
            print(f"cpuft: error: {error}", file=sys.stderr)
            code = error.exit_code
        except Interrupted as stopped:
            code = stopped.exit_code
    # 255 is what ssh itself says; mpirun passes on that of its own.
    code = min(code, execute.SSH_FAILED - 1)
    with contextlib.suppress(OSError):
        Path(order.run_dir, "logs", _CODE).write_text(f"{code}\n", encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
