"""Matrix products of 8-bit integers in place of fp32 ones.

As in SwitchBack (Wortsman and others 2023, arXiv 2304.13013), each row of the left operand has its own scale. So has
each output of a weight; the output's gradient is multiplied by these before it is quantised, which saves a second
quantised weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpuft.kernels import kernels_for

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
    torch._int_mm(rounded, right, out=y.view(torch.int32))
    if kernels := kernels_for(y):
        kernels.run("dequantise", y.dtype, y, scales, column_scales, bias, y, *y.shape)
        return y
    result = y.view(torch.int32) * scales[:, None]
    result = result if column_scales is None else result * column_scales
    return result if bias is None else result + bias
