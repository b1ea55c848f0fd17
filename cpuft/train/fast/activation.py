"""GELU that computes its slope while it has the exponential at hand, so that backward is one multiplication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.train.fast.kernels import kernels_for


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kernels = kernels_for(x)
        assert kernels is not None
        x = x.contiguous()
        y, slope = torch.empty_like(x), torch.empty_like(x)
        kernels.run("gelu", x.dtype, x, y, slope, x.numel())
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        result: Tensor = grad * slope
        return result


_gelu: Callable[..., Tensor] = _Gelu.apply


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal distribution's cdf at x, any shape, as torch's exact GELU (absolute error 2e-7).

    With the kernels, the slope that is kept for backward has `x`'s dtype: for bf16 it is rounded once.
    """
    if kernels_for(x) and torch.is_grad_enabled() and x.requires_grad:
        return _gelu(x)
    return functional.gelu(x)
