"""Run by scripts/bench-exchange: the CPU time of an update on several ranks beyond that of a rank alone.

All ways of exchanging gradients take turns in the same ranks, on the same rows and random weights. Each rank has its
own core, and counts the CPU time of all of its threads. Without a slow link the time of the network is not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

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
    known, others = parser.parse_known_args(words)
    known.options, known.ways = others, list(dict.fromkeys([ALONE, *known.ways.split(",")]))
    if unknown := {*known.ways} - {*WAYS}:
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
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or run as one of them."""
    asked = parse()
    if "RANK" in os.environ:
        run_rank(asked)
    else:
        start_ranks(asked, __file__)


if __name__ == "__main__":
    main()
