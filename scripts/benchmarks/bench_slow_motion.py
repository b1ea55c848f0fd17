"""How fast a recorded training would be on many hosts, measured on this machine alone.

Started by scripts/bench-slow-motion. RUN is the folder of a run with one rank that was trained with
scripts/record-layer-times. For each number of hosts, as many ranks replay a step of it: they wait instead of computing,
and send the real messages over simulated links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from cpuft import execute
from cpuft.compressions import COMPRESSIONS
from cpuft.errors import CpuftError
from cpuft.network_speed import parse_bit_rate
from cpuft.report.estimate import find_cores
from cpuft.serialization import load, parse_json
from cpuft.terminal import format_table
from scripts.benchmarks.slow_motion import Case, Result, plan_command
from scripts.benchmarks.step_times import TimedRecord, read_timed_record

COLUMNS = (
    "hosts",
    "link\nMbit/s",
    "gradients\nas",
    "MB per\nstep",
    "CPU ms\nper step",
    "ideal\nms",
    "step\nms",
    "waiting",
    "slowed",
    "of the\nideal",
)
NOTES = [
    "The ideal is the step of a host that does not communicate. waiting: share of a step in which a host waits for "
    "messages. slowed: share that the CPU time of communication, which was measured on this machine, takes from "
    "computing.",
    "Not simulated: the latency of a network, steps of different length, and other traffic on the links.",
]
_CASE_SECONDS = 4 * 3600.0
"""Time limit of a case; the ranks have a shorter one that depends on the recorded times."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; all but RUN have defaults."""
    parser = argparse.ArgumentParser(
        prog="bench-slow-motion", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("--np", default="2,4,8,16", help="numbers of hosts, separated by commas; each has one rank")
    parser.add_argument("--bandwidth", default="1gbit", help="rates of each host's link, separated by commas")
    parser.add_argument("--grad-compression", default="auto", help="levels to measure, separated by commas")
    parser.add_argument("--sync-every", type=int, default=1, help="as of cpuft launch")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="scale the recorded times to this step; 0: no")
    parser.add_argument("--cores", type=float, default=0.0, help="cores per host; 0: those of the recorded run")
    parser.add_argument("--updates", type=int, default=6, help="updates to measure in each case")
    parser.add_argument(
        "--slowdown", type=float, default=0.0, help="factor of all times; 0: one that fits this machine"
    )
    return parser.parse_args(arguments)


def list_cases(options: argparse.Namespace, record: TimedRecord) -> list[Case]:
    """Return the cases to measure: all numbers of hosts, for each rate and each compression level.

    Raises CpuftError: a rate or level is unknown, or the record is of several ranks or has no times.
    """
    times = record.layer_times
    if record.header.world_size != 1 or times is None:
        raise CpuftError(
            f"{record.path} is not of one rank with scripts/record-layer-times: train such a run, and give it"
        )
    rates = [parse_bit_rate(rate, "--bandwidth") for rate in options.bandwidth.split(",")]
    levels = options.grad_compression.split(",")
    if unknown := {*levels} - {*COMPRESSIONS}:
        raise CpuftError(f"--grad-compression {', '.join(sorted(unknown))} is not one of {', '.join(COMPRESSIONS)}")
    recorded = times.data_seconds + times.forward_seconds + times.backward_seconds + times.update_seconds
    scale = options.step_seconds / recorded if options.step_seconds else 1.0
    how = (options.sync_every, options.updates, options.slowdown, scale, options.cores or find_cores(record))
    return [Case(int(np), rate, level, *how) for rate, level, np in product(rates, levels, options.np.split(","))]


def measure(record: str, cases: Sequence[Case]) -> Iterator[Result]:
    """Measure the cases one after another. Raises CpuftError: a case failed."""
    for case in cases:
        rate = f"{case.bits_per_second / 1e6:g} Mbit/s"
        print(f"{case.ranks} hosts, {rate}, {case.grad_compression}", file=sys.stderr, flush=True)
        answer = execute.run_command(plan_command(record, case), _CASE_SECONDS)
        if answer.exit_code:
            raise CpuftError(answer.errors.strip()[-300:] or f"a case ended with exit code {answer.exit_code}")
        yield load(Result, parse_json(answer.output.splitlines()[-1]))


def format_row(result: Result) -> list[str]:
    """Return the cells of a case, in the order of COLUMNS."""
    case = result.case
    every = f", every {case.sync_every}" if case.sync_every > 1 else ""
    return [
        str(case.ranks),
        f"{case.bits_per_second / 1e6:g}",
        case.grad_compression + every,
        f"{result.bytes_per_step / 1e6:.2f}",
        f"{result.cpu_seconds * 1e3:.1f}",
        f"{result.ideal_seconds * 1e3:.1f}",
        f"{result.total_seconds * 1e3:.1f}",
        f"{result.waiting:.1%}",
        f"{result.slowed:.1%}",
        f"{result.share:.1%}",
    ]


def main() -> None:
    """Measure all cases and print the table."""
    options = parse_arguments()
    record = read_timed_record(str(options.run))
    results = list(measure(record.path, list_cases(options, record)))
    title = f"{record.header.task}, {record.header.model}, slowed down {results[0].slowdown:.1f} times or more"
    print(format_table(COLUMNS, list(map(format_row, results)), title, NOTES))


if __name__ == "__main__":
    try:
        main()
    except CpuftError as error:
        sys.exit(f"bench-slow-motion: {error}")
