"""The attention half of a layer for the first token of each example alone, which computes no keys and values.

The last layer of a classifier needs no other token. Its weights multiply a few rows for each example instead of two
for each token, see `first_token.h`, so that most of the layer's products are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpuft.kernels import Kernels, address_array, kernels_for, need_kernels
from cpuft.train.fast.architectures import LayerParts
from cpuft.train.fast.attention import Grid, bias_strides
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.elementwise import Mask
from cpuft.train.fast.gradient_places import make_gradient

_STEP = 32
"""The kernel needs sizes of heads that are multiples of this, and fills up the number of examples to one."""


@dataclass(frozen=True)
class _Half:
    kernels: Kernels
    grid: Grid
    bias: Tensor | None
    heads: int
    factor: float
    eps: float
    score_mask: Mask
    mask: Mask

    def run(self, name: str, x: Tensor, *rest: Tensor | None) -> None:
        """Run a kernel on these tensors, in the order of `FirstTokens` in first_token.h."""
        sizes = (x.shape[1], self.grid.batch, self.grid.length, self.heads, *bias_strides(self.bias))
        masks = (*self.score_mask.kernel_arguments, *self.mask.kernel_arguments)
        self.kernels.run(name, x.dtype, address_array((x, *rest)), *sizes, self.factor, self.eps, *masks)


class _FirstTokenHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, half: _Half, packed_weight: Tensor, packed_bias: Tensor, *parameters: Tensor
    ) -> Tensor:
        weight, bias, norm_weight, norm_bias = parameters[6:]
        batch, hidden = half.grid.batch, x.shape[1]
        few = -(-batch // _STEP) * _STEP
        first, query, context = (x.new_empty(few, hidden) for _ in range(3))
        total, y = (x.new_empty(batch, hidden) for _ in range(2))
        folded, mixed = (x.new_empty(few * half.heads + _STEP, hidden) for _ in range(2))
        probabilities, mass = torch.empty(batch * half.heads, half.grid.length), torch.empty(batch * half.heads)
        statistics = torch.empty(2, batch)
        given = (packed_weight, packed_bias, weight, bias, norm_weight, norm_bias, half.bias, half.grid.rows)
        kept = (first, query, context, folded, mixed, probabilities, mass, total)
        half.run("first_token_half_forward", x, *given, *kept, y, *statistics)
        ctx.half, ctx.projections = half, parameters[:3]
        ctx.save_for_backward(x, packed_weight, packed_bias, weight, norm_weight, *kept, statistics)
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, packed_weight, packed_bias, weight, norm_weight, *kept, statistics = ctx.saved_tensors
        first, folded, mass, hidden = kept[0], kept[3], kept[6], x.shape[1]
        dx, dpacked_weight = torch.empty_like(x), make_gradient(packed_weight, ctx.projections)
        dweight, dpacked_bias = make_gradient(weight, [weight]), torch.empty_like(packed_bias)
        dbias, dnorm = x.new_empty(hidden), torch.zeros(2, hidden)
        scratch = [torch.empty_like(one) for one in (*(first,) * 4, folded, folded, mass)]
        given = (x, packed_weight, packed_bias, weight, None, norm_weight, None, ctx.half.bias, ctx.half.grid.rows)
        made = (dx, dpacked_weight, dpacked_bias, dweight, dbias, *dnorm)
        ctx.half.run("first_token_half_backward", *given, *kept, None, *statistics, dy.contiguous(), *made, *scratch)
        own = (*torch.split(dpacked_weight, hidden), *torch.split(dpacked_bias, hidden))
        return dx, None, None, None, *own, dweight, dbias, *dnorm


_first_token_half: Callable[..., Tensor] = _FirstTokenHalf.apply


def can_run_first_token_half(parts: LayerParts, x: Tensor) -> bool:
    """Return whether `first_token_half` can compute this layer for `x`, (tokens, hidden).

    The caller has to check that the layout has nothing about distances.
    """
    heads, linears = parts.heads, (*parts.projections, parts.attention_output)
    if parts.int8 or parts.recomputes or parts.positions is not None:
        return False
    fits = heads.back < 0 and heads.ahead < 0 and heads.keys == heads.count
    fits = fits and heads.size % _STEP == 0 and heads.count * heads.size == x.shape[1]
    fits = fits and len(linears) == 4 and all(type(one) is nn.Linear for one in linears)
    return fits and kernels_for(x, parts.attention_output.weight) is not None


def first_token_half(
    parts: LayerParts, x: Tensor, grid: Grid, bias: Tensor | None, score_mask: Mask, mask: Mask
) -> Tensor:
    """Return `norm(x + dropout(attention(x)))` of each example's first token: (tokens, hidden) -> (batch, hidden).
    Arguments are those of `encoder_layer.attention_half`; `can_run_first_token_half` must hold.
    """
    norm, output, packed, heads = parts.attention_norm, parts.attention_output, parts.packed, parts.heads
    half = _Half(need_kernels(x), grid, bias, heads.count, heads.factor, norm.eps, score_mask, mask)
    weight, shift, parameters = packed.current()
    rest = (output.weight, output.bias, norm.weight.float(), norm.bias.float())  # the kernel reads fp32
    return _first_token_half(x.contiguous(), half, weight, shift, *parameters, *rest)
