"""Print how many instructions the kernels execute in a training step, and how often threads wait for each other.

Run by test_work.py, in a process of its own: python -m tests.train.fast.count_instructions SIZES THREADS...
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cpuft.compiler import find_compiler
from cpuft.kernels import int64_array, kernels_for
from cpuft.train.fast import products
from cpuft.train.fast.acceleration import accelerate, has_bf16_products
from cpuft.train.fast.adamw import clip_gradients
from tests.train.fast.encoders import make_batch, make_model, make_optimizer

COUNTED = ("/kernels-", "/libc.so", "/libc-", "/libm.so", "/libm-")
"""Libraries whose instructions count: the kernels and what they call. Those of OpenMP mostly wait."""
BARRIERS = ("GOMP_parallel", "GOMP_barrier", "GOMP_loop_end")
"""Functions of OpenMP in which threads wait for all others; the first one at its end."""


class Tracer:
    """Counts what happens inside of kernels on all threads."""

    def __init__(self) -> None:
        compiler = find_compiler({})
        assert compiler is not None
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "count.so")
            source = Path(__file__).with_suffix(".cpp")
            subprocess.run([compiler, "-O2", "-fopenmp", "-fPIC", "-shared", source, "-o", library], check=True)
            self._library = ctypes.CDLL(str(library))
        everything = ctypes.CDLL(None)
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        found = [ctypes.cast(getattr(everything, name), ctypes.c_void_p).value or 0 for name in BARRIERS]
        ends = [end for pair in _list_ranges() for end in pair]
        self._library.prepare(
            int64_array(ends), ctypes.c_int64(len(ends) // 2), int64_array(found), ctypes.c_int64(len(found))
        )

    def wrap(self, name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        """Return the function of a kernel, which adds to its counts when it is called."""

        def run(*arguments: Any) -> None:
            threads = ctypes.c_int(arguments[-1])
            self._library.switch_counting(True, threads)
            kernel(*arguments)
            self._library.switch_counting(False, threads)
            counts = int64_array([0] * (1 + len(BARRIERS)))
            self._library.take_counts(counts)
            instructions, joins, *waits = counts
            # The team that switches the counting off is none of the kernel's; each thread calls the barriers.
            barriers = joins - 1 + sum(waits) // threads.value
            self.counts[name].update(calls=1, instructions=instructions, barriers=barriers)

        return run


def _list_ranges() -> list[tuple[int, int]]:
    """Return the addresses of the code of the libraries that count."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    found = [words[0] for words in lines if "x" in words[1] and any(name in words[-1] for name in COUNTED)]
    return [(int(first, 16), int(end, 16)) for first, _, end in (one.partition("-") for one in found)]


def make_step(length: int, rows: int, sizes: dict[str, int]) -> Callable[[], None]:
    """Return a training step of an encoder with dropout, of rows of this length."""
    model = make_model("bert", 0.1, max_position_embeddings=length, **sizes)
    optimizer = make_optimizer(model)
    precision = "bf16" if has_bf16_products() else "fp32"
    model, optimizer = accelerate(model, optimizer, precision=precision, first_token=False)
    batch = make_batch(rows * (length,))

    def step() -> None:
        model(**batch).loss.backward()
        clip_gradients(optimizer, model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_product(tokens: int, rows: int, columns: int) -> Callable[[], None]:
    """Return a function that makes the gradient of a weight."""
    left, right = torch.randn(tokens, rows).bfloat16(), torch.randn(tokens, columns).bfloat16()

    def multiply() -> None:
        products.matrix_product(left, right, left_transposed=True)

    return multiply


def main(sizes: dict[str, int], threads: list[int]) -> None:
    """Print a line of JSON for each number of threads: its counts of a step after the first one."""
    for limit in ("_MIN_ROWS", "_MIN_TOKENS", "_MIN_WORK"):
        setattr(products, limit, 0)
    kernels = kernels_for(torch.empty(0))
    assert kernels is not None
    step = make_product(**sizes) if "tokens" in sizes else make_step(sizes.pop("length"), sizes.pop("rows"), sizes)
    step()
    tracer = Tracer()
    functions = kernels._functions
    for number in threads:
        torch.set_num_threads(number)
        kernels._functions = functions
        step()
        kernels._functions = {key: tracer.wrap(key[0], function) for key, function in functions.items()}
        tracer.counts.clear()
        step()
        print(json.dumps(tracer.counts), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), [int(word) for word in sys.argv[2:]])
