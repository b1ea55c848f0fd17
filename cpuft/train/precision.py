"""The precision of forward passes, and a measurement of what matrix products run on here."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from cpuft.hardware import Cpu, Precision, choose_precision, effective_flags, parse_cpuinfo
from cpuft.train.fast import int8_products
from cpuft.train.fast.products import time_in_turn

# A square product of this size takes some milliseconds on two cores, and is large enough to occupy some dozens.
_SIZE = 1024
_WORTH = 0.8
"""Speed of products in bf16, as a share of those in fp32, from which bf16 is worth it: it also halves what is read and
written, and speeds are measured with noise."""


def read_cpu() -> Cpu:
    """Return this host's CPU, without the flags that ONEDNN_MAX_CPU_ISA hides from oneDNN. On macOS its name is its
    architecture, and it has no flags.
    """
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    cpu = parse_cpuinfo(text, platform.machine())
    return cpu._replace(flags=effective_flags(cpu.flags, os.environ.get("ONEDNN_MAX_CPU_ISA", "")))


def autocast(precision: str) -> torch.autocast:
    """Return the context of a forward pass: autocast to bf16 on the CPU for `bf16`, otherwise none."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def measure_products(precision: str) -> dict[str, float]:
    """Measure how fast matrix products in bf16, int8 or fp32 (any other value) are here, in about 0.1 s: those of
    torch, in int8 those of the fast path.

    `teraflops` and `fp32_teraflops`, rounded to 3 digits, are 10**12 operations per second of a product of two 1024 x
    1024 matrices, in the precision and in fp32.
    """
    dtypes = [torch.float32, *{"bf16": [torch.bfloat16], "int8": [torch.int8]}.get(precision, [])]
    products = [_make_product(dtype) for dtype in dtypes]
    for multiply in products:
        multiply()  # the first call takes longer
    seconds = time_in_turn(*products, rounds=5)
    fp32, rate = (float(f"{2 * _SIZE**3 / one / 1e12:.3g}") for one in (seconds[0], seconds[-1]))  # never 0
    return {"teraflops": rate, "fp32_teraflops": fp32}


def drop_slow_bf16(
    chosen: Precision, cpu_flags: Collection[str], products: Mapping[str, float], earlier: str = ""
) -> Precision:
    """Return `chosen`, or fp32 for a bf16 that on an Arm CPU was measured (`products`, as `measure_products` returns)
    to have less than 0.8 of fp32's speed: some builds of torch for Arm do not use the CPU's bf16, and not all products
    are made by cpuft's kernels. With `earlier`, the precision in which a resumed run began, measurements do not count:
    bf16 stays if that was bf16, else it is fp32.
    """
    is_fast = "asimd" not in cpu_flags or products["teraflops"] >= _WORTH * products["fp32_teraflops"]
    if chosen.name != "bf16" or earlier == "bf16" or (not earlier and is_fast):
        return chosen
    why = f"bf16 is slower with this torch ({products['teraflops']:.2f} TFLOP/s measured)"
    return Precision("fp32", "as when the run began" if earlier else why)


def find_precision(wanted: str) -> str:
    """Return the name of what `choose_precision` chooses on this host without emulation, and raise the same. On Arm,
    where some builds of torch are slow in bf16, "auto" measures that once in a process. Ranks may measure differently.
    """
    flags = read_cpu().flags
    chosen = choose_precision(wanted, False, flags)
    if wanted == "auto" and "asimd" in flags and chosen.name == "bf16":
        chosen = drop_slow_bf16(chosen, flags, _measure_once(chosen.name))
    return chosen.name


_measure_once = functools.cache(measure_products)


def format_products(products: dict[str, float]) -> str:
    """Return a line on `measure_products`: `0.41 TFLOP/s measured, fp32 0.18`, the end only if it differs."""
    line = f"{products['teraflops']:.2f} TFLOP/s measured"
    is_fp32 = products["teraflops"] == products["fp32_teraflops"]
    return line if is_fp32 else f"{line}, fp32 {products['fp32_teraflops']:.2f}"


def _make_product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    left, right = torch.randn(2, _SIZE, _SIZE).to(dtype)
    if dtype == torch.int8:
        return functools.partial(int8_products.multiply, (left, torch.ones(_SIZE)), right)
    return functools.partial(torch.mm, left, right, out=torch.empty_like(left))
