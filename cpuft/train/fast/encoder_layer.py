"""Both halves of an encoder layer, each as one call of C++ in forward and one in backward, with no Python in between.

`encoder_layer.h` lists their steps, which `layers.run_layer` runs one by one for other layers. There are two halves so
that the gradients of the feed-forward half are sent to other hosts while those of the attention half are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpuft.kernels import Kernels, int64_array, kernels_for
from cpuft.train.fast.architectures import LayerParts
from cpuft.train.fast.attention import Grid, bias_strides
from cpuft.train.fast.elementwise import Mask, is_exact_gelu
from cpuft.train.fast.gradient_places import make_gradient
from cpuft.train.fast.products import can_multiply


@dataclass(frozen=True)
class _Attention:
    kernels: Kernels
    grid: Grid
    bias: Tensor | None
    heads: int
    factor: float
    eps: float
    score_mask: Mask
    mask: Mask

    def run(self, name: str, x: Tensor, addresses: list[int]) -> None:
        """Run a kernel on arrays at these addresses, in the order of `AttentionHalf` in encoder_layer.h."""
        strides = (0, 0, 0) if self.bias is None else bias_strides(self.bias)
        sizes = (self.grid.batch, self.grid.length, self.heads, *strides)
        masks = (*self.score_mask.kernel_arguments, *self.mask.kernel_arguments)
        _run(self.kernels, name, x, addresses, *sizes, self.factor, self.eps, *masks)


@dataclass(frozen=True)
class _FeedForward:
    kernels: Kernels
    columns: int
    """Outputs of its first linear layer."""
    eps: float
    mask: Mask

    def run(self, name: str, x: Tensor, addresses: list[int]) -> None:
        """Run a kernel on arrays at these addresses, in the order of `FeedForwardHalf` in encoder_layer.h."""
        _run(self.kernels, name, x, addresses, self.columns, self.eps, *self.mask.kernel_arguments)


def _run(kernels: Kernels, name: str, x: Tensor, addresses: list[int], *rest: int | float) -> None:
    """Run a kernel; `rest` follows the shape of the half's input `x`."""
    done = int64_array([0])
    kernels.run(name, torch.bfloat16, int64_array(addresses), done, *x.shape, *rest)
    if not done[0]:
        raise MemoryError("there is not enough memory for the buffers of a matrix product: give a smaller --batch-size")


def _find(*tensors: Tensor | None) -> list[int]:
    """Return the addresses of tensors, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


# A half has one block of memory for what it keeps and one for what backward needs meanwhile, because the cores wait
# while Python makes tensors.
def _make_block(x: Tensor, columns: int) -> Tensor:
    """Return memory for `columns` bf16 numbers per token."""
    return x.new_empty(len(x) * columns)


def _find_arrays(block: Tensor, x: Tensor, *columns: int) -> list[int]:
    """Return the addresses of arrays with so many bf16 numbers per token in a block, and that of what follows."""
    return list(accumulate((2 * len(x) * count for count in columns), initial=block.data_ptr()))


_STATISTICS = 4
"""The mean of each token and one over its standard deviation, both fp32, in bf16 numbers."""


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def find_kept(block: Tensor, x: Tensor) -> list[int]:
        """Return the addresses of what forward keeps: projections, context, the sum and its statistics."""
        hidden = x.shape[1]
        return _find_arrays(block, x, 3 * hidden, hidden, hidden, _STATISTICS // 2)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, half: _Attention, packed_weight: Tensor, packed_bias: Tensor, *parameters: Tensor
    ) -> Tensor:
        weight, _bias, norm_weight, _norm_bias = parameters[6:]
        block, y = _make_block(x, 5 * x.shape[1] + _STATISTICS), torch.empty_like(x)
        packed, context, total, *statistics = _AttentionHalf.find_kept(block, x)
        given = _find(x, packed_weight, packed_bias, *parameters[6:], half.bias, half.grid.rows)
        half.run("attention_half_forward", x, [*given, packed, context, total, y.data_ptr(), *statistics])
        ctx.half, ctx.projections = half, parameters[:3]
        ctx.save_for_backward(x, packed_weight, weight, norm_weight, block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, packed_weight, weight, norm_weight, block = ctx.saved_tensors
        half, hidden, dy = ctx.half, x.shape[1], dy.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dpacked_weight, dweight = make_gradient(packed_weight, ctx.projections), make_gradient(weight, [weight])
        dbiases, dnorm = x.new_empty(4 * hidden), torch.zeros(2, hidden)
        packed, context, total, *statistics = _AttentionHalf.find_kept(block, x)
        scratch = _make_block(x, 6 * hidden)
        given = _find(x, packed_weight, None, weight, None, norm_weight, None, half.bias, half.grid.rows)
        made = [*_find(dx, dpacked_weight, dbiases, dweight), dbiases.data_ptr() + 6 * hidden, dnorm.data_ptr()]
        arrays = [dy.data_ptr(), *made, made[-1] + 4 * hidden, *_find_arrays(scratch, x, hidden, hidden, hidden)]
        half.run("attention_half_backward", x, [*given, packed, context, total, 0, *statistics, *arrays])
        *packed_biases, dbias = torch.split(dbiases, hidden)
        own = (*torch.split(dpacked_weight, hidden), *packed_biases)
        return dx, None, None, None, *own, dweight, dbias, *dnorm.unbind()


class _FeedForwardHalf(torch.autograd.Function):
    @staticmethod
    def find_kept(block: Tensor, x: Tensor, columns: int) -> list[int]:
        """Return the addresses of what forward keeps: inner activations, their slope, the sum and its statistics."""
        return _find_arrays(block, x, columns, columns, x.shape[1], _STATISTICS // 2)

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: _FeedForward, *parameters: Tensor) -> Tensor:
        inner_weight, inner_bias, weight, _bias, norm_weight, _norm_bias = parameters
        block, y = _make_block(x, 2 * half.columns + x.shape[1] + _STATISTICS), torch.empty_like(x)
        inner, slope, total, *statistics = _FeedForwardHalf.find_kept(block, x, half.columns)
        arrays = [*_find(x, *parameters), inner, slope, total, y.data_ptr(), *statistics]
        half.run("feed_forward_half_forward", x, arrays)
        ctx.half = half
        ctx.save_for_backward(x, inner_weight, inner_bias, weight, norm_weight, block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, inner_weight, inner_bias, weight, norm_weight, block = ctx.saved_tensors
        half, hidden, dy = ctx.half, x.shape[1], dy.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dinner_weight, dinner_bias, dweight = (make_gradient(one, [one]) for one in (inner_weight, inner_bias, weight))
        dbias, dnorm = x.new_empty(hidden), torch.zeros(2, hidden)
        inner, slope, total, *statistics = _FeedForwardHalf.find_kept(block, x, half.columns)
        scratch = _make_block(x, 2 * hidden + half.columns)
        given = [*_find(x, inner_weight, None, weight, None, norm_weight, None), inner, slope, total, 0, *statistics]
        made = _find(dy, dx, dinner_weight, dinner_bias, dweight, dbias, dnorm)
        arrays = [*given, *made, made[-1] + 4 * hidden, *_find_arrays(scratch, x, hidden, hidden)]
        half.run("feed_forward_half_backward", x, arrays)
        return dx, None, dinner_weight, dinner_bias, dweight, dbias, *dnorm.unbind()


_attention_half: Callable[..., Tensor] = _AttentionHalf.apply
_feed_forward_half: Callable[..., Tensor] = _FeedForwardHalf.apply


def can_run_halves(parts: LayerParts, x: Tensor, few: bool = False) -> bool:
    """Return whether `attention_half` and `feed_forward_half` can compute this layer for `x`, (tokens, hidden).

    The caller has to check that the layout has no bias by distance. `few`: `x` has one row for each example.
    """
    if parts.int8 or parts.recomputes or not torch.is_grad_enabled() or not can_multiply(x, parts.inner[0].weight, few):
        return False
    heads, linears = parts.heads, (*parts.projections, parts.attention_output, *parts.inner, parts.outer)
    is_simple = heads.back < 0 and heads.ahead < 0 and heads.keys == heads.count and parts.positions is None
    is_simple = is_simple and heads.count * heads.size == x.shape[1] and is_exact_gelu(parts.activation)
    is_simple = is_simple and all(type(one) is nn.Linear for one in linears)
    modules = (*linears, parts.attention_norm, parts.outer_norm)
    # Attributes of a module take ten times as long, and this is asked for each layer of each batch.
    return is_simple and all(one.requires_grad for module in modules for one in module._parameters.values())


def attention_half(
    parts: LayerParts, x: Tensor, grid: Grid, bias: Tensor | None, score_mask: Mask, mask: Mask
) -> Tensor:
    """Return `norm(x + dropout(attention(x)))` of a layer for which `can_run_halves` holds: (tokens, hidden), bf16.

    `grid` and `bias` are those of `attention.attention`, `score_mask` is the dropout of its probabilities, and `mask`
    that of the output of the linear layer after attention. Raises MemoryError: there is not enough for the buffers of a
    product.
    """
    norm, output, packed, heads = parts.attention_norm, parts.attention_output, parts.packed, parts.heads
    kernels = kernels_for(x)
    assert packed is not None
    assert kernels is not None
    half = _Attention(kernels, grid, bias, heads.count, heads.factor, norm.eps, score_mask, mask)
    packed_weight, packed_bias, parameters = packed.current()
    rest = (output.weight, output.bias, norm.weight.float(), norm.bias.float())  # the kernel reads fp32
    return _attention_half(x.contiguous(), half, packed_weight, packed_bias, *parameters, *rest)


def feed_forward_half(parts: LayerParts, x: Tensor, mask: Mask) -> Tensor:
    """Return `norm(x + dropout(feed_forward(x)))` of a layer for which `can_run_halves` holds: (tokens, hidden), bf16.
    Raises as `attention_half`.
    """
    (inner,), outer, norm = parts.inner, parts.outer, parts.outer_norm
    kernels = kernels_for(x)
    assert kernels is not None
    half = _FeedForward(kernels, len(inner.weight), norm.eps, mask)
    norm_parameters = (norm.weight.float(), norm.bias.float())  # the kernel reads fp32
    parameters = (inner.weight, inner.bias, outer.weight, outer.bias, *norm_parameters)
    return _feed_forward_half(x.contiguous(), half, *parameters)
