"""Run by scripts/bench-shards: a step with a whole optimizer, one shared out, and torch's ZeroRedundancyOptimizer.

They take turns in the same ranks, on the same rows and random weights, on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from cpuft.comm import start, take_traffic
from cpuft.config.train import TrainConfig
from cpuft.terminal import format_table
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.optimizer import group_parameters, make_optimizer
from cpuft.train.precision import autocast

SIZES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {},
}
RATE = 2e-5
Step = Callable[[dict[str, Any], torch.Tensor], None]
"""Makes one update on the examples of this rank, given all token ids of all ranks."""


def make_parser(name: str, text: str | None, precision: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the options of this program and of bench_exchange, whose defaults differ."""
    parser = argparse.ArgumentParser(prog=f"scripts/{name}", description=text)
    parser.add_argument("--np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--model", choices=SIZES, default="minilm", help="[minilm]")
    parser.add_argument("--backend", choices=("gloo", "mpi", "ccl"), default="gloo", help="[gloo]")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=precision, help=f"[{precision}]")
    parser.add_argument("--rows", type=int, default=32, help="examples per rank [32]")
    parser.add_argument("--length", type=int, default=64, help="tokens per example [64]")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each after the warm-up [{rounds}]")
    parser.add_argument("--steps", type=int, default=5, help="updates per turn [5]")
    return parser


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, and the remaining arguments, which are for `cpuft launch`."""
    known, others = make_parser("bench-shards", __doc__, "fp32", 9).parse_known_args(words)
    known.options = others
    return known


def make_model(asked: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES[asked.model])).train()


def ours(asked: argparse.Namespace, config: TrainConfig, ranks: int) -> tuple[Step, Callable[[], int]]:
    """Return an update as the training loop makes it with the exchange of this many ranks."""
    model = make_model(asked)
    optimizer = make_optimizer(model, config, asked.precision)
    exchange = choose_exchange(config, ranks)(model, optimizer, config, asked.precision)

    def step(batch: dict[str, Any], words: torch.Tensor) -> None:
        exchange.begin_pass(is_last=True)
        with autocast(asked.precision):
            loss = exchange.forward_model(**batch).loss
        loss.backward()
        exchange.average_gradients(lambda: [words] * dist.get_world_size())
        exchange.clip_gradients()
        exchange.optimizer.step()
        exchange.clear_gradients()
        exchange.synchronize_parameters(True, wait=False)
        exchange.finish_messages()

    return step, lambda: count_moments(optimizer)


def torch_s(asked: argparse.Namespace) -> tuple[Step, Callable[[], int]]:
    """Return the same model with torch's ZeroRedundancyOptimizer: fast layers in fp32, or the model's own layers with
    autocast in bf16, because this optimizer has no fp32 master weights.
    """
    model = make_model(asked)
    if asked.precision == "fp32":
        accelerate(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    groups: Any = group_parameters(model, 0.0)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=RATE, fused=True)

    def step(batch: dict[str, Any], words: torch.Tensor) -> None:
        with autocast(asked.precision):
            loss = parallel(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step, lambda: count_moments(optimizer.optim)


def count_moments(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer moments of this rank."""
    return sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")


def make_batch(asked: argparse.Namespace) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1000, 5000, (dist.get_world_size() * asked.rows, asked.length), generator=generator)
    own = rows[dist.get_rank() :: dist.get_world_size()]
    return {"input_ids": own, "attention_mask": torch.ones_like(own), "labels": own[:, 0] % 2}, rows


def take_turn(step: Step, batch: dict[str, Any], words: torch.Tensor, steps: int) -> float:
    """Return the seconds of an update of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step(batch, words)
    seconds = torch.tensor((time.perf_counter() - begun) / steps, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run_rank(asked: argparse.Namespace) -> None:
    """Run all turns. Rank 0 prints the table."""
    start(asked.backend, 300)
    ranks = dist.get_world_size()
    shared = ours(asked, TrainConfig(shard="optimizer"), ranks)
    ways = {"whole": ours(asked, TrainConfig(), ranks), "shared out": shared, "torch's": torch_s(asked)}
    batch, words = make_batch(asked)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.rounds + 1):
        for name, (step, _) in ways.items():
            took = take_turn(step, batch, words, asked.steps)
            seconds[name] += [took] if turn else []
    rows = []
    for name, (step, count) in ways.items():
        take_traffic()
        step(batch, words)
        sent = take_traffic()
        ratios = [own / base for own, base in zip(seconds[name], seconds["whole"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        numbers = [f"{1e3 * statistics.median(seconds[name]):.0f}", spread, f"{sent / 1e6:.1f}", f"{count() / 1e6:.1f}"]
        rows.append([name, *numbers])
    if dist.get_rank() == 0:
        print(format_table(["optimizer", "ms a step", "of whole", "MB sent a step", "MB of moments"], rows))
    dist.barrier()
    dist.destroy_process_group()


def start_ranks(asked: argparse.Namespace, program: str) -> None:
    """Start a program of this folder on all ranks, with the options of this one."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--np", str(asked.np), "--run-dir", str(Path(folder, "run")), "--no-check", *asked.options]
        words = [word for word in sys.argv[1:] if word not in asked.options]
        # What the first rank prints is passed on.
        subprocess.run([sys.executable, "-m", "cpuft", "launch", *own, "--", program, *words], check=True)


def main() -> None:
    """Start the ranks, or run as one of them."""
    asked = parse()
    if "RANK" in os.environ:
        run_rank(asked)
    else:
        start_ranks(asked, __file__)


if __name__ == "__main__":
    main()
