"""The work of a step in instructions and barriers: what grows with the number of threads is seen on two cores.

Instructions are counted one by one (count_instructions.cpp), so that the counts are those of this CPU's own kernels and
no other program disturbs them; virtual machines often have no counter, and valgrind knows neither AVX-512 nor AMX.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from cpuft.kernels import kernels_for
from cpuft.train.fast.products import _has_products
from tests.conftest import ASLEEP

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="single steps are read as those of x86-64")

SMALL = {
    "num_hidden_layers": 1,
    "length": 32,
    "rows": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
}
PRODUCT = {"tokens": 192, "rows": 384, "columns": 384}
MINILM = {
    "num_hidden_layers": 1,
    "length": 54,
    "rows": 4,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
}
WITHOUT_STRINGS = ("x86_rep_stosb_threshold", "x86_rep_movsb_threshold")
"""glibc's settings from how many bytes on it uses instructions that repeat: each byte would count as one."""
BARRIERS_OF_LAYER = 27
"""How often the threads wait for each other in forward and backward of a layer that runs as two halves."""


def count(sizes: dict[str, int], *threads: int) -> list[dict[str, Any]]:
    """For each number of threads, the calls, instructions and barriers of a step or a product, by kernel."""
    tunables = ":".join(f"glibc.cpu.{name}={1 << 30}" for name in WITHOUT_STRINGS)
    words = [json.dumps(sizes), *map(str, threads)]
    command = [sys.executable, "-m", "tests.train.fast.count_instructions", *words]
    environ = os.environ | ASLEEP | {"GLIBC_TUNABLES": tunables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def add_up(kernels: dict[str, dict[str, int]], what: str) -> int:
    return sum(counts[what] for counts in kernels.values())


def has_products() -> bool:
    kernels = kernels_for(torch.empty(0))
    assert kernels is not None
    return _has_products(kernels)


def test_the_gradient_of_a_weight_takes_as_much_work_with_more_threads() -> None:
    few, many = count(PRODUCT, 2, 16)
    assert bool(few) == bool(many) == has_products()  # torch computes it on other CPUs
    assert add_up(many, "instructions") <= 1.05 * add_up(few, "instructions")


def test_a_small_step_takes_little_more_work_with_more_threads() -> None:
    few, many = count(SMALL, 2, 16)
    # A thread has memory and sums of its own in each kernel, which weighs more here than in a step of usual size.
    assert 0.9 < add_up(many, "instructions") / add_up(few, "instructions") < 1.35
    for name, counts in many.items():
        assert counts["calls"] == few[name]["calls"]
        # With many threads, both gradients of weights of a half wait once more, for the factors that all have packed.
        assert counts["barriers"] - few[name]["barriers"] in (0, 2 * name.endswith("half_backward"))
    halves = {name: counts for name, counts in few.items() if "_half_" in name}
    assert bool(halves) == has_products()
    assert add_up(halves, "barriers") <= BARRIERS_OF_LAYER


@pytest.mark.proof
def test_a_step_takes_as_much_work_with_16_threads_as_with_2() -> None:
    few, many, most = (add_up(found, "instructions") for found in count(MINILM, 2, 16, 32))
    assert many / few < 1.05
    assert most / few < 1.1
