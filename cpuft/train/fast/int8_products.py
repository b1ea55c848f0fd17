"""Matrix products of 8-bit integers in place of fp32 ones: by torch, on Arm by cpuft's kernel where it is faster.

As in SwitchBack (Wortsman and others 2023, arXiv 2304.13013), each row of the left operand has its own scale. So has
each output of a weight; the output's gradient is multiplied by these before it is quantised, which saves a second
quantised weight.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cpuft.kernels import Kernels, kernels_for
from cpuft.train.fast.products import time_in_turn

MIN_ROWS = 128
"""Rows of the left operand from which products are 8-bit. With fewer, as in the last layer where only first tokens are
needed, quantising the weights takes as long as the product saves."""


def quantise_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise `x * factors` to 8 bits, one scale for each row: (values, scales).

    `x` is (rows, columns), fp32 or bf16, and `factors` (columns,), fp32, contiguous. Values are int8 from -127 to 127,
    (rows, columns), and scales fp32, (rows,): 1/127 of the row's largest magnitude, 0 for a row of zeros. A value times
    its row's scale is the number that it stands for, with an error of at most half a scale. If a row has a NaN or
    infinite number, so is its scale, and its values mean nothing.
    """
    if kernels := kernels_for(x):
        x = x.contiguous()
        rounded, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
        kernels.run("quantise_rows", x.dtype, x, factors, rounded, scales, *x.shape)
        return rounded, scales
    x = x.float() if factors is None else x.float() * factors
    largest = x.abs().amax(1)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return (x * inverse[:, None]).round().nan_to_num().to(torch.int8), largest / 127


def multiply(
    x: tuple[Tensor, Tensor], right: Tensor, column_scales: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the product of quantised rows and an int8 matrix, plus the bias: (rows, outputs), fp32.

    Element (i, j) is the sum over k of values[i, k] * right[k, j], an exact 32-bit integer, times scales[i] *
    column_scales[j], plus bias[j]. `x` are the values, int8, (rows, inner), and scales, fp32, (rows,), of
    `quantise_rows`; `right` is int8, (inner, outputs), and the others are fp32, (outputs,), or None for 1 and for 0.
    """
    rounded, scales = x
    y = torch.empty(len(rounded), right.shape[1])
    kernels = kernels_for(y)
    if kernels and _has_products(kernels):
        _is_done(kernels, rounded, right.t().contiguous(), scales, column_scales, bias, y)
        return y
    torch._int_mm(rounded, right, out=y.view(torch.int32))
    if kernels:
        kernels.run("dequantise", y.dtype, y, scales, column_scales, bias, y, *y.shape)
        return y
    result = y.view(torch.int32) * scales[:, None]
    result = result if column_scales is None else result * column_scales
    return result if bias is None else result + bias


@functools.cache
def _has_products(kernels: Kernels) -> bool:
    """Return whether these kernels multiply in 8 bits on this CPU, of Arm with i8mm or dotprod, faster than torch."""
    left, right = (torch.ones(size, 384, dtype=torch.int8) for size in (1024, 384))
    scales, y = torch.ones(len(left)), torch.empty(len(left), len(right))
    if not _is_done(kernels, left[:1], right[:1], scales, None, None, y):
        return False
    own, other = time_in_turn(
        lambda: _is_done(kernels, left, right.t().contiguous(), scales, None, None, y),  # as in backward
        lambda: torch._int_mm(left, right.t(), out=y.view(torch.int32)),
    )
    return own < other


def _is_done(
    kernels: Kernels,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    column_scales: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
) -> bool:
    """Write the product of int8 rows and of a matrix given as (outputs, inner) to `y`; False: this CPU cannot."""
    (rows, inner), outputs = left.shape, len(right)
    room = torch.empty(_filled_up(rows, 8) + _filled_up(outputs, 8), _filled_up(inner, 16), dtype=torch.int8)
    done = torch.zeros(1, dtype=torch.int64)
    arrays = left, right, scales, column_scales, bias, y, room, done
    kernels.run("int8_product", torch.float32, *arrays, rows, outputs, inner)
    return bool(done.item())


def _filled_up(count: int, step: int) -> int:
    return -(-count // step) * step
