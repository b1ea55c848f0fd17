"""Products of large matrices: cpuft's own kernel where it is faster than torch's, which is in bf16 on CPUs with AMX."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from cpuft.kernels import Kernels, kernels_for

_STEP = 32
"""Numbers of a row that one instruction multiplies; rows that are read as they lie in memory are a multiple of it."""
_MIN_ROWS = 64
"""With fewer rows, packing the right factor takes longer than the product."""
_MIN_WORK = 1 << 24
"""Multiplications below which a call of torch takes no longer: 0.3 ms of one core without AMX, 5 microseconds with it."""


def matrix_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
) -> Tensor:
    """Return left right + bias: (rows, inner), (inner, columns) -> (rows, columns), in the dtype of the factors.

    Sums are fp32. All tensors have the same dtype.

    Parameters
    ----------
    bias: (columns,); None for none.
    left_transposed: `left` is given as (inner, rows).
    right_transposed: `right` is given as (columns, inner), as torch stores the weight of a linear layer.
    """
    inner, rows = left.shape if left_transposed else left.shape[::-1]
    columns = len(right) if right_transposed else right.shape[1]
    kernels = kernels_for(left, right)
    if kernels is not None and _is_worth_it(kernels, left, rows, columns, inner):
        # Rows that are read as they lie in memory have to end with a whole step.
        fits = inner % _STEP == 0 or (left_transposed and not right_transposed)
        if fits and left.is_contiguous() and right.is_contiguous():
            result = left.new_empty(rows, columns)
            _run(kernels, left, right, bias, result, inner, left_transposed, right_transposed)
            return result
    if right_transposed and not left_transposed:
        return functional.linear(left, right, bias)
    product = (left.t() if left_transposed else left) @ (right.t() if right_transposed else right)
    return product if bias is None else product + bias


def _is_worth_it(kernels: Kernels, left: Tensor, rows: int, columns: int, inner: int) -> bool:
    large = rows >= _MIN_ROWS and columns >= _STEP and rows * columns * inner >= _MIN_WORK
    return large and left.dtype == torch.bfloat16 and _has_tiles(kernels)


@functools.cache
def _has_tiles(kernels: Kernels) -> bool:
    """Return whether these kernels were built for tiles, and this process may use them: a small product is tried."""
    one = torch.ones(1, _STEP, dtype=torch.bfloat16)
    return _run(kernels, one, one, None, one.new_empty(1, 1), _STEP, False, True)


def _run(
    kernels: Kernels,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    result: Tensor,
    inner: int,
    left_transposed: bool,
    right_transposed: bool,
) -> bool:
    """Write the product to `result`; return whether the kernel could do it."""
    done = torch.zeros(1, dtype=torch.int64)
    sizes = (*result.shape, inner, int(left_transposed), int(right_transposed))
    kernels.run("matrix_product", left.dtype, left, right, bias, result, done, *sizes)
    return bool(done.item())
