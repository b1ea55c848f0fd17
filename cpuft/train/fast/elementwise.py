"""Passes over activations between matrix products: dropout, GELU with a bias, and dropout + residual + layer norm.

Each runs as one C++ kernel forward and one backward, or as plain torch where there are no kernels.

The dropout mask is a function of a seed and an element's index, so it is computed twice and never stored: element `e`
takes 16 bits of word `e // 4` of the random stream SplitMix64 and is kept if they are at least `threshold`.
`torch.bernoulli_` on the CPU is serial and costs as much as a matrix product; this costs one pass over memory.
"""

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
"""Number of different probabilities that a mask can have: 65536, as many as 16 random bits have values."""
_INT64 = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
"""The increment of SplitMix64."""


@dataclass(frozen=True)
class Mask:
    """One dropout mask: its random stream and the share that it drops."""

    seed: int
    """Number of the stream, 0 to 2**64 - 1."""
    threshold: int
    """An element is dropped if its 16 random bits are below this: the dropout probability times 65536, 0 to 65535."""

    @property
    def scale(self) -> float:
        """The factor of elements that are kept: 65536 / (65536 - threshold), one over the probability of being kept."""
        return LEVELS / (LEVELS - self.threshold)

    def after(self, elements: int) -> Mask:
        """Return the mask whose element 0 is element number `elements` of this one; a multiple of four (unchecked)."""
        return Mask((self.seed + elements // 4 * _GOLDEN) % _INT64, self.threshold)

    @property
    def kernel_arguments(self) -> tuple[int, int, float]:
        """(seed, threshold, scale), in the order in which every kernel takes them."""
        return self.seed, self.threshold, self.scale


NO_MASK = Mask(seed=0, threshold=0)
"""The mask that drops nothing."""


def draw_mask(p: float, training: bool) -> Mask:
    """Return a new mask for dropout probability `p`, 0 to 1, rounded to 1/65536.

    Without `training`, or if p rounds to 0, it returns `NO_MASK` and draws no random number. The seed comes from
    torch's generator: `torch.manual_seed` repeats a run, and gradient checkpointing, which restores the generator,
    repeats a mask. p = 1 cannot be represented and becomes 65535/65536.
    """
    threshold = min(round(p * LEVELS), LEVELS - 1) if training else 0
    if threshold == 0:
        return NO_MASK
    # random_() without a range leaves the sign bit zero.
    seed = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None).item())
    return Mask(seed % _INT64, threshold)


def _to_signed(value: int) -> int:
    return (value + 2**63) % _INT64 - 2**63


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers as unsigned ones: torch's operator repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def kept_elements(mask: Mask, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return a bool tensor of `shape`, true where `mask` keeps the element of a contiguous tensor of that shape.

    It is computed in plain torch. The constants are those of SplitMix64 (Steele, Lea, Flood 2014).
    """
    count = torch.Size(shape).numel()
    z = torch.arange(1, (count + 3) // 4 + 1, dtype=torch.int64)
    z = z * _to_signed(_GOLDEN) + _to_signed(mask.seed)
    z = (z ^ _shift_right(z, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _to_signed(0x94D049BB133111EB)
    lanes = (z ^ _shift_right(z, 31)).view(torch.int16)[:count].view(shape)
    # The kernels compare unsigned 16-bit numbers, torch has signed ones: flipping the sign bit of the number and
    # subtracting half the range from the threshold gives the same order.
    return (lanes ^ -(1 << 15)) >= mask.threshold - (1 << 15)


def masked(x: Tensor, mask: Mask) -> Tensor:
    """Return a new tensor like `x`, of any shape, with dropped elements zero and the others times `mask.scale`.

    If the mask drops nothing, it returns `x` itself. Autograd does not see this; the gradient for `x` is the same
    function of the result's gradient.
    """
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
    """`torch.nn.Dropout` with a cheap mask: the same probability (to 1/65536) and scale, other random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return dropout of `x`, any shape; `x` itself when not training or p is 0.

        With `inplace`, p = 1 or a tensor that is not on the CPU, torch's own dropout runs.
        """
        if not self.training or self.p == 0.0 or self.inplace or x.device.type != "cpu" or self.p == 1.0:
            return super().forward(x)
        return _dropout(x, draw_mask(self.p, True))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        # Forward has the exponential at hand that the slope needs, too.
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
    """Return the exact GELU (with erf, not tanh) of `x + bias`, (rows, columns) in the dtype of `x`.

    The kernels' absolute error is 2e-7, and bf16 rounds the result once. They keep the slope for backward in the dtype
    of `x`: bf16 rounds it once, too. Gradients go to both arguments.

    Parameters
    ----------
    x: (rows, columns), fp32 or bf16.
    bias: (columns,), the same dtype.
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
            rows, columns, mask_arguments = mean.numel(), x.shape[-1], mask.kernel_arguments
            arrays = (x, shift, residual, weight.contiguous(), bias.contiguous(), total, y, mean, rstd)
            kernels.run("norm_forward", x.dtype, *arrays, rows, columns, *mask_arguments, eps)
        else:
            total, y, mean, rstd = _plain_norm_forward(x + shift, residual, (weight, bias, eps), mask)
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, _, mean, rstd = saved = ctx.saved_tensors
        # The kernel's mean and rstd are flat, torch's are not: each backward must read its own forward's.
        if (kernels := kernels_for(dy, total)) and mean.dim() == 1:
            dy = dy.contiguous()
            dresidual = torch.empty_like(total)
            dx = torch.empty_like(total) if ctx.mask.threshold else dresidual
            dweight, dbias, dshift = torch.zeros(3, weight.numel(), dtype=torch.float32)
            arrays = (dy, total, mean, rstd, weight.contiguous(), dx, dresidual, dweight, dbias, dshift)
            rows, columns = mean.numel(), total.shape[-1]
            kernels.run("norm_backward", total.dtype, *arrays, rows, columns, *ctx.mask.kernel_arguments)
        else:
            dx, dresidual, dweight, dbias = _plain_norm_backward(dy, saved, ctx.mask)
            dshift = dx.flatten(0, -2).sum(0)
        return dx, dshift.to(ctx.dtype), dresidual, dweight, dbias, None, None


_dropout_add_norm: Callable[..., Tensor] = _DropoutAddNorm.apply


def dropout_add_norm(x: Tensor, shift: Tensor, residual: Tensor, norm: nn.LayerNorm, mask: Mask) -> Tensor:
    """Return `norm(residual + dropout(x + shift))`, in the shape and dtype of `x`: the end of both halves of a layer.

    Gradients go to `x`, `shift`, `residual` and the norm's weight and bias.

    Parameters
    ----------
    x, residual: (..., hidden), one dtype, fp32 or bf16.
    shift: (hidden,), the bias of the linear layer before. Adding it here is cheaper than in the product, and backward
        computes its gradient in the same pass.
    norm: layer norm over the last dimension, with fp32 weight and bias. Its statistics are fp32 for any dtype.
    mask: of the dropout; `NO_MASK` for none.
    """
    return _dropout_add_norm(x, shift, residual, norm.weight, norm.bias, norm.eps, mask)
