"""`cpuft bench comm`: measure the backends on the hosts of a job (`mpirun ... python -m cpuft.comm.bench comm.jsonl`).

The backend `auto` stands for what `--backend auto` would choose in a run. It is measured in turns of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.rendezvous import rendezvous

from cpuft import terminal
from cpuft.comm.backend_choice import measure_backends, measure_turns
from cpuft.comm.registration import exit_process
from cpuft.config.bench import BenchConfig, list_bench_cases
from cpuft.config.fields import parse_arguments
from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.record import MeasuredHeader, Measurement, format_line
from cpuft.terminal import protect_streams


def merge_rounds(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Join measurements of equal backend, operation, type and bytes, with all repetitions, ordered by the first one."""
    pooled: dict[tuple[str, str, str, int], Measurement] = {}
    for found in measurements:
        key = found.backend, found.operation, found.dtype, found.nbytes
        if before := pooled.get(key):
            found = dataclasses.replace(found, seconds=before.seconds + found.seconds, busy=before.busy + found.busy)
        pooled[key] = found
    return list(pooled.values())


def format_table(measurements: Sequence[Measurement]) -> str:
    """Return a table with one row for all measurements of a backend, operation, type and size, two repetitions at
    least.

    Rows are sorted by operation, type, size and median. Bandwidths are those of nccl-tests; the last column is gloo's
    median divided by this backend's, empty without gloo.
    """
    measured = merge_rounds(measurements)
    gloo = {(row.operation, row.dtype, row.nbytes): row.median_seconds for row in measured if row.backend == "gloo"}
    rows = []
    for row in sorted(measured, key=lambda one: (one.operation, one.dtype, one.nbytes, one.median_seconds)):
        low, middle, high = (f"{quantile * 1e3:.3f}" for quantile in statistics.quantiles(row.seconds, n=4))
        reference = gloo.get((row.operation, row.dtype, row.nbytes))
        ratio = f"{reference / row.median_seconds:.2f}" if reference else ""
        rates = [f"{rate / 1e9:.3f}" for rate in (row.algorithm_bytes_per_second, row.bus_bytes_per_second)]
        busy = f"{statistics.median(row.busy):.0%}"
        rows.append([row.operation, row.dtype, row.backend, str(row.nbytes), middle, low, high, busy, *rates, ratio])
    columns = ["operation", "type", "backend", "bytes", "median\nms", "25 %\nms", "75 %\nms", "busy"]
    return terminal.format_table([*columns, "alg GB/s", "bus GB/s", "x gloo"], rows, left=3)


def format_record(measurements: Sequence[Measurement]) -> str:
    """Return the text of the record: JSON lines, a header with torch's version and a line for each measurement."""
    lines = [format_line(MeasuredHeader("bench comm", {"torch": torch.__version__})), *map(format_line, measurements)]
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Measure as one rank of a job, with the options of `cpuft bench comm`; rank 0 prints and writes the results."""
    output, config = Path(sys.argv[1]), parse_arguments(BenchConfig, sys.argv[2:])
    store, rank, size = next(rendezvous("env://"))
    plan = list_bench_cases(config)
    choices = {
        (dtype, nbytes): measure_backends(store, rank, size, nbytes, dtype, config.comm_timeout)
        for dtype, nbytes in dict.fromkeys((dtype, nbytes) for backend, _, dtype, nbytes in plan if backend == "auto")
    }
    found = list(measure_turns(store, rank, size, plan, config.comm_timeout, choices))
    if rank == 0:
        for (dtype, _), choice in choices.items():
            print(f"auto, {dtype}: {choice.backend}: {choice.reason}")
        print(format_table(found))
        write_text(output, format_record(found))


if __name__ == "__main__":
    protect_streams()
    try:
        main()
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        exit_process(2)
    exit_process(0)
