"""Softmax attention with dropout on the probabilities, from packed projections to the context, backward by hand.

torch's flash kernel on the CPU refuses dropout, and its math path makes a dozen passes over the scores. Here the
products are oneDNN's batched ones and everything between them is one pass over the scores each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpuft.train.fast.dropout import Mask, masked
from cpuft.train.fast.kernels import kernels_for


@dataclass(frozen=True)
class Heads:
    """How attention is cut into heads, and the factor its scores are multiplied by (1 / sqrt(head size))."""

    count: int
    size: int
    factor: float


def _split(x: Tensor, parts: int, heads: Heads) -> Tensor:
    """(batch, tokens, parts * heads * size) -> (parts, batch * heads, tokens, size): what batched products want."""
    batch, tokens, _ = x.shape
    cut = x.view(batch, tokens, parts, heads.count, heads.size).permute(2, 0, 3, 1, 4)
    return cut.reshape(parts, batch * heads.count, tokens, heads.size)


def _join(x: Tensor, heads: Heads) -> Tensor:
    """The reverse of `_split`."""
    parts, _, tokens, size = x.shape
    cut = x.view(parts, -1, heads.count, tokens, size).permute(1, 3, 0, 2, 4)
    return cut.reshape(-1, tokens, parts * heads.count * size)


def _softmax(scores: Tensor, bias: Tensor | None, heads: Heads, mask: Mask) -> tuple[Tensor, Tensor]:
    """Probabilities and dropped probabilities, both shaped as `scores`; one tensor twice without dropout."""
    rows, queries, keys = scores.shape
    batch = rows // heads.count
    if kernels := kernels_for(scores):
        probs = torch.empty_like(scores)
        dropped = torch.empty_like(scores) if mask.threshold else probs
        strides = (0, 0, 0) if bias is None else _strides(bias)
        sizes = (batch, heads.count, queries, keys)
        arrays = (scores, bias, probs, dropped)
        kernels.run("softmax_forward", scores.dtype, *arrays, *sizes, *strides, heads.factor, *mask.kernel_arguments)
        return probs, dropped
    weighted = scores.view(batch, heads.count, queries, keys).float() * heads.factor
    if bias is not None:
        weighted += bias
    probs = weighted.softmax(-1).to(scores.dtype).view_as(scores)
    return probs, masked(probs, mask)


def _strides(bias: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and query, with 0 where one row serves all."""
    batch, head, query = (0 if size == 1 else step for size, step in zip(bias.shape[:3], bias.stride(), strict=False))
    return batch, head, query


def _softmax_backward(probs: Tensor, dropped: Tensor, grad: Tensor, heads: Heads, mask: Mask) -> Tensor:
    """Gradient of the unscaled scores; writes over `grad`, the gradient of the dropped probabilities."""
    if kernels := kernels_for(probs, grad):
        rows, keys = probs.shape[:-1].numel(), probs.shape[-1]
        kernels.run("softmax_backward", probs.dtype, probs, dropped, grad, rows, keys, heads.factor, mask.scale)
        return grad
    kept = masked(grad, mask).float()
    total = (probs * kept).sum(-1, keepdim=True)
    return (probs * (kept - total) * heads.factor).to(grad.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor | None, packed: Tensor, bias: Tensor | None, heads: Heads, mask: Mask
    ) -> Tensor:
        if query is None:
            q, k, v = _split(packed, 3, heads)
        else:
            (q,), (k, v) = _split(query, 1, heads), _split(packed, 2, heads)
        probs, dropped = _softmax(torch.bmm(q, k.transpose(1, 2)), bias, heads, mask)
        ctx.heads, ctx.mask, ctx.separate = heads, mask, query is not None
        ctx.save_for_backward(q, k, v, probs, dropped)
        return _join(torch.bmm(dropped, v).unsqueeze(0), heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probs, dropped = ctx.saved_tensors
        heads: Heads = ctx.heads
        grad = _split(grad, 1, heads)[0]
        dscores = _softmax_backward(probs, dropped, torch.bmm(grad, v.transpose(1, 2)), heads, ctx.mask)
        made = k.new_empty(2 if ctx.separate else 3, *k.shape)
        torch.bmm(dropped.transpose(1, 2), grad, out=made[-1])
        torch.bmm(dscores.transpose(1, 2), q, out=made[-2])
        dquery = torch.bmm(dscores, k) if ctx.separate else torch.bmm(dscores, k, out=made[0])
        separate = _join(dquery.unsqueeze(0), heads) if ctx.separate else None
        return separate, _join(made, heads), None, None, None


def attention(query: Tensor | None, packed: Tensor, bias: Tensor | None, heads: Heads, mask: Mask) -> Tensor:
    """softmax(factor * query key^T + bias), dropped out, times value.

    Parameters
    ----------
    query: (batch, queries, heads * size), bf16 or fp32; None when `packed` holds it.
    packed: (batch, tokens, 3 * heads * size), query, key and value side by side; without the query, 2 for 3.
    bias: fp32, (batch or 1, heads or 1, queries or 1, tokens), tokens next to each other, no gradient. None: no mask.

    Returns
    -------
    The context, (batch, queries, heads * size). Softmax is fp32 inside, rounded to the dtype once.
    """
    result: Tensor = _Attention.apply(query, packed, bias, heads, mask)  # type: ignore[no-untyped-call]
    return result


def mask_bias(mask: Tensor | None) -> Tensor | None:
    """What transformers passes its layers as attention mask, as `attention` takes it.

    True means look here for a bool mask; a float mask is added already. A mask expanded over queries is cut to one
    row. fp32's lowest number shuts out, as transformers does, so that a row with nothing to see is no NaN.
    """
    if mask is None:
        return None
    if mask.stride(2) == 0:
        mask = mask[:, :, :1]
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return mask.float().clamp_min(torch.finfo(torch.float32).min).contiguous()
