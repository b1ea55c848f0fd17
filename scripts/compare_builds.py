"""Compare the installed kernels with those that are compiled here: `compare_builds.py [ROUNDS]`, with cpuft installed.

Both train a model of MiniLM's size in one process, in turn, because two runs on a shared machine differ by up to twice.
The exit code is 1 if the installed ones have less than `MIN_SPEED` of the speed.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

import torch
from transformers import BertConfig, BertForSequenceClassification

import cpuft
from cpuft.compiler import find_compiler, find_installed, read_cpu_flags
from cpuft.errors import CpuftError
from cpuft.hardware import compiler_target
from cpuft.kernels import Kernels, build, use_kernels

MIN_SPEED = 0.95
"""Least speed of the installed kernels, as a share of the other. Both are the same code, for this CPU and its class."""
STEPS = 4
"""Updates of a build in a round."""


def load_builds() -> tuple[Kernels, Kernels]:
    """Return the installed kernels and those that are compiled here. CpuftError: one of them is missing."""
    flags, compiler = read_cpu_flags(os.environ), find_compiler(os.environ)
    installed = find_installed(flags)
    if not installed or not compiler:
        raise CpuftError(f"{'no C++ compiler' if installed else 'no kernels are installed'}: nothing can be compared")
    return Kernels(installed), Kernels(build(compiler, compiler_target("", flags)))


def measure(builds: tuple[Kernels, Kernels], rounds: int) -> list[float]:
    """Return, for each round, the time with the second build as a share of that with the first."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )  # MiniLM's
    model = BertForSequenceClassification(config)
    model, optimizer = cpuft.accelerate(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    batch = {"input_ids": torch.randint(1000, 30000, (32, 48)), "labels": torch.zeros(32, dtype=torch.int64)}

    def train(kernels: Kernels) -> float:
        with use_kernels(kernels):
            began = time.perf_counter()
            for _ in range(STEPS):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return time.perf_counter() - began

    list(map(train, builds))
    shares = []
    for number in range(rounds):
        seconds = {kernels: train(kernels) for kernels in builds[:: 1 - number % 2 * 2]}
        shares.append(seconds[builds[1]] / seconds[builds[0]])
    return shares


if __name__ == "__main__":
    shares = sorted(measure(load_builds(), int(sys.argv[1]) if sys.argv[1:] else 20))
    print(
        f"the installed kernels have {median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f}) of the speed of those "
        f"compiled here, {len(shares)} rounds"
    )
    sys.exit(median(shares) < MIN_SPEED)
