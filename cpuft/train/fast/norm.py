"""layer_norm(residual + dropout(x + shift)): the end of both halves of an encoder layer, one pass forward and one back.

The shift is the bias of the linear layer before: its product alone is quicker, and its gradient comes by the way here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpuft.train.fast.dropout import Mask, masked
from cpuft.train.fast.kernels import kernels_for


def _plain_forward(x: Tensor, residual: Tensor, norm: tuple[Tensor, Tensor, float], mask: Mask) -> tuple[Tensor, ...]:
    total = residual + masked(x, mask)
    weight, bias, eps = norm
    y, mean, rstd = torch.native_layer_norm(total, [total.shape[-1]], weight, bias, eps)
    return total, y, mean, rstd


def _plain_backward(dy: Tensor, saved: tuple[Tensor, ...], mask: Mask) -> tuple[Tensor, ...]:
    total, weight, bias, mean, rstd = saved
    dresidual, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, total, [total.shape[-1]], mean, rstd, weight, bias, [True, True, True]
    )
    return masked(dresidual, mask), dresidual, dweight, dbias


class _DropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, mask: Mask
    ) -> Tensor:
        ctx.mask, ctx.dtype = mask, shift.dtype
        if kernels := kernels_for(x, shift, residual):
            x, residual = x.contiguous(), residual.contiguous()
            total, y = torch.empty_like(x), torch.empty_like(x)
            mean, rstd = torch.empty(2, x.shape[:-1].numel(), dtype=torch.float32)
            rows, cols, mask_arguments = mean.numel(), x.shape[-1], mask.kernel_arguments
            arrays = (x, shift, residual, weight.contiguous(), bias.contiguous(), total, y, mean, rstd)
            kernels.run("norm_forward", x.dtype, *arrays, rows, cols, *mask_arguments, eps)
        else:
            total, y, mean, rstd = _plain_forward(x + shift, residual, (weight, bias, eps), mask)
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, _, mean, rstd = saved = ctx.saved_tensors
        # The kernel leaves mean and rstd flat, torch leaves them shaped: each backward reads its own forward's.
        if (kernels := kernels_for(dy, total)) and mean.dim() == 1:
            dy = dy.contiguous()
            dresidual = torch.empty_like(total)
            dx = torch.empty_like(total) if ctx.mask.threshold else dresidual
            dweight, dbias, dshift = torch.zeros(3, weight.numel(), dtype=torch.float32)
            arrays = (dy, total, mean, rstd, weight.contiguous(), dx, dresidual, dweight, dbias, dshift)
            rows, cols = mean.numel(), total.shape[-1]
            kernels.run("norm_backward", total.dtype, *arrays, rows, cols, *ctx.mask.kernel_arguments)
        else:
            dx, dresidual, dweight, dbias = _plain_backward(dy, saved, ctx.mask)
            dshift = dx.flatten(0, -2).sum(0)
        return dx, dshift.to(ctx.dtype), dresidual, dweight, dbias, None, None


_dropout_add_norm: Callable[..., Tensor] = _DropoutAddNorm.apply


def dropout_add_norm(x: Tensor, shift: Tensor, residual: Tensor, norm: nn.LayerNorm, mask: Mask) -> Tensor:
    """`norm(residual + dropout(x + shift))`.

    Parameters
    ----------
    x, residual: (..., hidden), one dtype, bf16 or fp32. The result has their shape and dtype.
    shift: (hidden,).
    norm: over the last dimension, with fp32 weight and bias. Statistics are fp32 whatever the dtype.
    """
    return _dropout_add_norm(x, shift, residual, norm.weight, norm.bias, norm.eps, mask)
