"""Softmax attention with dropout on the probabilities, from packed projections to the context, backward by hand.

torch's flash kernel on the CPU refuses dropout, and its math path makes a dozen passes over the scores. Here the
products are oneDNN's batched ones and everything between them is one pass over the scores each way.

Scores of long rows are computed some rows at a time: blocks of hundreds of megabytes leave holes in malloc's heap that
the next ones do not fit into, and its peak is twice what is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpuft.train.fast.again import Turn
from cpuft.train.fast.dropout import Mask, masked
from cpuft.train.fast.kernels import kernels_for

_BLOCK = 32 << 20
"""Bytes of scores that are worth a block of their own: products of that size keep many cores busy."""
_CACHED = 4 << 20
"""Such bytes a thread, where scores are not kept: they stay in its core's cache, and take two thirds of the time."""


@dataclass(frozen=True)
class Heads:
    """How attention is cut into heads, and the factor its scores are multiplied by (1 / sqrt(head size))."""

    count: int
    size: int
    factor: float


@dataclass(frozen=True)
class Grid:
    """Which row of the tokens' matrix stands at which of batch * length places."""

    batch: int
    length: int
    places: Tensor | None = None
    """(tokens,) int64, rising: the place of each row. None: every place has its row, in order."""
    rows: Tensor | None = None
    """(batch * length,) int64: the row of each place, -1 where there is none. None with `places`."""

    @staticmethod
    def of(batch: int, length: int, places: Tensor | None) -> Grid:
        """The grid in which row i stands at `places[i]`."""
        if places is None:
            return Grid(batch, length)
        rows = torch.full((batch * length,), -1).index_copy_(0, places, torch.arange(places.numel()))
        return Grid(batch, length, places, rows)

    @property
    def tokens(self) -> int:
        """How many rows there are."""
        return self.batch * self.length if self.places is None else self.places.numel()


def split_heads(x: Tensor, parts: int, heads: Heads, grid: Grid) -> Tensor:
    """(tokens, parts * heads * size) -> (parts, batch * heads, length, size), zero where there is no token."""
    if kernels := kernels_for(x):
        made = x.new_empty(parts, grid.batch * heads.count, grid.length, heads.size)
        sizes = (parts, grid.batch, heads.count, grid.length, heads.size)
        kernels.run("split_heads", x.dtype, x.contiguous(), grid.rows, made, *sizes)
        return made
    if grid.places is not None:
        x = x.new_zeros(grid.batch * grid.length, x.shape[-1]).index_copy(0, grid.places, x)
    cut = x.view(grid.batch, grid.length, parts, heads.count, heads.size).permute(2, 0, 3, 1, 4)
    return cut.reshape(parts, -1, grid.length, heads.size)


def join_heads(x: Tensor, heads: Heads, grid: Grid) -> Tensor:
    """The reverse of `split_heads`: (parts, batch * heads, length, size) -> (tokens, parts * heads * size)."""
    parts = x.shape[0]
    if kernels := kernels_for(x):
        made = x.new_empty(grid.tokens, parts * heads.count * heads.size)
        sizes = (parts, grid.batch, heads.count, grid.length, heads.size)
        kernels.run("join_heads", x.dtype, x.contiguous(), grid.rows, made, *sizes)
        return made
    cut = x.view(parts, grid.batch, heads.count, grid.length, heads.size).permute(1, 3, 0, 2, 4)
    joined = cut.reshape(grid.batch * grid.length, parts * heads.count * heads.size)
    return joined if grid.places is None else joined.index_select(0, grid.places)


def cut(batch: int, each: int, size: int, most: int = _BLOCK) -> list[slice]:
    """Parts of a batch whose rows have `each` scores of `size` bytes; each begins at a multiple of four scores."""
    step = 4 if each % 4 else 1
    rows = max(1, most // (each * size * step)) * step
    return [slice(start, min(start + rows, batch)) for start in range(0, batch, rows)]


def _softmax(scores: Tensor, bias: Tensor | None, heads: Heads, mask: Mask) -> tuple[Tensor, Tensor]:
    """Probabilities, written over `scores` or not, and dropped ones, both shaped as these; one tensor twice without
    dropout."""
    rows, queries, keys = scores.shape
    batch = rows // heads.count
    if kernels := kernels_for(scores):
        probs = scores  # a row is read before it is written
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


def _cut_heads(q: Tensor, k: Tensor, heads: Heads, turn: Turn) -> list[slice]:
    """Blocks of `q` and `k`, (batch * heads, length, size), whose scores are computed at a time."""
    each = heads.count * q.shape[1] * k.shape[1]
    most = _BLOCK if turn is Turn.ONLY else min(_BLOCK, torch.get_num_threads() * _CACHED)
    blocks = cut(len(q) // heads.count, each, q.element_size(), most)
    return [slice(rows.start * heads.count, rows.stop * heads.count) for rows in blocks]


def _look(q: Tensor, k: Tensor, bias: Tensor | None, heads: Heads, mask: Mask, part: slice) -> tuple[Tensor, Tensor]:
    """A block's probabilities, and dropped ones."""
    if bias is not None and bias.shape[0] > 1:
        bias = bias[part.start // heads.count : part.stop // heads.count]
    scores = torch.bmm(q[part], k[part].transpose(1, 2))
    return _softmax(scores, bias, heads, mask.after(part.start * scores[0].numel()))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor | None,
        packed: Tensor,
        bias: Tensor | None,
        heads: Heads,
        mask: Mask,
        grid: Grid,
        turn: Turn,
    ) -> Tensor:
        if query is None:
            q, k, v = split_heads(packed, 3, heads, grid)
            ctx.queries = grid
        else:
            ctx.queries = Grid(grid.batch, query.shape[0] // grid.batch)
            (q,), (k, v) = split_heads(query, 1, heads, ctx.queries), split_heads(packed, 2, heads, grid)
        ctx.heads, ctx.mask, ctx.grid, ctx.separate, ctx.bias = heads, mask, grid, query is not None, bias
        kept: list[Tensor] = []
        if turn is Turn.AGAIN:
            ctx.save_for_backward(q, k, v)
            shape: Tensor = q.new_empty(ctx.queries.tokens, heads.count * heads.size)
            return shape
        context = torch.empty_like(q)
        for part in _cut_heads(q, k, heads, turn):
            probs, dropped = _look(q, k, bias, heads, mask, part)
            torch.bmm(dropped, v[part], out=context[part])
            kept += [probs, dropped] if turn is Turn.ONLY else []
        ctx.save_for_backward(q, k, v, *kept)
        return join_heads(context.unsqueeze(0), heads, ctx.queries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        heads: Heads = ctx.heads
        grad = split_heads(grad, 1, heads, ctx.queries)[0]
        made = k.new_empty(2 if ctx.separate else 3, *k.shape)
        dquery, pairs = torch.empty_like(q) if ctx.separate else made[0], zip(kept[::2], kept[1::2])
        for part in _cut_heads(q, k, heads, Turn.ONLY if kept else Turn.AGAIN):
            probs, dropped = next(pairs) if kept else _look(q, k, ctx.bias, heads, ctx.mask, part)
            mask, wanted = ctx.mask.after(part.start * probs[0].numel()), torch.bmm(grad[part], v[part].transpose(1, 2))
            dscores = _softmax_backward(probs, dropped, wanted, heads, mask)
            torch.bmm(dropped.transpose(1, 2), grad[part], out=made[-1][part])
            torch.bmm(dscores.transpose(1, 2), q[part], out=made[-2][part])
            torch.bmm(dscores, k[part], out=dquery[part])
        separate = join_heads(dquery.unsqueeze(0), heads, ctx.queries) if ctx.separate else None
        return separate, join_heads(made, heads, ctx.grid), None, None, None, None, None


_attention: Callable[..., Tensor] = _Attention.apply


def attention(
    query: Tensor | None,
    packed: Tensor,
    bias: Tensor | None,
    heads: Heads,
    mask: Mask,
    grid: Grid,
    turn: Turn = Turn.ONLY,
) -> Tensor:
    """softmax(factor * query key^T + bias), dropped out, times value.

    Parameters
    ----------
    query: (batch * queries, heads * size), bf16 or fp32; None when `packed` holds it.
    packed: (tokens, 3 * heads * size), query, key and value side by side; without the query, 2 for 3.
    bias: fp32, (batch or 1, heads or 1, queries or 1, length), keys next to each other, no gradient. None: no mask.
        Places of the grid without a token have zero keys and values: the bias has to shut them out.
    grid: where the rows of `packed`, and of the query in it, stand.
    turn: of a part that ends with this. Of two, scores are computed once more in backward, a block at a time.

    Returns
    -------
    The context, a row for each query. Softmax is fp32 inside, rounded to the dtype once.
    """
    return _attention(query, packed, bias, heads, mask, grid, turn)


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
