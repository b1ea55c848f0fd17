"""Run one attempt on the head host, where this process is: prepare the run, start the ranks, and note how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cpuft import execute
from cpuft.argv import SUPERVISED_VARIABLE
from cpuft.errors import RESUMABLE, CpuftError, DiskFullError, Interrupted
from cpuft.hosts.cluster import STATE_FILE
from cpuft.hosts.transport import Transport
from cpuft.launch.failures import (
    describe_failures,
    describe_lost,
    ended_to_be_resumed,
    find_interruption,
    read_failures,
    worst_exit_code,
)
from cpuft.launch.rank_output import LogTail
from cpuft.launch.results import write_plan
from cpuft.launch.run_monitor import RunMonitor, StuckError
from cpuft.launch.run_state import PREPARING, TRAINING, UNSAVED_MODEL, RunState, StateWriter
from cpuft.launch.stop_request import StopRequest
from cpuft.plans import RunPlan, Step
from cpuft.rank.interruption import HEARTBEAT_FILE
from cpuft.rank.kill import SSH_NAME, kill_processes
from cpuft.rank.process import OWNER_VARIABLE
from cpuft.record import FILE_NAME
from cpuft.terminal import print_message

_REJECTED = 2
_START_LIMIT = 45.0
_START_LIMIT_PER_RANK = 0.5
"""Seconds within which the first rank has to start. A foreign connection to mpirun's port can block all ranks."""
_BOOTSTRAP = "I_MPI_HYDRA_BOOTSTRAP"


def run_as_head_host(
    plan: RunPlan,
    work: str,
    state: RunState,
    time_limit: float,
    transport: Transport,
    request: StopRequest | None = None,
) -> int:
    """Carry out `make`, `prepare` and `ranks` of a plan with this machine as the head host, keep the run state in the
    run folder `work` up to date, and return the exit code. `time_limit` is that of the ranks in seconds, 0 for none.

    It is 75 if the ranks ended to be resumed, or a host was lost during the preparation or without a failure of a rank;
    else that of the worst rank or, without one, of mpirun, and 1 if mpirun had to be ended. If the preparation fails
    and no host was lost, a new run folder is removed again. Raises CpuftError: the run folder cannot be made, the data
    are rejected, the time limit is over, the disk is full, or a later start has begun. Raises RuntimeError: the
    preparation failed. Raises Interrupted: a signal came.
    """
    try:
        for stage in plan.make:
            _run_stage(plan, stage)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        raise CpuftError(f"the run folder cannot be made ({reason}): give a new folder with --run-dir") from None
    with StateWriter(work, state) as writer:
        writer.check()
        writer.write(phase=PREPARING)
        if lost := _prepare(plan, work, writer, transport):
            return writer.end(RESUMABLE, lost)
        ((ranks,),) = plan.ranks
        # Of a start of this training that was killed. A script, which has no record, may use such a name itself.
        for unsaved in Path(work).glob(UNSAVED_MODEL) if Path(work, FILE_NAME).exists() else ():
            shutil.rmtree(unsaved, ignore_errors=True)
        limit = _START_LIMIT + _START_LIMIT_PER_RANK * len(state.hosts)
        what = Path(work) / "logs", state.hosts, transport
        monitor = RunMonitor(*what, limit, request or StopRequest(), writer.check)
        writer.write(phase=TRAINING)
        code = 1
        try:
            code = _run_ranks(plan.full_plan.as_local(ranks), monitor, writer, time_limit)
        finally:
            if code:  # mpirun may have left ssh processes, which have sessions of their own
                kill_processes(work, state.owner)
            with suppress(OSError):
                Path(work).with_name(f"{SSH_NAME}{state.owner}").unlink()
        writer.refuse_later_start()
        return writer.end(code, writer.state.reason)


def _prepare(plan: RunPlan, run_dir: str, writer: StateWriter, transport: Transport) -> str:
    """Prepare the examples, and write `plan.sh`; return which host was lost if that fails, "" if the ranks can start.
    Nobody asks the hosts meanwhile: examples that are prepared are there for the restart.
    """
    hosts = writer.state.hosts
    try:
        for stage in plan.prepare:
            _run_stage(plan, stage)
        write_plan(plan, run_dir)
    except BaseException as error:
        if isinstance(error, RuntimeError) and (unreachable := transport.find_unreachable(sorted(set(hosts)))):
            lines = describe_lost([], hosts, unreachable)
            for line in (str(error).splitlines()[0], *lines):
                print_message(line)
            writer.note(unreachable=tuple(sorted(unreachable)))
            return lines[0]
        if not plan.resumed:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return ""


def _run_stage(plan: RunPlan, stage: Sequence[Step]) -> None:
    for step, answer in zip(stage, execute.run_stage(plan.full_plan, stage, 0.0, print_message)):
        text = answer.output.strip()
        if answer.exit_code == _REJECTED:
            line = next((line for line in text.splitlines() if line.startswith("cpuft: error: ")), text)
            raise CpuftError(line.removeprefix("cpuft: error: "))
        if answer.exit_code:
            raise RuntimeError(f"{step.why}: exit code {answer.exit_code}\n{text}")


def _run_ranks(step: Step, monitor: RunMonitor, writer: StateWriter, time_limit: float) -> int:
    """Start mpirun, and wait for its end; return the exit code of the run."""
    logs, hosts, was_stuck = monitor.logs, monitor.hosts, False
    marks = _mark_processes(step, logs.parent, writer.state.owner)
    environ = os.environ | marks | {SUPERVISED_VARIABLE: str(os.getpid())}
    tails = [LogTail(logs / "rank-0.out", sys.stdout), LogTail(logs / "rank-0.err", sys.stderr)]

    def watch() -> None:
        for tail in tails:
            tail.copy()
        monitor.check()

    with (logs.parent / HEARTBEAT_FILE).open("wb") as output:
        try:
            code = execute.run_step(step, environ, output, watch, time_limit, monitor.stop_request.handle_signal)
        except StuckError as error:
            print_message(str(error))
            code, was_stuck = 1, True
        except TimeoutError as error:
            raise CpuftError(
                f"the run was stopped at its time limit ({error}): raise --time-limit, or train for less"
            ) from None
    if not code:
        monitor.diagnosis = monitor.find_cut_off()
        if not monitor.diagnosis:
            return 0
        code = 1
    failures = read_failures(logs, hosts)
    if ended_to_be_resumed(failures):
        line = find_interruption(str(logs.parent))
        leaving = tuple(sorted({hosts[rank] for rank in line.leaving})) if line else ()
        writer.note(leaving=leaving, reason="the ranks ended to be resumed")
        if not was_stuck:
            return RESUMABLE
    if monitor.stop_request.signal_number == signal.SIGINT:
        raise Interrupted(signal.SIGINT)
    unreachable = monitor.find_unreachable()
    writer.note(unreachable=tuple(sorted(unreachable)))
    # mpirun ends without a message if it cannot write the output of the ranks.
    if not failures and not unreachable and shutil.disk_usage(logs).free < 1 << 16:
        raise DiskFullError(str(logs.parent))
    mpirun_output = (logs.parent / HEARTBEAT_FILE).read_text(errors="replace")
    causes = describe_lost(failures, hosts, unreachable)
    if monitor.diagnosis and not unreachable:
        causes = [monitor.diagnosis]
    text = describe_failures(failures, mpirun_output, causes)
    print(text, file=sys.stderr, flush=True)
    writer.note(reason=text.splitlines()[-1].removeprefix("cpuft: "))
    return worst_exit_code(failures, RESUMABLE if unreachable else code)


def _mark_processes(step: Step, run_dir: Path, owner: int) -> dict[str, str]:
    """Return variables for mpirun by which `cpuft.rank.kill` finds it and what it starts, even before there are ranks.
    On other hosts, Hydra's proxies have no variables of the run, but those of Intel MPI have the name of mpirun's ssh
    program on their command line. So in a run folder on a host's own disk, mpirun gets such a program of its own.
    """
    mark = {"CPUFT_RUN_DIR": str(run_dir), OWNER_VARIABLE: str(owner)}
    ssh, link = execute.find_program("ssh"), run_dir.parent / f"{SSH_NAME}{owner}"
    given = {setting.name for setting in step.settings} | os.environ.keys()
    if ssh and (run_dir.parent / STATE_FILE).exists() and not given & {_BOOTSTRAP, f"{_BOOTSTRAP}_EXEC"}:
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(ssh)
            mark[f"{_BOOTSTRAP}_EXEC"] = str(link)
    return mark
