"""The precision of forward passes, and a measurement of what matrix products run on here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cpuft.hardware import Cpu, effective_flags, parse_cpuinfo

# A square product of this size takes some milliseconds on two cores, and is large enough to occupy some dozens.
_SIZE = 1024
_REPEATS = 5


def read_cpu() -> Cpu:
    """Return this host's CPU, without the flags that ONEDNN_MAX_CPU_ISA hides from oneDNN."""
    cpu = parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.machine())
    return cpu._replace(flags=effective_flags(cpu.flags, os.environ.get("ONEDNN_MAX_CPU_ISA", "")))


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    """Return the context of a forward pass: autocast on the CPU for `bf16`, otherwise one that changes nothing."""
    if precision == "bf16":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def measure_products(precision: str) -> dict[str, Any]:
    """Measure what matrix products in bf16, int8 or fp32 (any other value) run on here, in about 0.1 s.

    `kernel` is the implementation that oneDNN reports, e.g. brg_matmul:avx512_core_amx; empty if oneDNN did not compute
    it, or the user has set ONEDNN_VERBOSE. `teraflops` and `fp32_teraflops` are 10**12 operations per second of a
    product of two 1024 x 1024 matrices, in the precision and in fp32.
    """
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8}.get(precision, torch.float32)
    fp32 = _measure_rate(torch.float32)
    rate = fp32 if dtype == torch.float32 else _measure_rate(dtype)
    rounded = [float(f"{one:.3g}") for one in (rate, fp32)]  # never to 0, also in an emulated CPU
    return {"kernel": _find_kernel(dtype), "teraflops": rounded[0], "fp32_teraflops": rounded[1]}


def format_products(products: dict[str, Any]) -> str:
    """Return a line, `0.41 TFLOP/s measured (brg_matmul:avx512_core_bf16), fp32 0.18`; the end only if it differs."""
    kernel = f" ({products['kernel']})" if products["kernel"] else ""
    line = f"{products['teraflops']:.2f} TFLOP/s measured{kernel}"
    is_fp32 = products["teraflops"] == products["fp32_teraflops"]
    return line if is_fp32 else f"{line}, fp32 {products['fp32_teraflops']:.2f}"


def parse_kernel(text: str) -> str:
    """Return the implementation of the first matrix product in oneDNN's verbose output; empty if there is none."""
    found = re.search(r"primitive,exec,cpu,(?:matmul|inner_product),([^,]+),", text)
    return found[1] if found else ""


def _measure_rate(dtype: torch.dtype) -> float:
    """Return the TFLOP/s of a square product, the best of a few."""
    left, right = torch.randn(2, _SIZE, _SIZE).to(dtype)
    multiply = _choose_product(dtype)
    out = multiply(left, right)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        multiply(left, right, out=out)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIZE**3 / min(seconds) / 1e12


def _choose_product(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return torch._int_mm if dtype == torch.int8 else torch.mm


def _find_kernel(dtype: torch.dtype) -> str:
    # If the user has set ONEDNN_VERBOSE, the user sees the kernel anyway, and would not see later ones after this.
    onednn: Any = torch.backends.mkldnn  # torch has no types for it
    if not onednn.is_available() or os.environ.get("ONEDNN_VERBOSE", "0") != "0":
        return ""
    left, right = torch.randn(2, 64, 64).to(dtype)
    with _capture_output() as lines, onednn.verbose(onednn.VERBOSE_ON):
        _choose_product(dtype)(left, right)
    return parse_kernel("".join(lines))


@contextlib.contextmanager
def _capture_output() -> Iterator[list[str]]:
    """Capture what C libraries write to standard output in this context; the list is filled when the context ends."""
    lines: list[str] = []
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    library.fflush(None)
    saved = os.dup(1)
    with open(os.memfd_create("products"), "w+") as file:  # in memory, because a disk may be full or read-only
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            library.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            lines += file.readlines()
