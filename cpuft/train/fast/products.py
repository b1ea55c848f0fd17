"""Products of large matrices in bf16: by cpuft's kernel where it is faster than torch, on CPUs that multiply bf16."""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cpuft.kernels import Kernels, kernels_for
from cpuft.train.fast.elementwise import gelu_and_slope, times_slope

_STEP = 32
_MIN_ROWS = 1024
"""Rows of a left factor that is not transposed (in a layer, the tokens of a batch) below which packing the right factor
takes too long: with 512 tokens on two cores, the kernel takes 0.6 to 1.4 times as long as torch on a Xeon with AMX,
0.94 to 1.18 on a Zen 4.
"""
_MIN_FEW_ROWS = 16
"""The same for the rows of first tokens, which a layer's second half computes in one call."""
_MIN_TOKENS = 128
"""Rows of a left factor that is transposed (in the gradient of a weight, the tokens) below which torch is faster: with
32 and 64 tokens on two cores of that Xeon, torch takes 0.7 to 1.05 times as long, and with 128 1.07 to 1.26 times."""
_MIN_WORK = 1 << 22
"""Multiplications below which calling the kernel takes as long as the product."""


def matrix_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    *,
    addend: Tensor | None = None,
    left_transposed: bool = False,
    right_transposed: bool = False,
    place: Tensor | None = None,
) -> Tensor:
    """Return left right + bias + addend: (rows, inner), (inner, columns) -> (rows, columns), in the factors' dtype.

    Sums are fp32. `left_transposed` means that `left` is given as (inner, rows), and `right_transposed` that `right` is
    given as (columns, inner), as torch stores the weight of a linear layer. `bias` is (columns,), and `addend` (rows,
    columns), of the same dtype. The result is written to `place`, contiguous, if it is given.
    """
    product = _run(left, right, left_transposed, right_transposed, bias=bias, addend=addend, place=place)
    if product is not None:
        return product
    if right_transposed and not left_transposed and place is None:
        product = functional.linear(left, right, bias)
    else:
        factors = left.t() if left_transposed else left, right.t() if right_transposed else right
        product = torch.mm(*factors, out=place)
        product = product if bias is None else product.add_(bias)
    return product if addend is None else product.add_(addend)


def gelu_product(x: Tensor, weight: Tensor, bias: Tensor, keeps_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return the exact GELU of x weight^T + bias, and its slope there, None unless `keeps_slope`.

    Both are (rows, columns), in the dtype of `x`, without gradients. `x` is (rows, inner), `weight` (columns, inner),
    and `bias` (columns,). With cpuft's own product, GELU sees the sums before they are rounded. There must be kernels
    for the dtype of `x` (`kernels_for`), else AssertionError.
    """
    slope = x.new_empty(len(x), len(weight)) if keeps_slope else None
    activated = _run(x, weight, False, True, bias=bias, slope=slope, has_gelu=True)
    if activated is None:
        activated, slope = gelu_and_slope(functional.linear(x, weight), bias, keeps_slope)
    return activated, slope


def slope_product(grad: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient before an activation, (grad weight) * slope, and the sums of its columns.

    They are (rows, columns), in the dtype of `grad`, and (columns,), fp32; AssertionError without kernels for that.
    `grad`, (rows, inner), is that of the next layer's output, `weight`, (inner, columns), that layer's, and `slope`,
    (rows, columns), that of the activation.
    """
    sums = torch.zeros(weight.shape[1], dtype=torch.float32)
    product = _run(grad, weight, False, False, factor=slope, column_sums=sums)
    return times_slope(grad @ weight, slope) if product is None else (product, sums)


def can_multiply(x: Tensor, weight: Tensor, few: bool = False) -> bool:
    """Return whether the kernel computes the products of `x`, (tokens, inputs), with this weight, forward and backward.

    It does with AMX or AVX512_BF16 (but not on Zen 5), and with Arm's bf16 if it is measured to be faster than torch.
    The factors must be bf16, inputs and outputs multiples of 32, tokens * inputs^2 at least 2^22, and tokens at least
    1,024, or 16 if they are first tokens (`few`). What holds for the first layer of a feed-forward block holds for its
    second, and for the attention before.
    """
    tokens, inputs = x.shape
    large = tokens >= (_MIN_FEW_ROWS if few else _MIN_ROWS) and tokens * inputs * inputs >= _MIN_WORK
    fits = inputs % _STEP == 0 and len(weight) % _STEP == 0 and x.dtype == weight.dtype == torch.bfloat16
    kernels = kernels_for(x, weight) if large and fits else None
    return kernels is not None and _has_products(kernels)


def _run(
    left: Tensor,
    right: Tensor,
    left_transposed: bool,
    right_transposed: bool,
    *,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    addend: Tensor | None = None,
    column_sums: Tensor | None = None,
    slope: Tensor | None = None,
    has_gelu: bool = False,
    place: Tensor | None = None,
) -> Tensor | None:
    """Return the product after what `Epilogue` in large_products.h does to it; None without a kernel, or if torch is
    faster.
    """
    inner, rows = left.shape if left_transposed else left.shape[::-1]
    columns = len(right) if right_transposed else right.shape[1]
    large = rows * columns * inner >= _MIN_WORK and (inner >= _MIN_TOKENS if left_transposed else rows >= _MIN_ROWS)
    if not large or left.dtype != torch.bfloat16 or not (left.is_contiguous() and right.is_contiguous()):
        return None
    kernels = kernels_for(left, right)
    if kernels is None or not _has_products(kernels):
        return None
    factor, addend = (None if x is None else x.contiguous() for x in (factor, addend))
    result = left.new_empty(rows, columns) if place is None else place
    arrays = (left, right, bias, factor, addend, column_sums, slope, result)
    choices = (int(left_transposed), int(right_transposed), int(has_gelu))
    return result if _is_done(kernels, arrays, (rows, columns, inner, *choices)) else None


@functools.cache
def _has_products(kernels: Kernels) -> bool:
    """Return whether these kernels have products of large matrices for this CPU, which a small one tells. On Arm, where
    torch multiplies with the Compute Library or with slow code, depending on its build, they must also be faster.
    """
    one = torch.ones(1, _STEP, dtype=torch.bfloat16)
    if not _is_done(kernels, (one, one, *(None,) * 5, one.new_empty(1, 1)), (1, 1, _STEP, 0, 1, 0)):
        return False
    if platform.machine() == "x86_64":
        return True
    # The tokens of a small batch, and a weight of MiniLM's size.
    left, right = (torch.ones(size, 384, dtype=torch.bfloat16) for size in (2 * _MIN_ROWS, 384))
    out = torch.empty_like(left)
    arrays, sizes = (left, right, *(None,) * 5, out), (*out.shape, 384, 0, 1, 0)
    own, other = time_in_turn(lambda: _is_done(kernels, arrays, sizes), lambda: torch.mm(left, right.t(), out=out))
    return own < other


def time_in_turn(*functions: Callable[[], object], rounds: int = 3) -> list[float]:
    """Return for each function the shortest time in seconds of its `rounds` calls, which are made in turn."""
    seconds = [math.inf] * len(functions)
    for _ in range(rounds):
        for place, function in enumerate(functions):
            start = time.perf_counter()
            function()
            seconds[place] = min(seconds[place], time.perf_counter() - start)
    return seconds


def _is_done(kernels: Kernels, arrays: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> bool:
    done = torch.zeros(1, dtype=torch.int64)
    kernels.run("matrix_product", torch.bfloat16, *arrays, done, *sizes)
    return bool(done.item())
