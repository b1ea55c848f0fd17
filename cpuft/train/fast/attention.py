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

from cpuft.kernels import Kernels, kernels_for
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.elementwise import Mask, dropout
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
class Arguments:
    """What attention depends on beside queries, keys, values and positions, and how a kernel or torch computes it.

    `positions` are here what `attention` calls position_bias, or nothing.
    """

    bias: Tensor | None
    heads: Heads
    mask: Mask
    keys: Grid
    queries: Grid

    def list_strides(self, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        """Return a kernel's last arguments: the strides of these two arrays of tokens, and what follows."""
        return query.stride(0), key.stride(0), *bias_strides(self.bias), self.heads.factor, *self.mask.kernel_arguments

    def _list_sizes(self, query: Tensor, key: Tensor, positions: Sequence[Tensor]) -> tuple[Any, ...]:
        heads, keys = self.heads, self.keys
        sizes = (keys.batch, heads.count, heads.keys, self.queries.length, keys.length, heads.size)
        window = min(heads.back, keys.length), min(heads.ahead, keys.length)
        places = (*positions, *[None] * (1 - len(positions)), self.queries.rows, keys.rows)
        return self.bias, *places, *sizes, *window, *self.list_strides(query, key)

    def run_forward(self, kernels: Kernels, parts: Sequence[Tensor], context: Tensor) -> None:
        """Write the context of queries, keys, values and positions."""
        q, k, v, *positions = parts
        kernels.run("attention_forward", q.dtype, q, k, v, context, *self._list_sizes(q, k, positions))

    def run_backward(
        self, kernels: Kernels, parts: Sequence[Tensor], grad: Tensor, outputs: Sequence[Tensor], wanted: bool
    ) -> Sequence[Tensor]:
        """Write the gradients of queries, keys and values to `outputs`, and return those of positions if `wanted`."""
        q, k, v, *positions = parts
        # One for each example, so that threads share none and the sum does not depend on their number.
        whole = torch.zeros(self.keys.batch, self.heads.count, 2 * self.keys.length - 1) if wanted else None
        rest = self._list_sizes(q, k, positions)
        kernels.run("attention_backward", q.dtype, q, k, v, grad, *outputs, whole, *rest)
        return [] if whole is None else [whole.sum(0)]

    def score(self, q: Tensor, k: Tensor, positions: Sequence[Tensor]) -> Tensor:
        """Return in plain torch what softmax gets of split heads: fp32, (batch, heads, queries, keys)."""
        scores = torch.bmm(q, k.transpose(1, 2)).view(self.keys.batch, self.heads.count, q.shape[1], k.shape[1])
        scores = scores.float() * self.heads.factor
        if self.bias is not None:
            scores = scores + self.bias
        for bias in positions:
            scores = scores + bias[:, find_distances(q.shape[1], k.shape[1]) + k.shape[1] - 1]
        return scores


def find_distances(queries: int, keys: int) -> Tensor:
    """Return key - query for each pair of positions: (queries, keys) int64."""
    return torch.arange(keys) - torch.arange(queries)[:, None]


def bias_strides(bias: Tensor | None) -> tuple[int, int, int]:
    """Return the strides, in elements, of a bias of 4 dimensions by batch, head and query, 0 where the size is 1, and
    zeros for None.
    """
    if bias is None:
        return 0, 0, 0
    batch, head, query = (0 if size == 1 else step for size, step in zip(bias.shape[:3], bias.stride(), strict=False))
    return batch, head, query


def split_packed(query: Tensor | None, packed: Tensor, heads: Heads) -> Sequence[Tensor]:
    """Return views of queries, (tokens, count * size), keys and values, (tokens, keys * size) each: of `query` and
    `packed`, keys and values side by side, or for None of `packed` with all three.
    """
    queries, keys = heads.count * heads.size, heads.keys * heads.size
    return torch.split(packed, [queries, keys, keys], 1) if query is None else (query, *torch.split(packed, keys, 1))


def _split_heads(x: Tensor, size: int, grid: Grid) -> Tensor:
    """Return the heads: (tokens, heads * size) -> (batch * heads, length, size), zero where there is no token."""
    if grid.places is not None:
        x = x.new_zeros(grid.batch * grid.length, x.shape[-1]).index_copy(0, grid.places, x)
    return x.view(grid.batch, grid.length, -1, size).transpose(1, 2).flatten(0, 1)


def _find_hidden(arguments: Arguments) -> Tensor:
    """Return which keys are outside of a query's window or after the last token of their example: bool, (queries, keys)
    or (batch, 1, queries, keys).
    """
    heads, keys = arguments.heads, arguments.keys
    distances = find_distances(arguments.queries.length, keys.length)
    hidden = torch.zeros_like(distances, dtype=torch.bool)
    if heads.back >= 0:
        hidden |= distances < -heads.back
    if heads.ahead >= 0:
        hidden |= distances > heads.ahead
    if keys.rows is None:
        return hidden
    seen = keys.rows.view(keys.batch, keys.length) >= 0
    return hidden | ~seen.flip(1).cummax(1).values.flip(1)[:, None, None]


def _compute_plainly(parts: Sequence[Tensor], arguments: Arguments) -> Tensor:
    """Return the context of queries, keys, values and positions in plain torch, with torch's own gradients."""
    heads, queries, keys = arguments.heads, arguments.queries, arguments.keys
    q, k, v = (_split_heads(x, heads.size, grid) for x, grid in zip(parts[:3], (queries, keys, keys), strict=True))
    if heads.keys != heads.count:
        k, v = (x.repeat_interleave(heads.count // heads.keys, 0) for x in (k, v))
    hidden = _find_hidden(arguments)
    probabilities = arguments.score(q, k, parts[3:]).masked_fill(hidden, -torch.inf).softmax(-1)
    # A query that sees no key would get NaN.
    probabilities = probabilities.masked_fill(hidden, 0.0).to(q.dtype).flatten(0, 1)
    context = torch.bmm(dropout(probabilities, arguments.mask), v)
    joined = context.view(queries.batch, -1, *context.shape[1:]).transpose(1, 2).flatten(2).flatten(0, 1)
    return joined if queries.places is None else joined.index_select(0, queries.places)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor | None,
        packed: Tensor,
        arguments: Arguments,
        forward_pass: ForwardPass,
        *positions: Tensor,
    ) -> Tensor:
        ctx.arguments = arguments
        ctx.save_for_backward(query, packed, *positions)
        parts = (*split_packed(query, packed, arguments.heads), *positions)
        context = torch.empty(parts[0].shape, dtype=packed.dtype)
        if forward_pass is ForwardPass.RECOMPUTE:
            return context
        if not (kernels := kernels_for(packed)):
            return _compute_plainly(parts, arguments)
        arguments.run_forward(kernels, parts, context)
        return context

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, *positions = ctx.saved_tensors
        arguments: Arguments = ctx.arguments
        parts = (*split_packed(query, packed, arguments.heads), *positions)
        dquery, dpacked = None if query is None else torch.empty_like(query), torch.empty_like(packed)
        outputs, grad = split_packed(dquery, dpacked, arguments.heads), grad.contiguous()
        wanted = any(ctx.needs_input_grad[4:])
        if kernels := kernels_for(packed, grad):
            dpositions = arguments.run_backward(kernels, parts, grad, outputs, wanted)
        else:
            inputs = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                found = torch.autograd.grad(_compute_plainly(inputs, arguments), inputs, grad)
            for output, part in zip(outputs, found[:3], strict=True):
                output.copy_(part)
            dpositions = found[3:]
        return dquery, dpacked, None, None, *(dpositions if wanted else [None] * len(positions))


run_attention: Callable[..., Tensor] = _Attention.apply
"""Takes queries or None, what is packed, `Arguments`, the `ForwardPass` and positions: see `attention`."""


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
    query, queries = find_queries(query, grid)
    positions = () if position_bias is None else (position_bias,)
    arguments = Arguments(bias, heads, mask, grid, queries)
    return run_attention(query, packed.contiguous(), arguments, forward_pass, *positions)


def find_queries(query: Tensor | None, grid: Grid) -> tuple[Tensor | None, Grid]:
    """Return queries, contiguous, and the grid of their positions: for None, which means all, that of the tokens."""
    if query is None:
        return None, grid
    return query.contiguous(), Grid(grid.batch, query.shape[0] // grid.batch)


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
