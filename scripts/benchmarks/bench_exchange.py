"""Run by scripts/bench-exchange: the CPU time of an update on several ranks beyond that of a rank alone.

All ways of exchanging gradients take turns in the same ranks, on the same rows and random weights. Each rank has its
own core, and counts the CPU time of all of its threads. Without a slow link the time of the network is not in it. With
--profile, perf shows for one of the ways which functions of rank 0 take the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cpuft.comm import start
from cpuft.comm.compression.table import TABLE
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.terminal import format_table
from scripts.benchmarks.bench_shards import Step, make_batch, make_parser, ours, start_ranks

ALONE = "alone"
WAYS = (ALONE, "none", "bf16", "int8", "powersgd", "shards")
_WARM_UP = 8
"""Updates before those that are measured: powersgd sends its first ones as blocks."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, and the remaining arguments, which are for `cpuft launch`. Raises CpuftError: no such way."""
    parser = make_parser("bench-exchange", __doc__, "bf16", 5)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"[{','.join(WAYS)}]")
    parser.add_argument("--profile", default="", help="the way that perf looks at")
    known, others = parser.parse_known_args(words)
    known.options, known.ways = others, list(dict.fromkeys([ALONE, *known.ways.split(",")]))
    if unknown := {*known.ways, *filter(None, [known.profile])} - {*WAYS}:
        raise CpuftError(f"there is no way {', '.join(unknown)}: give some of {', '.join(WAYS)}")
    return known


def make_step(asked: argparse.Namespace, way: str) -> Step:
    """Return a function that makes an update as the training loop does."""
    compression = way if way in TABLE else "none"
    config = TrainConfig(grad_compression=compression, shard="optimizer" if way == "shards" else "none")
    return ours(asked, config, 1 if way == ALONE else dist.get_world_size())[0]


def run_rank(asked: argparse.Namespace) -> None:
    """Run all turns. Rank 0 prints the table."""
    start(asked.backend, 300)
    batch, words = make_batch(asked)
    steps = {way: make_step(asked, way) for way in asked.ways}
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(asked.rounds + 1):
        for way, step in steps.items():
            dist.barrier()
            begun, count = time.process_time(), asked.steps if turn else _WARM_UP
            for _ in range(count):
                step(batch, words)
            if turn:
                taken[way].append(1e3 * (time.process_time() - begun) / count)
    rows = []
    for way, milliseconds in taken.items():
        beyond = [one - alone for one, alone in zip(milliseconds, taken[ALONE], strict=True)]
        spread = f"{statistics.median(beyond):.1f} ({min(beyond):.1f} to {max(beyond):.1f})"
        rows.append([way, f"{statistics.median(milliseconds):.1f}", spread])
    if dist.get_rank() == 0:
        print(format_table(["exchange", "CPU ms of an update", "beyond a rank alone"], rows))
    if asked.profile:
        profile(asked, steps[asked.profile], batch, words)
    dist.barrier()
    dist.destroy_process_group()


def profile(asked: argparse.Namespace, step: Step, batch: dict[str, torch.Tensor], words: torch.Tensor) -> None:
    """Print where rank 0 spends its CPU time, by perf's clock."""
    count = asked.rounds * asked.steps
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        looks = dist.get_rank() == 0
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-o", data, "-p", str(os.getpid())]
        perf = subprocess.Popen(command) if looks else None
        dist.barrier()
        for _ in range(count):
            step(batch, words)
        if perf:
            perf.send_signal(2)
            perf.wait()
            command = ["perf", "report", "-i", data, "--stdio", "--no-children", "-F", "overhead,comm,symbol"]
            report = subprocess.run([*command, "--percent-limit", "0.3"], check=True, capture_output=True, text=True)
            print(*(line[:110].rstrip() for line in report.stdout.splitlines() if line.strip("# ")), sep="\n")


def main() -> None:
    """Start the ranks, or run as one of them."""
    asked = parse()
    if "RANK" in os.environ:
        run_rank(asked)
    else:
        start_ranks(asked, __file__)


if __name__ == "__main__":
    main()
