"""Softmax attention with dropout on the probabilities, from packed projections to the context, with its own backward.

torch's flash attention on the CPU refuses dropout, and its plain form makes a dozen passes over the scores. The C++
kernel computes one head at a time with both products: scores never leave the core's cache, and backward recomputes
them. Keys outside of a query's window are skipped, so that the cost grows with the window and not with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpuft.kernels import kernels_for
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.elementwise import Mask, masked
from cpuft.train.fast.gradient_checkpointing import ForwardPass


@dataclass(frozen=True)
class Grid:
    """Which row of the (tokens, width) matrix stands at which of the batch * length positions of a batch."""

    batch: int
    length: int
    """Positions of each example; position p of example b has number b * length + p."""
    places: Tensor | None = None
    """(tokens,) int64, ascending: the position of each row. None: every position has its row, in order."""
    rows: Tensor | None = None
    """(batch * length,) int64: the row of each position, -1 where there is none. None together with `places`."""

    @staticmethod
    def of(batch: int, length: int, places: Tensor | None) -> Grid:
        """Return the grid in which row i stands at position `places[i]`; without places, each position has its row."""
        if places is None:
            return Grid(batch, length)
        rows = torch.full((batch * length,), -1).index_copy_(0, places, torch.arange(places.numel()))
        return Grid(batch, length, places, rows)

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return self.batch * self.length if self.places is None else self.places.numel()


@dataclass(frozen=True)
class _Arguments:
    bias: Tensor | None
    position_bias: Tensor | None
    heads: Heads
    mask: Mask
    keys: Grid
    queries: Grid

    def for_kernel(self, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        """The kernel's arguments after the position bias; the strides are those of these two arrays of tokens."""
        bias, heads, keys = self.bias, self.heads, self.keys
        sizes = (keys.batch, heads.count, heads.keys, self.queries.length, keys.length, heads.size)
        window = min(heads.back, keys.length), min(heads.ahead, keys.length)
        strides = (query.stride(0), key.stride(0), *((0, 0, 0) if bias is None else bias_strides(bias)))
        places = (self.queries.rows, keys.rows)
        return bias, self.position_bias, *places, *sizes, *window, *strides, heads.factor, *self.mask.kernel_arguments

    def blank_position_grad(self) -> Tensor:
        return torch.zeros(self.keys.batch, self.heads.count, 2 * self.keys.length - 1)


def _distance_columns(queries: int, keys: int) -> Tensor:
    """(queries, keys) int64: the column of a position bias for each pair of a query and a key."""
    return torch.arange(keys) - torch.arange(queries)[:, None] + keys - 1


def bias_strides(bias: Tensor) -> tuple[int, int, int]:
    """Return the strides, in elements, of a bias of 4 dimensions by batch, head and query, 0 where the size is 1."""
    batch, head, query = (0 if size == 1 else step for size, step in zip(bias.shape[:3], bias.stride(), strict=False))
    return batch, head, query


def split_packed(query: Tensor | None, packed: Tensor, heads: Heads) -> Sequence[Tensor]:
    """Return views of queries, (tokens, count * size), keys and values, (tokens, keys * size) each: of `query` and
    `packed`, keys and values side by side, or for None of `packed` with all three.
    """
    queries, keys = heads.count * heads.size, heads.keys * heads.size
    return torch.split(packed, [queries, keys, keys], 1) if query is None else (query, *torch.split(packed, keys, 1))


def split_heads(x: Tensor, size: int, grid: Grid) -> Tensor:
    """Return the heads: (tokens, heads * size) -> (batch * heads, length, size), zero where there is no token."""
    if grid.places is not None:
        x = x.new_zeros(grid.batch * grid.length, x.shape[-1]).index_copy(0, grid.places, x)
    return x.view(grid.batch, grid.length, -1, size).transpose(1, 2).flatten(0, 1)


def _join_heads(x: Tensor, grid: Grid) -> Tensor:
    joined = x.view(grid.batch, -1, *x.shape[1:]).transpose(1, 2).flatten(2).flatten(0, 1)
    return joined if grid.places is None else joined.index_select(0, grid.places)


def _repeat_keys(x: Tensor, heads: Heads) -> Tensor:
    """(batch * key heads, length, size) -> (batch * heads, length, size): the keys or values of each query head."""
    return x if heads.keys == heads.count else x.repeat_interleave(heads.count // heads.keys, 0)


def _sum_groups(x: Tensor, heads: Heads) -> Tensor:
    return x if heads.keys == heads.count else x.view(-1, heads.count // heads.keys, *x.shape[1:]).sum(1)


def _hidden_keys(heads: Heads, queries: int, keys: int) -> Tensor | None:
    """(queries, keys) bool, true where a key is outside of a query's window; None if queries see all positions."""
    if heads.back < 0 and heads.ahead < 0:
        return None
    distances = torch.arange(keys) - torch.arange(queries)[:, None]
    hidden = torch.zeros_like(distances, dtype=torch.bool)
    if heads.back >= 0:
        hidden |= distances < -heads.back
    if heads.ahead >= 0:
        hidden |= distances > heads.ahead
    return hidden


def _absent_keys(grid: Grid) -> Tensor | None:
    """(batch, 1, 1, length) bool: positions after the last token of their example; None if there are none."""
    if grid.rows is None:
        return None
    seen = grid.rows.view(grid.batch, grid.length) >= 0
    return ~seen.flip(1).cummax(1).values.flip(1)[:, None, None]


def _probabilities(q: Tensor, k: Tensor, arguments: _Arguments) -> Tensor:
    """(batch * heads, queries, keys), from split heads."""
    scores = torch.bmm(q, k.transpose(1, 2))
    weighted = scores.view(arguments.keys.batch, arguments.heads.count, *scores.shape[1:]).float()
    weighted = weighted * arguments.heads.factor
    if arguments.bias is not None:
        weighted += arguments.bias
    if arguments.position_bias is not None:
        weighted += arguments.position_bias[:, _distance_columns(*scores.shape[1:])]
    hidden, absent = _hidden_keys(arguments.heads, *scores.shape[1:]), _absent_keys(arguments.keys)
    if absent is not None:
        hidden = absent if hidden is None else hidden | absent
    if hidden is None:
        return weighted.softmax(-1).to(scores.dtype).view_as(scores)
    probabilities = weighted.masked_fill_(hidden, -torch.inf).softmax(-1)
    # A query that sees no key would get NaN.
    return probabilities.masked_fill_(hidden, 0.0).to(scores.dtype).view_as(scores)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, arguments: _Arguments) -> Tensor:
    heads, queries, keys = arguments.heads, arguments.queries, arguments.keys
    q, k, v = (split_heads(x, heads.size, grid) for x, grid in zip((q, k, v), (queries, keys, keys), strict=True))
    dropped = masked(_probabilities(q, _repeat_keys(k, heads), arguments), arguments.mask)
    return _join_heads(torch.bmm(dropped, _repeat_keys(v, heads)), queries)


def _plain_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, arguments: _Arguments, position_grad: Tensor | None
) -> list[Tensor]:
    """The gradients of q, k and v. Those of the position bias are added to `position_grad`, unless it is None."""
    heads, queries, keys = arguments.heads, arguments.queries, arguments.keys
    q, grad = (split_heads(x, heads.size, queries) for x in (q, grad))
    k, v = (_repeat_keys(split_heads(x, heads.size, keys), heads) for x in (k, v))
    probs = _probabilities(q, k, arguments)
    dprobs = masked(torch.bmm(grad, v.transpose(1, 2)), arguments.mask).float()
    total = (probs * dprobs).sum(-1, keepdim=True)
    dweighted = probs * (dprobs - total)
    dscores = (dweighted * heads.factor).to(grad.dtype)
    if position_grad is not None:
        columns = _distance_columns(*dweighted.shape[1:]).flatten()
        position_grad.index_add_(2, columns, dweighted.view(*position_grad.shape[:2], -1))
    dropped = masked(probs, arguments.mask)
    dq, dk, dv = torch.bmm(dscores, k), torch.bmm(dscores.transpose(1, 2), q), torch.bmm(dropped.transpose(1, 2), grad)
    return [_join_heads(dq, queries), *(_join_heads(_sum_groups(x, heads), keys) for x in (dk, dv))]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor | None,
        packed: Tensor,
        position_bias: Tensor | None,
        arguments: _Arguments,
        forward_pass: ForwardPass,
    ) -> Tensor:
        ctx.arguments = arguments
        ctx.save_for_backward(query, packed)
        q, k, v = split_packed(query, packed, arguments.heads)
        context = torch.empty(q.shape, dtype=q.dtype)
        if forward_pass is ForwardPass.RECOMPUTE:
            return context
        if not (kernels := kernels_for(packed)):
            return _plain_forward(q, k, v, arguments)
        kernels.run("attention_forward", q.dtype, q, k, v, context, *arguments.for_kernel(q, k))
        return context

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, packed = ctx.saved_tensors
        arguments: _Arguments = ctx.arguments
        q, k, v = split_packed(query, packed, arguments.heads)
        dquery, dpacked, grad = (
            None if query is None else torch.empty_like(query),
            torch.empty_like(packed),
            grad.contiguous(),
        )
        outputs = split_packed(dquery, dpacked, arguments.heads)
        # One for each example, so that threads share none and the sum does not depend on their number.
        position_grad = arguments.blank_position_grad() if ctx.needs_input_grad[2] else None
        if kernels := kernels_for(packed, grad):
            rest = arguments.for_kernel(q, k)
            kernels.run("attention_backward", q.dtype, q, k, v, grad, *outputs, position_grad, *rest)
        else:
            for output, part in zip(outputs, _plain_backward(q, k, v, grad, arguments, position_grad), strict=True):
                output.copy_(part)
        return dquery, dpacked, None if position_grad is None else position_grad.sum(0), None, None


_attention: Callable[..., Tensor] = _Attention.apply


def attention(
    query: Tensor | None,
    packed: Tensor,
    bias: Tensor | None,
    heads: Heads,
    mask: Mask,
    grid: Grid,
    forward_pass: ForwardPass = ForwardPass.ONLY,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return the context, dropout(softmax(factor * query key^T + biases)) value: one row for each query, in its order.

    The context is (batch * queries, count * size) with `query`, (tokens, count * size) without, in the dtype of the
    inputs; `count`, `keys` and `size` are those of `heads`. A query at position p sees the keys at positions p -
    heads.back to p + heads.ahead and no others; its context is zero if there are none. Softmax is computed in fp32 and
    rounded to the dtype once. Gradients go to `query`, `packed` and `position_bias`; second derivatives raise
    RuntimeError. Shapes are not checked.

    Parameters
    ----------
    query: (batch * queries, count * size), fp32 or bf16: the same number of queries for each example, example after
        example; query i of an example is at position i. None when `packed` holds the queries.
    packed: (tokens, (count + 2 * keys) * size), query, key and value side by side; (tokens, 2 * keys * size), key and
        value, with `query`. The same dtype as `query`.
    bias: fp32, (batch or 1, heads or 1, queries or 1, length), contiguous over the keys, without a gradient. Positions
        of the grid after the last token of their example are excluded; other ones without a token have zero keys and
        values: the bias has to exclude them.
    grid: positions of the rows of `packed`.
    forward_pass: the part under gradient checkpointing must end with this function, because the values of the context
        are undefined in the pass RECOMPUTE.
    position_bias: fp32, contiguous, (heads, 2 * length - 1): what is added to the score of a query and a key at
        distance d = key - query in column d + length - 1.
    """
    queries = grid if query is None else Grid(grid.batch, query.shape[0] // grid.batch)
    query = None if query is None else query.contiguous()
    known = None if position_bias is None else position_bias.detach()
    arguments = _Arguments(bias, known, heads, mask, grid, queries)
    return _attention(query, packed.contiguous(), position_bias, arguments, forward_pass)


def make_bias(mask: Tensor | None) -> Tensor | None:
    """Return the `bias` of `attention` for the four-dimensional mask that transformers passes to layers; None for None.

    A bool mask is true where a query may look; a float mask is added to the scores. A mask that is expanded over the
    queries (stride 0) is cut to one row. As in transformers, fp32's lowest number excludes a key, not minus infinity,
    so that a query that may look at nothing does not give NaN.
    """
    if mask is None:
        return None
    if mask.stride(2) == 0:
        mask = mask[:, :, :1]
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return mask.float().clamp_min(torch.finfo(torch.float32).min).contiguous()
