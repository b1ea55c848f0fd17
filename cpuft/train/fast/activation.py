"""GELU of a linear layer's product and bias, one pass forward and one back.

Forward computes its slope, too, while it has the exponential at hand; backward gives the bias's gradient by the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.train.fast.kernels import Kernels, kernels_for


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        slope = torch.empty_like(y) if any(ctx.needs_input_grad) else None
        kernels.run("gelu_forward", x.dtype, x, bias, y, slope, *x.shape)
        ctx.save_for_backward(slope)
        ctx.kernels = kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        dx, dbias = torch.empty_like(slope), torch.zeros(slope.shape[1], dtype=torch.float32)
        ctx.kernels.run("gelu_backward", slope.dtype, grad.contiguous(), slope, dx, dbias, *slope.shape)
        return dx, dbias.to(grad.dtype), None


_gelu: Callable[..., Tensor] = _Gelu.apply


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias times the standard normal distribution's cdf there, (rows, columns), as torch's exact GELU (absolute
    error 2e-7); one dtype. `bias`: (columns,).

    With the kernels, the slope that is kept for backward has that dtype: for bf16 it is rounded once.
    """
    if kernels := kernels_for(x, bias):
        return _gelu(x, bias, kernels)
    return functional.gelu(x + bias)
