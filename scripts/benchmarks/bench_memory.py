"""How long a GELU takes after a matrix product, with and without cpuft's memory settings, in turn.

Started by scripts/bench-memory. Each process multiplies as MiniLM's feed-forward half does, and frees the results. What
glibc does with freed memory depends on what the process has freed before: it gives it back to the kernel, or keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from cpuft.errors import CpuftError, counted
from cpuft.kernels import kernel_status
from cpuft.launch.rank_variables import memory_settings
from cpuft.terminal import format_table
from cpuft.train.fast.elementwise import gelu_and_slope
from cpuft.train.precision import read_cpu

ROWS, HIDDEN, INNER = 1728, 384, 1536
"""Sizes in MiniLM with 32 examples of MRPC: tokens, and the columns before and after the product."""
WARM_UP = 10
"""Repetitions that are not counted: the first ones get their memory from the kernel in any case."""
COLUMNS = ("process", "product, ms", "GELU, ms", "page faults")


class Measured(NamedTuple):
    """Medians over the repetitions of one process."""

    product_ms: float
    gelu_ms: float
    faults: float
    """Page faults of a product and a GELU together, in the mean."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; all have defaults.

    Raises CpuftError: a value has no sense.
    """
    parser = argparse.ArgumentParser(prog="bench-memory", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind, in turn")
    parser.add_argument("--repeats", type=int, default=150, help="products and GELUs in each process")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.rounds, options.repeats, options.threads) < 1:
        raise CpuftError("--rounds, --repeats and --threads must be at least 1")
    return options


def measure(freed_megabytes: int, options: argparse.Namespace) -> Measured:
    """Return the times of this process, after a block of `freed_megabytes` MiB was used and freed."""
    torch.set_num_threads(options.threads)
    x, weight = torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(INNER, HIDDEN).bfloat16()
    bias = torch.randn(INNER).bfloat16()
    block = torch.ones(freed_megabytes << 18)
    del block
    products, gelus, faults = [], [], 0
    for repetition in range(WARM_UP + options.repeats):
        if repetition == WARM_UP:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        hidden = torch.nn.functional.linear(x, weight)
        middle = time.perf_counter()
        both = gelu_and_slope(hidden, bias, True)
        products.append(1e3 * (middle - start))
        gelus.append(1e3 * (time.perf_counter() - middle))
        del hidden, both
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Measured(median(products[WARM_UP:]), median(gelus[WARM_UP:]), faults / options.repeats)


def measure_in_process(freed_megabytes: int, settings: Mapping[str, str], options: argparse.Namespace) -> Measured:
    """Return what `measure` returns in a new process, whose environment has `settings` and no others of malloc."""
    dropped = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    words = ["--child", str(freed_megabytes), "--repeats", str(options.repeats), "--threads", str(options.threads)]
    command = [sys.executable, "-m", "scripts.benchmarks.bench_memory", *words]
    done = subprocess.run(command, env={**environ, **settings}, stdout=subprocess.PIPE, text=True, timeout=300)
    if done.returncode:
        raise CpuftError(f"a process ended with exit code {done.returncode}; see the lines above")
    return Measured(*json.loads(done.stdout))


def run(options: argparse.Namespace) -> None:
    """Measure in turn and print a row for each kind of process: medians, with the smallest and the largest value."""
    if kernel_status() != "on":
        raise CpuftError(f"there is no kernel to measure: kernels are {kernel_status()}")
    own = {setting.name: setting.value for setting in memory_settings({})}
    kinds: dict[str, tuple[int, dict[str, str]]] = {
        "has freed nothing large": (0, {}),
        "has freed a block of 16 MiB": (16, {}),
        "has cpuft's settings": (0, own),
    }
    found: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, (freed_megabytes, settings) in kinds.items():
            found[kind].append(measure_in_process(freed_megabytes, settings, options))
    rows = [
        [kind, *(_format(values, digits) for values, digits in zip(zip(*measured), (2, 2, 0), strict=True))]
        for kind, measured in found.items()
    ]
    title = f"a product and a GELU of {ROWS} x {INNER} numbers, {options.rounds} processes each, in turn"
    print(format_table(COLUMNS, rows, title, left=1))
    print(f"{read_cpu().model}, {counted(options.threads, 'core')}")


def _format(values: Sequence[float], digits: int) -> str:
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{median(values):.{digits}f} ({least} to {most})"


def main() -> int:
    """Return the exit code: 2 for bad options."""
    try:
        options = parse_arguments()
        if options.child >= 0:
            print(json.dumps(measure(options.child, options)))
        else:
            run(options)
    except CpuftError as error:
        print(f"bench-memory: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
