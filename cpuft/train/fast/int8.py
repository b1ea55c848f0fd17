"""Products of 8-bit numbers in place of fp32 ones.

As in SwitchBack (Wortsman and others 2023, arXiv 2304.13013), each row of what is multiplied has its own scale. So has
each output of a weight: the output's gradient takes these in before it is rounded itself, and the weight that was
rounded for the output serves the input's gradient, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpuft.train.fast.kernels import kernels_for

LEAST_ROWS = 128
"""With fewer, rounding the weights takes what their product saves: the last layer's, where first tokens are enough."""


def quantise_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x * factors`, fp32, in 8 bits: (rows, columns) -> int8 of that shape, and (rows,) scales that it counts times.

    The error is at most half a scale, which is 1/127 of the row's largest magnitude. A row with a number that is none,
    or infinite, has a scale that is none, or infinite. `factors`: (columns,).
    """
    if kernels := kernels_for(x):
        x = x.contiguous()
        rounded, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
        kernels.run("quantise_rows", x.dtype, x, factors, rounded, scales, *x.shape)
        return rounded, scales
    x = x if factors is None else x * factors
    most = x.abs().amax(1)
    inverse = torch.where(most > 0, 127 / most, 0)
    return (x * inverse[:, None]).round().nan_to_num().to(torch.int8), most / 127


def multiply(
    x: tuple[Tensor, Tensor], right: Tensor, columns: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The fp32 product of rows from `quantise_rows`, (rows, inner), and int8 (inner, outputs), plus a bias (outputs,).

    `columns`: scales of the outputs. Sums are exact, as whole numbers of 32 bits.
    """
    rounded, scales = x
    y = torch.empty(len(rounded), right.shape[1])
    torch._int_mm(rounded, right, out=y.view(torch.int32))
    if kernels := kernels_for(y):
        kernels.run("dequantise", y.dtype, y, scales, columns, bias, y, *y.shape)
        return y
    result = y.view(torch.int32) * scales[:, None]
    result = result if columns is None else result * columns
    return result if bias is None else result + bias
