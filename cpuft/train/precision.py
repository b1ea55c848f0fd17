"""The precision of forward passes, and a measurement of what matrix products run on here."""

from __future__ import annotations

import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cpuft.hardware import Cpu, Precision, choose_precision, effective_flags, parse_cpuinfo

# A square product of this size takes some milliseconds on two cores, and is large enough to occupy some dozens.
_SIZE = 1024
_REPEATS = 5
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
    """Measure how fast matrix products in bf16, int8 or fp32 (any other value) are here, in about 0.1 s.

    `teraflops` and `fp32_teraflops`, rounded to 3 digits, are 10**12 operations per second of a product of two 1024 x
    1024 matrices, in the precision and in fp32.
    """
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8}.get(precision, torch.float32)
    fp32 = _measure_rate(torch.float32)
    rate = fp32 if dtype == torch.float32 else _measure_rate(dtype)
    rounded = [float(f"{one:.3g}") for one in (rate, fp32)]  # never to 0, also in an emulated CPU
    return dict(zip(("teraflops", "fp32_teraflops"), rounded))


def drop_slow_bf16(chosen: Precision, teraflops: float, fp32_teraflops: float, earlier: str = "") -> Precision:
    """Return `chosen`, or fp32 for a bf16 that was measured to have less than 0.8 of fp32's speed: the CPU multiplies
    bf16, but this build of torch does not use that, as some for Arm. With `earlier`, the precision in which a resumed
    run began, measurements do not count: bf16 stays if that was bf16, else it is fp32.
    """
    if chosen.name != "bf16" or earlier == "bf16" or (not earlier and teraflops >= _WORTH * fp32_teraflops):
        return chosen
    why = f"bf16 is slower with this torch ({teraflops:.2f} TFLOP/s measured)"
    return Precision("fp32", "as when the run began" if earlier else why)


def find_precision(wanted: str) -> str:
    """Return the name of what `choose_precision` chooses on this host without emulation, and raise the same. On Arm,
    where some builds of torch are slow in bf16, "auto" measures that once in a process. Ranks may measure differently.
    """
    flags = read_cpu().flags
    chosen = choose_precision(wanted, False, flags)
    if wanted == "auto" and "asimd" in flags and chosen.name == "bf16":
        products = _measure_once(chosen.name)
        chosen = drop_slow_bf16(chosen, products["teraflops"], products["fp32_teraflops"])
    return chosen.name


_measure_once = functools.cache(measure_products)


def format_products(products: dict[str, float]) -> str:
    """Return a line on `measure_products`: `0.41 TFLOP/s measured, fp32 0.18`, the end only if it differs."""
    line = f"{products['teraflops']:.2f} TFLOP/s measured"
    is_fp32 = products["teraflops"] == products["fp32_teraflops"]
    return line if is_fp32 else f"{line}, fp32 {products['fp32_teraflops']:.2f}"


def _measure_rate(dtype: torch.dtype) -> float:
    left, right = torch.randn(2, _SIZE, _SIZE).to(dtype)
    multiply: Callable[..., torch.Tensor] = torch._int_mm if dtype == torch.int8 else torch.mm
    out = multiply(left, right)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        multiply(left, right, out=out)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIZE**3 / min(seconds) / 1e12
