"""`cpuft bench scaling`: the cases of a measurement in slow motion, and their execution one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from cpuft import execute
from cpuft.compressions import COMPRESSIONS, REMOVED_COMPRESSIONS
from cpuft.config import ReplayConfig, ScalingConfig, describe_unknown_value, format_arguments, is_count, parse_bit_rate
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.plan import Step
from cpuft.record import Record, ScalingLine, parse_lines

MOST_HOSTS = 256
"""Largest number that --np accepts."""
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
"""Programs that a simulated network needs, and the Debian package of each."""
_NAMESPACES = ("--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_AS_ROOT_INSIDE = ("--user", "--map-root-user")
"""A user who is not root makes network namespaces inside a user namespace of his own."""
_CASE_SECONDS = 4 * 3600.0
"""Time limit of a case; the ranks have a shorter one that depends on the recorded times."""


def list_cases(config: ScalingConfig, record: Record, recorded_cores: float) -> list[ReplayConfig]:
    """Return the cases to measure: all numbers of hosts, for each rate and each compression.

    Parameters
    ----------
    recorded_cores: cores that the recorded rank could use, for hosts whose cores are not given.

    Raises CpuftError: a list has a wrong or unknown value, the record is of several ranks, or it does not have the
    times of a step.
    """
    if record.header.world_size != 1:
        raise CpuftError(
            f"{record.path} ran on {record.header.world_size} ranks: train one rank with --record-layer-times, and "
            "give the folder of that run"
        )
    if record.layer_times is None:
        raise CpuftError(
            f"{record.path} does not hold when gradients become ready: train one rank again with --record-layer-times"
        )
    sizes = [text.strip() for text in config.np.split(",")]
    if not all(is_count(size, 2, MOST_HOSTS) for size in sizes):
        raise CpuftError(
            f"--np {config.np[:60]!r} is not a list of whole numbers from 2 to {MOST_HOSTS}: write for example 2,4,8,16"
        )
    rates = [parse_bit_rate(rate.strip() or "-", "--bandwidth") for rate in config.bandwidth.split(",")]
    compressions = [name.strip() for name in config.grad_compression.split(",")]
    for name in compressions:
        if name in REMOVED_COMPRESSIONS:
            raise CpuftError(REMOVED_COMPRESSIONS[name])
        if name not in COMPRESSIONS:
            raise CpuftError(describe_unknown_value("--grad-compression", name, COMPRESSIONS))
    times = record.layer_times
    recorded = times.data_seconds + times.forward_seconds + times.backward_seconds + times.update_seconds
    cores = config.cores or recorded_cores
    if not recorded > 0 or not cores > 0:
        raise CpuftError(f"{record.path} has no positive step time or no cores: train again with --record-layer-times")
    return [
        ReplayConfig(
            ranks=int(size),
            bits_per_second=rate,
            grad_compression=compression,
            sync_every=config.sync_every,
            updates=config.updates,
            slowdown=config.slowdown,
            compute_scale=config.step_seconds / recorded if config.step_seconds else 1.0,
            cores=cores,
        )
        for rate, compression, size in product(rates, compressions, sizes)
    ]


def plan_case(record: str, case: ReplayConfig, as_root: bool) -> Step:
    """Return the step that measures a case and prints its line of the record.

    The processes of the case run in namespaces of their own. If the first of them or this program ends, whatever the
    reason, the kernel ends all others, and the simulated network with them.
    """
    namespaces = (*(() if as_root else _AS_ROOT_INSIDE), *_NAMESPACES)
    inside = (sys.executable, "-m", "cpuft.train.slow_motion", record, *format_arguments(case))
    command = ("setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, *inside)
    rate = f"{case.bits_per_second / 1e6:g} Mbit/s"
    return Step(
        f"replay a step on {case.ranks} hosts with {rate} and --grad-compression {case.grad_compression}", command
    )


def check_machine(as_root: bool) -> None:
    """Raise CpuftError if this user cannot make simulated networks here. Makes one namespace, which ends at once."""
    missing = sorted({f"{name} (package {PROGRAMS[name]})" for name in PROGRAMS if not execute.find_program(name)})
    if missing:
        raise CpuftError(f"programs are missing on this machine, install them: {', '.join(missing)}")
    namespaces = (*(() if as_root else _AS_ROOT_INSIDE), *_NAMESPACES)
    answer = execute.run_command(("unshare", *namespaces, "true"), seconds=10)
    if answer.exit_code:
        raise CpuftError(
            f"this machine does not let you make network namespaces ({answer.text.strip()[:120]}): run the command as "
            "root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0)"
        )


def run_cases(steps: Sequence[Step], run: Callable[[Sequence[str], float], Answer]) -> Iterator[ScalingLine]:
    """Run the steps of `plan_case` one after another, and yield what each has measured.

    Parameters
    ----------
    run: runs a command with a time limit in seconds, as `cpuft.execute.run_command` does.

    Raises
    ------
    CpuftError: a case fails; the message is the line of its process that explains why.
    """
    for step in steps:
        answer = run(step.command, _CASE_SECONDS)
        lines = [line for line in parse_lines(answer.output, "the output of a case") if isinstance(line, ScalingLine)]
        if answer.exit_code or not lines:
            told = [line for line in answer.errors.splitlines() if line.startswith("cpuft: error: ")]
            reason = told[-1].removeprefix("cpuft: error: ") if told else answer.errors.strip()[-300:]
            error = CpuftError(reason or f"exit code {answer.exit_code}: {step.why}")
            error.exit_code = answer.exit_code if answer.exit_code in (1, 2) else 1
            raise error
        yield lines[-1]
