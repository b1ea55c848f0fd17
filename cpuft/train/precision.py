"""The context a forward pass runs in, and a proof of what its products run on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# A square product of this size takes some milliseconds on two cores, and fills some dozens.
_SIZE = 1024
_REPEATS = 5


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    """bf16 products by autocast, or fp32 as it is."""
    if precision == "bf16":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def measure_products(precision: str) -> dict[str, Any]:
    """What products really run on here, measured in about 0.1 s on this process's cores.

    Returns
    -------
    `kernel`: the implementation that oneDNN says it ran in `precision`, e.g. brg_matmul:avx512_core_amx; empty where
    the product was not oneDNN's (fp32 is MKL's on some processors). `teraflops`: its rate; `fp32_teraflops`: fp32's.
    """
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8}.get(precision, torch.float32)
    fp32 = _rate(torch.float32)
    rate = fp32 if dtype == torch.float32 else _rate(dtype)
    return {"kernel": _kernel(dtype), "teraflops": round(rate, 3), "fp32_teraflops": round(fp32, 3)}


def format_products(products: dict[str, Any]) -> str:
    """One line for people: `0.41 TFLOP/s measured (brg_matmul:avx512_core_bf16), fp32 0.18`."""
    kernel = f" ({products['kernel']})" if products["kernel"] else ""
    line = f"{products['teraflops']:.2f} TFLOP/s measured{kernel}"
    same = products["teraflops"] == products["fp32_teraflops"]
    return line if same else f"{line}, fp32 {products['fp32_teraflops']:.2f}"


def parse_kernel(text: str) -> str:
    """The implementation of the first product in oneDNN's verbose output; empty without one.

    Its fields, by its documentation: onednn_verbose,v1,primitive,exec,engine,primitive,implementation,...
    """
    found = re.search(r"primitive,exec,cpu,(?:matmul|inner_product),([^,]+),", text)
    return found[1] if found else ""


def _rate(dtype: torch.dtype) -> float:
    """TFLOP/s of a square product, the best of a few."""
    left, right = torch.randn(2, _SIZE, _SIZE).to(dtype)
    multiply = _multiplier(dtype)
    out = multiply(left, right)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        multiply(left, right, out=out)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIZE**3 / min(seconds) / 1e12


def _multiplier(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What multiplies matrices of such numbers."""
    return torch._int_mm if dtype == torch.int8 else torch.mm


def _kernel(dtype: torch.dtype) -> str:
    # Who has oneDNN talking already hears it anyway, and would not after this.
    onednn: Any = torch.backends.mkldnn  # torch has no types for it
    if not onednn.is_available() or os.environ.get("ONEDNN_VERBOSE", "0") != "0":
        return ""
    left, right = torch.randn(2, 64, 64).to(dtype)
    with _output() as lines, onednn.verbose(onednn.VERBOSE_ON):
        _multiplier(dtype)(left, right)
    return parse_kernel("".join(lines))


@contextlib.contextmanager
def _output() -> Iterator[list[str]]:
    """What this process's libraries write to standard output inside: complete once it is left."""
    lines: list[str] = []
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    library.fflush(None)
    kept = os.dup(1)
    with open(os.memfd_create("products"), "w+") as file:  # no disk: it may be full or read-only
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            library.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            lines += file.readlines()
