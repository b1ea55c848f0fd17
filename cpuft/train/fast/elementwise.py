"""Passes over activations between matrix products: dropout, gated and other activations, residuals and norms.

The dropout mask is a function of a seed and an element's index, so it is computed twice and never stored: element `e`
takes 16 bits of word `e // 4` of the random stream SplitMix64 and is kept if they are at least `threshold`.
`torch.bernoulli_` on the CPU is serial and costs as much as a matrix product; this costs one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.kernels import Kernels, kernels_for, need_kernels

LEVELS = 1 << 16
"""Number of different probabilities that a mask can have, as many as 16 random bits have values."""
_INT64 = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Mask:
    """One dropout mask: its random stream and the share that it drops."""

    seed: int
    """Number of the stream, 0 to 2**64 - 1."""
    threshold: int
    """An element is dropped if its 16 random bits are below this: the dropout probability times 65536, 0 to 65535."""

    @property
    def scale(self) -> float:
        """The factor of elements that are kept: one over the probability of being kept."""
        return LEVELS / (LEVELS - self.threshold)

    @property
    def kernel_arguments(self) -> tuple[int, int, float]:
        """(seed, threshold, scale), in the order in which every kernel takes them."""
        return self.seed, self.threshold, self.scale


NO_MASK = Mask(seed=0, threshold=0)


def draw_mask(p: float, training: bool) -> Mask:
    """Return a new mask for dropout probability `p`, 0 to 1, rounded to 1/65536 (1 becomes 65535/65536); `NO_MASK` if
    that is 0 or not `training`. The seed is from torch's generator, so that gradient checkpointing repeats it.
    """
    return draw_masks([p if training else 0.0])[0]


def draw_masks(rates: Sequence[float]) -> list[Mask]:
    """Return for each rate what `draw_mask(rate, True)` called in this order would return, in fewer calls of torch."""
    thresholds = [min(round(p * LEVELS), LEVELS - 1) for p in rates]
    # random_() without a range leaves the sign bit zero.
    drawn = torch.empty(sum(map(bool, thresholds)), dtype=torch.int64).random_(-(2**63), None).tolist()
    seeds = iter(drawn)
    return [Mask(next(seeds) % _INT64, threshold) if threshold else NO_MASK for threshold in thresholds]


def _to_signed(value: int) -> int:
    return (value + 2**63) % _INT64 - 2**63


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers as unsigned ones: torch's operator repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def kept_elements(mask: Mask, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return bools of `shape`, true for elements that `mask` keeps: the same for the same mask, in kernels as well."""
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
    """Return dropout of `x`, for code that autograd does not see; `x` itself if `mask` drops nothing."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Gradients are enabled for a second derivative, as a gradient penalty needs it.
        return (dropout if torch.is_grad_enabled() else masked)(grad, ctx.mask), None


_dropout: Callable[..., Tensor] = _Dropout.apply


def dropout(x: Tensor, mask: Mask) -> Tensor:
    """Return `x`, any shape, zero where a mask drops and times its scale elsewhere; `x` itself if it drops nothing."""
    return _dropout(x, mask) if mask.threshold else x


class FastDropout(nn.Dropout):
    """`torch.nn.Dropout` with a cheap mask: the same probability (to 1/65536) and scale, other random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return dropout of `x`, in evaluation `x`; torch's own runs with `inplace`, p = 1 or an `x` not on the CPU."""
        if not self.training or self.p == 0.0 or self.inplace or x.device.type != "cpu" or self.p == 1.0:
            return super().forward(x)
        return dropout(x, draw_mask(self.p, True))


def is_exact_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether this is the exact GELU (with erf): torch's function, or transformers' module GELUActivation."""
    return type(activation).__name__ == "GELUActivation" or activation is functional.gelu


def gelu_and_slope(x: Tensor, bias: Tensor, keeps_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return the exact GELU of `x + bias`, (rows, columns) + (columns,), and its slope there (None unless
    `keeps_slope`), both like `x`. AssertionError without kernels for the dtype of `x`. Autograd does not see this.
    """
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    slope = torch.empty_like(y) if keeps_slope else None
    need_kernels(x).run("gelu_forward", x.dtype, x, bias, y, slope, *x.shape)
    return y, slope


def times_slope(grad: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return `grad * slope`, (rows, columns) in their dtype, and the sums of its columns, (columns,) fp32.
    AssertionError without kernels for that dtype. Autograd does not see this.
    """
    dx, sums = torch.empty_like(slope), torch.zeros(slope.shape[1], dtype=torch.float32)
    need_kernels(slope).run("gelu_backward", slope.dtype, grad.contiguous(), slope, dx, sums, *slope.shape)
    return dx, sums


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        # Forward has the exponential at hand that the slope needs, too.
        y, slope = gelu_and_slope(x, bias, any(ctx.needs_input_grad))
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        dx, dbias = times_slope(grad, *ctx.saved_tensors)
        return dx, dbias.to(grad.dtype)


_gelu: Callable[..., Tensor] = _Gelu.apply


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return the exact GELU (with erf) of `x + bias` in the dtype of `x`, fp32 or bf16: (rows, columns) and (columns,).

    The kernels keep the slope for backward. Before value and slope are rounded to the dtype of `x`, their absolute
    error is 2e-7, and with bf16 on CPUs with AVX-512 at most 5e-5.
    """
    if kernels_for(x, bias):
        return _gelu(x, bias)
    return functional.gelu(x + bias)


GATES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""The activations that `glu` knows, by their name in config.json (hidden_act or hidden_activation)."""
_PLAIN_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""In the order of the kernels' numbers."""


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: int, kernels: Kernels) -> Tensor:
        x = x.contiguous()
        rows, columns = x.shape[0], x.shape[1] // 2
        y = torch.empty(rows, columns, dtype=x.dtype)
        kernels.run("glu_forward", x.dtype, x, y, rows, columns, gate)
        ctx.save_for_backward(x)
        ctx.gate, ctx.kernels = gate, kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.kernels.run("glu_backward", x.dtype, grad.contiguous(), x, dx, *grad.shape, ctx.gate)
        return dx, None, None


_glu: Callable[..., Tensor] = _Glu.apply


def glu(x: Tensor, kind: str) -> Tensor:
    """Return the gated linear unit `activation(x[:, :inner]) * x[:, inner:]`: (rows, 2 * inner) -> (rows, inner).

    The result has the dtype of `x`, fp32 or bf16. With the kernels, which round it once, backward keeps nothing but
    `x`. `kind` is silu, gelu (with erf) or gelu_tanh; `GATES` translates the names of transformers. Raises KeyError for
    another one.
    """
    activation = _PLAIN_GATES[kind]
    if kernels := kernels_for(x):
        return _glu(x, list(_PLAIN_GATES).index(kind), kernels)
    first, second = x.chunk(2, 1)
    return activation(first) * second


@dataclass(frozen=True)
class Norm:
    """The norm of a row: layer norm or RMSNorm, over the last dimension, with statistics in fp32."""

    weight: Tensor | None
    """(columns,), a parameter of the model, fp32 unless the whole model has been converted; None for ones."""
    bias: Tensor | None
    """(columns,), likewise; None for zeros."""
    eps: float
    """Added to the variance, or to the mean square."""
    is_centred: bool
    """Whether this is layer norm, which subtracts the mean; otherwise it is RMSNorm."""
    weight_offset: float = 0.0
    """Added to `weight` before multiplying: 1 in Gemma 3, whose weights begin at 0."""

    @property
    def scale(self) -> Tensor | None:
        """(columns,) fp32, contiguous: by what normed rows are multiplied, without a gradient; None for ones."""
        if self.weight is None:
            return None
        weight = self.weight.detach().float()  # the kernels read fp32
        return weight + self.weight_offset if self.weight_offset else weight.contiguous()

    @property
    def shift(self) -> Tensor | None:
        """(columns,) fp32, contiguous: what is added to normed rows, without a gradient; None for zeros."""
        return None if self.bias is None else self.bias.detach().float().contiguous()


_RMS_NORMS = ("LlamaRMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm", "EuroBertRMSNorm")


def read_norm(module: nn.Module | None) -> Norm | None:
    """Return the norm of a torch.nn.LayerNorm over one dimension, or of the RMSNorm of Llama, Qwen3, SmolLM3, EuroBERT
    or Gemma 3 in transformers; None for other modules and None.
    """
    kind: Any = type(module)
    parameters: Any = module
    if kind is nn.LayerNorm:
        one = len(parameters.normalized_shape) == 1
        return Norm(parameters.weight, parameters.bias, parameters.eps, is_centred=True) if one else None
    if not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__ in _RMS_NORMS:
        return Norm(parameters.weight, None, parameters.variance_epsilon, is_centred=False)
    if kind.__name__ == "Gemma3RMSNorm":
        return Norm(parameters.weight, None, parameters.eps, is_centred=False, weight_offset=1.0)
    return None


def _plain_add_norm(x: Tensor, shift: Tensor | None, residual: Tensor | None, norm: Norm, mask: Mask) -> Any:
    total = x
    if residual is not None:
        total = residual + dropout(x if shift is None else x + shift, mask)
    weight = None if norm.weight is None else norm.weight.float() + norm.weight_offset
    bias, columns = None if norm.bias is None else norm.bias.float(), total.shape[-1:]
    if norm.is_centred:
        y = functional.layer_norm(total.float(), columns, weight, bias, norm.eps)
    else:
        y = functional.rms_norm(total.float(), columns, weight, norm.eps)
        y = y if bias is None else y + bias
    y = y.to(total.dtype)
    return dropout(y, mask) if residual is None else (total, y)


class _AddNorm(torch.autograd.Function):
    """(residual + dropout(x + shift), its norm); without residual, only the norm of x, and dropout after it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shift: Tensor | None,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        mask: Mask,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor] | Tensor:
        ctx.set_materialize_grads(False)
        ctx.mask, ctx.norm, ctx.kernels = mask, replace(norm, weight=None, bias=None), kernels
        x = total = x.contiguous()
        if residual is not None:
            residual, total = residual.contiguous(), torch.empty_like(x)
        y = torch.empty_like(x)
        rows, columns = x.shape[:-1].numel(), x.shape[-1]
        statistics = torch.empty(2, rows, dtype=torch.float32)
        mean, rstd = statistics[0] if norm.is_centred else None, statistics[1]
        arrays = (x, shift, residual, norm.scale, norm.shift, None if residual is None else total, y, mean, rstd)
        kernels.run("norm_forward", x.dtype, *arrays, rows, columns, *mask.kernel_arguments, norm.eps)
        ctx.save_for_backward(total, mean, rstd, weight)
        return y if residual is None else (total, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight = ctx.saved_tensors
        mask, (_, wants_shift, _, wants_weight, wants_bias, *_) = ctx.mask, ctx.needs_input_grad
        *dtotals, dy = grads
        dtotal = dtotals[0].contiguous() if dtotals and dtotals[0] is not None else None
        dweight = dbias = dshift = None
        if dy is None:
            assert dtotal is not None
            dresidual, dx = dtotal, masked(dtotal, mask)
            dshift = dx.flatten(0, -2).sum(0) if wants_shift else None
        else:
            dresidual = torch.empty_like(total)
            dx = torch.empty_like(total) if mask.threshold and dtotals else dresidual
            sums, wanted = torch.zeros(3, total.shape[-1]), (wants_weight, wants_bias, wants_shift)
            dweight, dbias, dshift = (one if wants else None for one, wants in zip(sums, wanted, strict=True))
            scale = replace(ctx.norm, weight=weight).scale
            arrays = (dy.contiguous(), dtotal, total, mean, rstd, scale, dx, dresidual, dweight, dbias, dshift)
            sizes = (rstd.numel(), total.shape[-1])
            ctx.kernels.run("norm_backward", total.dtype, *arrays, *sizes, *mask.kernel_arguments)
            dshift = None if dshift is None else dshift.to(total.dtype)
        return dx, dshift, dresidual if dtotals else None, dweight, dbias, None, None, None


_add_norm: Callable[..., Any] = _AddNorm.apply


def _run_add_norm(x: Tensor, shift: Tensor | None, residual: Tensor | None, norm: Norm, mask: Mask) -> Any:
    if kernels := kernels_for(*(t for t in (x, shift, residual) if t is not None)):
        return _add_norm(x, shift, residual, norm.weight, norm.bias, norm, mask, kernels)
    return _plain_add_norm(x, shift, residual, norm, mask)


def dropout_add_norm(x: Tensor, shift: Tensor, residual: Tensor, norm: nn.LayerNorm, mask: Mask) -> Tensor:
    """Return `norm(residual + dropout(x + shift))`, in the shape and dtype of `x`: the end of both halves of a layer.

    `x` and `residual` are (..., hidden), of one dtype, fp32 or bf16. `shift`, (hidden,), is the bias of the linear
    layer before: adding it here is cheaper than in the product, and backward computes its gradient in the same pass.
    """
    normed: Tensor = _run_add_norm(x, shift, residual, Norm(norm.weight, norm.bias, norm.eps, True), mask)[1]
    return normed


def add_norm(x: Tensor, residual: Tensor, norm: Norm, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return `total = residual + dropout(x)` and `norm(total)`, in the shape and dtype of `x`: (..., hidden).

    In a layer whose norms come first, `total` is the residual stream, which flows on. bf16 rounds it once, and the norm
    is that of the rounded total. Both results may have gradients.
    """
    total, normed = _run_add_norm(x, None, residual, norm, mask)
    return total, normed


def apply_norm(x: Tensor, norm: Norm, mask: Mask = NO_MASK) -> Tensor:
    """Return dropout by `mask` of the norm of the rows of `x`, (..., hidden), fp32 or bf16, in its shape and dtype."""
    normed: Tensor = _run_add_norm(x, None, None, norm, mask)
    return normed
