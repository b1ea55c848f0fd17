"""Rotary position embedding of queries and keys, with the norms that some models have before it, in one pass.

The rotation is the one that transformers computes with `rotate_half`: number j of a head turns together with number
half + j, by an angle that depends on j and on the position (Su et al. 2021, "RoFormer").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpuft.kernels import Kernels, kernels_for
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import split_packed
from cpuft.train.fast.elementwise import Norm


@dataclass(frozen=True)
class Angles:
    """The rotation of each row of queries and keys; of the two equal halves that transformers has, this is one."""

    cos: Tensor
    """(tokens, half) fp32: cosines, times the scaling of attention if the model has one."""
    sin: Tensor
    """(tokens, half) fp32: sines, likewise."""


HeadNorms = Sequence[Norm | None]
"""The two norms of each head of queries and of keys before rotation: RMSNorm without bias, whose weight, (size,), all
heads share; None for no norm."""


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        angles: Angles | None,
        norms: HeadNorms,
        heads: Heads,
        overwrites: bool,
        kernels: Kernels,
    ) -> Tensor:
        if overwrites:
            ctx.mark_dirty(packed)
        cos, sin = (None, None) if angles is None else (angles.cos.contiguous(), angles.sin.contiguous())
        half = 0 if cos is None else cos.shape[1]
        sizes = (len(packed), heads.count, heads.keys, heads.keys * heads.size, heads.size, half)
        # A negative eps tells the kernel that there is no norm.
        ctx.rest = (*sizes, *(-1.0 if norm is None else norm.eps for norm in norms))
        scales = [None if norm is None else norm.scale for norm in norms]
        y = packed if overwrites else torch.empty_like(packed)
        kernels.run("rotate_forward", packed.dtype, packed, cos, sin, *scales, y, *ctx.rest)
        ctx.save_for_backward(packed if any(norms) and not overwrites else None, cos, sin, *scales)
        ctx.kernels = kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, cos, sin, *scales = ctx.saved_tensors
        grad = grad.contiguous()
        dpacked, size = torch.empty_like(grad), ctx.rest[4]
        _, *wanted = ctx.needs_input_grad[:3]
        dweights = [torch.zeros(size) if wants else None for wants in wanted]
        arrays = (grad, packed, cos, sin, *scales, dpacked, *dweights)
        ctx.kernels.run("rotate_backward", grad.dtype, *arrays, *ctx.rest)
        return dpacked, *dweights, None, None, None, None, None


_rotate: Callable[..., Tensor] = _Rotate.apply


def _plain_heads(x: Tensor, angles: Angles | None, norm: Norm | None, size: int) -> Tensor:
    heads = x.view(len(x), -1, size).float()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + norm.eps)
        heads = heads if norm.weight is None else heads * (norm.weight + norm.weight_offset)
    if angles is not None:
        half = angles.cos.shape[1]
        first, second = heads[..., :half], heads[..., half : 2 * half]
        cos, sin = angles.cos[:, None], angles.sin[:, None]
        turned = (first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :])
        heads = torch.cat(turned, -1)
    return heads.to(x.dtype).view(x.shape)


def _may_overwrite(packed: Tensor, norms: HeadNorms) -> bool:
    """Whether nothing needs the old values: backward needs them for norms, and autograd protects leaves and views."""
    if packed._is_view() or (packed.is_leaf and packed.requires_grad):
        return False
    weights = [norm.weight for norm in norms if norm and norm.weight is not None]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (packed, *weights))
    return not trains or not any(norms)


def rotate(packed: Tensor, angles: Angles | None, heads: Heads, norms: HeadNorms) -> Tensor:
    """Return queries, keys and values side by side, the queries and keys normed and then rotated, the values unchanged;
    without angles and norms, `packed` itself.

    `packed` is (tokens, (count + 2 * keys) * size), fp32 or bf16. The result has its shape and dtype, and may have its
    memory: use `packed` no more, unless it is a leaf that requires a gradient. `angles` have at most size / 2 columns;
    numbers of a head from 2 * half on do not turn. Values are computed in fp32 and rounded once. Gradients go to
    `packed` and to the weights of the norms, not to the angles.
    """
    if angles is None and not any(norms):
        return packed
    if kernels := kernels_for(packed):
        packed = packed.contiguous()
        weights = [None if norm is None else norm.weight for norm in norms]
        return _rotate(packed, *weights, angles, norms, heads, _may_overwrite(packed, norms), kernels)
    *turned, values = split_packed(None, packed, heads)
    turned = [_plain_heads(x, angles, norm, heads.size) for x, norm in zip(turned, norms, strict=True)]
    return torch.cat([*turned, values], 1)
