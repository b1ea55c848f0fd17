"""Passes over activations between matrix products: dropout, GELU with a bias, and the end of half a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.train.fast.kernels import Kernels, kernels_for

LEVELS = 1 << 16
_INT64 = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
"""What SplitMix64 counts by."""


@dataclass(frozen=True)
class Mask:
    """One dropout mask: which stream, how much of it is dropped, and what makes up for it."""

    seed: int
    """Number of the stream, 0 to 2**64 - 1."""
    threshold: int
    """Of the 65536 values of an element's 16 bits, the first `threshold` drop it."""

    @property
    def scale(self) -> float:
        """What kept values are multiplied by: one over the probability, to 16 bits, of being kept."""
        return LEVELS / (LEVELS - self.threshold)

    def after(self, elements: int) -> Mask:
        """The mask of what comes after so many elements, a multiple of four."""
        return Mask((self.seed + elements // 4 * _GOLDEN) % _INT64, self.threshold)

    @property
    def kernel_arguments(self) -> tuple[int, int, float]:
        """Seed, threshold and scale, in the order that every kernel takes them."""
        return self.seed, self.threshold, self.scale


NO_MASK = Mask(seed=0, threshold=0)


def draw_mask(p: float, training: bool) -> Mask:
    """A fresh mask for dropout probability `p`, to 1 / 65536; its seed comes from torch's generator.

    So `torch.manual_seed` repeats a run, and gradient checkpointing, which restores the generator, repeats a mask.
    p = 1, which drops everything, is not representable and rounds to 65535 / 65536.
    """
    threshold = min(round(p * LEVELS), LEVELS - 1) if training else 0
    if threshold == 0:
        return NO_MASK
    # random_() without a range leaves the sign bit zero.
    seed = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None).item())
    return Mask(seed % _INT64, threshold)


def _signed(value: int) -> int:
    return (value + 2**63) % _INT64 - 2**63


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def kept_elements(mask: Mask, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """True where `mask` keeps an element of a contiguous tensor of `shape`. Plain torch; SplitMix64's constants."""
    count = torch.Size(shape).numel()
    z = torch.arange(1, (count + 3) // 4 + 1, dtype=torch.int64)
    z = z * _signed(_GOLDEN) + _signed(mask.seed)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    lanes = (z ^ _shifted(z, 31)).view(torch.int16)[:count].view(shape)
    # The kernels read lanes as unsigned: value and threshold move down together by half the range where the sign
    # bit is flipped instead.
    return (lanes ^ -(1 << 15)) >= mask.threshold - (1 << 15)


def masked(x: Tensor, mask: Mask) -> Tensor:
    """`x` with dropped elements zero and kept ones scaled. No autograd: forward and backward are this function."""
    if mask.threshold == 0:
        return x
    x = x.contiguous()
    if kernels := kernels_for(x):
        y = torch.empty_like(x)
        kernels.run("dropout", x.dtype, x, y, x.numel(), *mask.kernel_arguments)
        return y
    return torch.where(kept_elements(mask, x.shape), x * mask.scale, 0.0)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return masked(x, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return masked(grad, ctx.mask), None


_dropout: Callable[..., Tensor] = _Dropout.apply


class FastDropout(nn.Dropout):
    """`torch.nn.Dropout` with a cheap mask: same probability (to 1 / 65536), same scale, other random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of `x`, any shape; `x` itself when not training or p is 0."""
        if not self.training or self.p == 0.0 or self.inplace or x.device.type != "cpu" or self.p == 1.0:
            return super().forward(x)
        return _dropout(x, draw_mask(self.p, True))


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


def _plain_norm_forward(
    x: Tensor, residual: Tensor, norm: tuple[Tensor, Tensor, float], mask: Mask
) -> tuple[Tensor, ...]:
    total = residual + masked(x, mask)
    weight, bias, eps = norm
    y, mean, rstd = torch.native_layer_norm(total, [total.shape[-1]], weight, bias, eps)
    return total, y, mean, rstd


def _plain_norm_backward(dy: Tensor, saved: tuple[Tensor, ...], mask: Mask) -> tuple[Tensor, ...]:
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
            total, y, mean, rstd = _plain_norm_forward(x + shift, residual, (weight, bias, eps), mask)
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
            dx, dresidual, dweight, dbias = _plain_norm_backward(dy, saved, ctx.mask)
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
