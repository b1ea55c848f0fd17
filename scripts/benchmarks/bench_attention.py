"""How the time of attention alone, forward and backward, grows with the length of a text.

Started by scripts/bench-attention. The heads and the window of 64 tokens to each side are those of ModernBERT-base.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median

import torch

from cpuft.errors import CpuftError
from cpuft.train.fast.acceleration import has_bf16_products, keep_freed_memory
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid, attention
from cpuft.train.fast.elementwise import NO_MASK
from cpuft.train.precision import read_cpu


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; all have defaults.

    Raises CpuftError: a value has no sense.
    """
    parser = argparse.ArgumentParser(prog="bench-attention", description=__doc__)
    parser.add_argument("--lengths", default="2048,4096", help="tokens of a text; the first length is the base")
    parser.add_argument("--window", type=int, default=64, help="tokens that are seen to each side; -1: all of them")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9, help="turns; in each, all lengths are measured one by one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    words = options.lengths.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise CpuftError(f"--lengths {options.lengths} is no list of numbers such as 2048,4096")
    options.lengths = [int(word) for word in words]
    if min(options.turns, options.threads, options.heads, options.head_size) < 1 or options.window < -1:
        raise CpuftError("--turns, --threads, --heads and --head-size must be at least 1, and --window at least -1")
    return options


def measure(length: int, options: argparse.Namespace) -> float:
    """Return the seconds of one forward and backward pass over a text of this length."""
    size = options.head_size
    heads = Heads(options.heads, size, size**-0.5, back=options.window, ahead=options.window)
    dtype = torch.bfloat16 if has_bf16_products() else torch.float32
    packed = torch.randn(length, 3 * options.heads * size, dtype=dtype, requires_grad=True)
    gradient = torch.randn(length, options.heads * size, dtype=dtype)
    start = time.perf_counter()
    torch.autograd.backward(attention(None, packed, None, heads, NO_MASK, Grid(1, length)), gradient)
    return time.perf_counter() - start


def run(options: argparse.Namespace) -> None:
    """Measure, and print for each length the median seconds, and the ratio to the first length with its spread."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    for length in options.lengths:  # a pass that does not count: memory is new, and kernels are loaded
        measure(length, options)
    turns = [{length: measure(length, options) for length in options.lengths} for _ in range(options.turns)]
    base = options.lengths[0]
    for length in options.lengths:
        seconds = median(turn[length] for turn in turns)
        ratios = [turn[length] / turn[base] for turn in turns]
        print(
            f"{length} tokens: {seconds * 1e3:.1f} ms, {median(ratios):.2f} times that of {base} "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {options.turns} turns)"
        )
    print(f"measured on {read_cpu().model}")


def main() -> int:
    """Run. Returns 2 for an error that the user can correct."""
    try:
        run(parse_arguments())
    except CpuftError as error:
        print(f"bench-attention: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
