"""Products of large matrices: cpuft's own kernel where it is faster than torch's, which is in bf16 on CPUs with AMX."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from cpuft.kernels import Kernels, kernels_for

_STEP = 32
"""Numbers of a row that one instruction multiplies."""
_MIN_ROWS = 1024
"""Rows of a left factor that is not transposed (in a layer, the tokens of a batch) below which packing the right factor
takes too long: with 512 tokens on two cores of a Xeon with AMX, the kernel takes 0.6 to 1.4 times as long as torch."""
_MIN_WORK = 1 << 22
"""Multiplications below which calling the kernel takes as long as the product."""


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
    if kernels is not None and left.dtype == torch.bfloat16 and left.is_contiguous() and right.is_contiguous():
        large = rows * columns * inner >= _MIN_WORK and (left_transposed or rows >= _MIN_ROWS)
        if large and _has_tiles(kernels):
            result = left.new_empty(rows, columns)
            if _run(kernels, left, right, bias, result, inner, left_transposed, right_transposed):
                return result
    if right_transposed and not left_transposed:
        return functional.linear(left, right, bias)
    product = (left.t() if left_transposed else left) @ (right.t() if right_transposed else right)
    return product if bias is None else product + bias


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
    """Write the product to `result`; return whether the kernel could multiply these sizes."""
    done = torch.zeros(1, dtype=torch.int64)
    sizes = (*result.shape, inner, int(left_transposed), int(right_transposed))
    kernels.run("matrix_product", left.dtype, left, right, bias, result, done, *sizes)
    return bool(done.item())
