"""Matrix products of 8-bit integers in place of fp32 ones.

As in SwitchBack (Wortsman and others 2023, arXiv 2304.13013), each row of the left operand has its own scale. Each
output of a weight has one, too: the output's gradient is multiplied by these scales before it is quantised itself, so
that the weight as it was quantised for the output also serves for the input's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpuft.kernels import kernels_for

MIN_ROWS = 128
"""Number of rows of the left operand from which products are 8-bit. With fewer, quantising the weights takes as long as
the product saves. The last layer has fewer where only first tokens are needed."""


def quantise_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise `x * factors` to 8 bits, one scale for each row.

    Parameters
    ----------
    x: (rows, columns), fp32 or bf16, at least one column.
    factors: (columns,), fp32, contiguous; None for ones.

    Returns
    -------
    (values, scales): int8 values from -127 to 127, (rows, columns), and scales, (rows,), fp32. A value times its row's
    scale is the number that it stands for, with an error of at most half a scale. A scale is 1/127 of the row's largest
    magnitude. A row of zeros has scale 0 and values 0. If a row has a NaN or infinite number, its scale is NaN or
    infinite and its values mean nothing; no error is raised.
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

    Element (i, j) is the sum over k of values[i, k] * right[k, j], times scales[i] * column_scales[j], plus bias[j].
    Sums are exact 32-bit integers before they are scaled.

    Parameters
    ----------
    x: (values, scales) from `quantise_rows`: int8, (rows, inner), and fp32, (rows,).
    right: (inner, outputs), int8.
    column_scales, bias: (outputs,), fp32; None for ones and zeros.
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
