"""Softmax attention with dropout on the probabilities, from packed projections to the context, backward by hand.

torch's flash kernel on the CPU refuses dropout, and its math path makes a dozen passes over the scores. Here a kernel
takes a head at a time, products and all: scores never leave the core's cache, and backward computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpuft.train.fast.elementwise import Mask, masked
from cpuft.train.fast.gradient_checkpointing import Turn
from cpuft.train.fast.kernels import kernels_for


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


@dataclass(frozen=True)
class _Look:
    """All that decides what the queries see, but for the numbers themselves."""

    bias: Tensor | None
    heads: Heads
    mask: Mask
    keys: Grid
    queries: Grid

    def numbers(self, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        """What the kernels take after their arrays of tokens, of which these are two."""
        bias, heads, keys = self.bias, self.heads, self.keys
        sizes = (keys.batch, heads.count, self.queries.length, keys.length, heads.size)
        strides = (query.stride(0), key.stride(0), *((0, 0, 0) if bias is None else _strides(bias)))
        return bias, self.queries.rows, keys.rows, *sizes, *strides, heads.factor, *self.mask.kernel_arguments


def _strides(bias: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and query, with 0 where one row serves all."""
    batch, head, query = (0 if size == 1 else step for size, step in zip(bias.shape[:3], bias.stride(), strict=False))
    return batch, head, query


def _parts(query: Tensor | None, packed: Tensor, heads: Heads) -> Sequence[Tensor]:
    """Views of the queries, keys and values in them, (tokens, heads * size)."""
    parts = packed.chunk(packed.shape[1] // (heads.count * heads.size), 1)
    return parts if query is None else (query, *parts)


def _split_heads(x: Tensor, heads: Heads, grid: Grid) -> Tensor:
    """(tokens, heads * size) -> (batch * heads, length, size), zero where there is no token."""
    if grid.places is not None:
        x = x.new_zeros(grid.batch * grid.length, x.shape[-1]).index_copy(0, grid.places, x)
    return x.view(grid.batch, grid.length, heads.count, heads.size).transpose(1, 2).flatten(0, 1)


def _join_heads(x: Tensor, heads: Heads, grid: Grid) -> Tensor:
    """The reverse of `_split_heads`."""
    joined = x.view(grid.batch, heads.count, grid.length, heads.size).transpose(1, 2).flatten(2).flatten(0, 1)
    return joined if grid.places is None else joined.index_select(0, grid.places)


def _probabilities(q: Tensor, k: Tensor, look: _Look) -> Tensor:
    """(batch * heads, queries, keys), from split heads."""
    scores = torch.bmm(q, k.transpose(1, 2))
    weighted = scores.view(look.keys.batch, look.heads.count, *scores.shape[1:]).float() * look.heads.factor
    if look.bias is not None:
        weighted += look.bias
    return weighted.softmax(-1).to(scores.dtype).view_as(scores)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, look: _Look) -> Tensor:
    split = [_split_heads(x, look.heads, grid) for x, grid in zip((q, k, v), (look.queries, look.keys, look.keys))]
    dropped = masked(_probabilities(split[0], split[1], look), look.mask)
    return _join_heads(torch.bmm(dropped, split[2]), look.heads, look.queries)


def _plain_backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, look: _Look) -> list[Tensor]:
    q, grad = (_split_heads(x, look.heads, look.queries) for x in (q, grad))
    k, v = (_split_heads(x, look.heads, look.keys) for x in (k, v))
    probs = _probabilities(q, k, look)
    kept = masked(torch.bmm(grad, v.transpose(1, 2)), look.mask).float()
    total = (probs * kept).sum(-1, keepdim=True)
    slopes = (probs * (kept - total) * look.heads.factor).to(grad.dtype)
    dropped = masked(probs, look.mask)
    found = torch.bmm(slopes, k), torch.bmm(slopes.transpose(1, 2), q), torch.bmm(dropped.transpose(1, 2), grad)
    return [_join_heads(x, look.heads, grid) for x, grid in zip(found, (look.queries, look.keys, look.keys))]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor | None, packed: Tensor, look: _Look, turn: Turn) -> Tensor:
        ctx.look = look
        ctx.save_for_backward(query, packed)
        q, k, v = _parts(query, packed, look.heads)
        context = torch.empty(q.shape, dtype=q.dtype)
        if turn is Turn.AGAIN:
            return context
        if not (kernels := kernels_for(packed)):
            return _plain_forward(q, k, v, look)
        kernels.run("attention_forward", q.dtype, q, k, v, context, *look.numbers(q, k))
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, packed = ctx.saved_tensors
        look: _Look = ctx.look
        q, k, v = _parts(query, packed, look.heads)
        dquery, dpacked, grad = (
            None if query is None else torch.empty_like(query),
            torch.empty_like(packed),
            grad.contiguous(),
        )
        found = _parts(dquery, dpacked, look.heads)
        if kernels := kernels_for(packed, grad):
            kernels.run("attention_backward", q.dtype, q, k, v, grad, *found, *look.numbers(q, k))
        else:
            for to, part in zip(found, _plain_backward(q, k, v, grad, look), strict=True):
                to.copy_(part)
        return dquery, dpacked, None, None


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
    turn: of a part that ends with this.

    Returns
    -------
    The context, a row for each query. Softmax is fp32 inside, rounded to the dtype once.
    """
    queries = grid if query is None else Grid(grid.batch, query.shape[0] // grid.batch)
    given = None if query is None else query.contiguous()
    return _attention(given, packed.contiguous(), _Look(bias, heads, mask, grid, queries), turn)


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
