"""DeBERTa's disentangled attention: scores that also depend on products of queries and keys with their distance.

The score of a query and a key is

    factor * (query key + query position_key[key - query] + key position_query[query - key]),

see He and others 2021, arXiv 2006.03654. transformers multiplies all relative positions and gathers into arrays of the
size of the scores. Here only the distances of the batch have positions, and the C++ kernel makes the products for a few
queries at a time, in the core's cache. Backward recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpuft.kernels import kernels_for
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid, bias_strides, split_heads, split_packed
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.elementwise import Mask, masked
from cpuft.train.fast.gradient_checkpointing import ForwardPass

_PARALLEL_PARTS = 64
"""Least number of independent parts in the backward pass, if there are as many pairs of an example and a head. Each
part takes memory for gradients of positions. The number of threads must not decide, because sums in another order are
rounded otherwise."""


@dataclass(frozen=True)
class Distances:
    """Which relative embedding stands for each distance between two tokens of an example."""

    first: int
    last: int
    for_keys: Tensor
    """(2 * length - 1,) int64: for key - query from 1 - length on, the embedding's number, less `first`."""
    for_queries: Tensor
    """(2 * length - 1,) int64: the same for query - key."""

    @staticmethod
    def of(numbers: Tensor) -> Distances:
        """Return the distances for these numbers of embeddings, int64, (2 * length - 1,), one for each query - key from
        1 - length on: `first` and `last` are the least and the largest of them.
        """
        first, last = (int(number) for number in torch.aminmax(numbers))
        return Distances(first, last, (numbers - first).flip(0), numbers - first)

    def select(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings that are used: (embeddings, hidden) -> (last - first + 1, hidden), a view."""
        return embeddings[self.first : self.last + 1]


@dataclass(frozen=True)
class _Arguments:
    bias: Tensor | None
    heads: Heads
    mask: Mask
    keys: Grid
    queries: Grid

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.queries.rows, self.keys.rows

    def sizes(self, query: Tensor, key: Tensor) -> tuple[int | float, ...]:
        """The kernel's arguments from the number of examples on; the strides are those of these arrays of tokens."""
        heads, strides = self.heads, (0, 0, 0) if self.bias is None else bias_strides(self.bias)
        sizes = (self.keys.batch, heads.count, self.queries.length, self.keys.length, heads.size)
        return *sizes, query.stride(0), key.stride(0), *strides, heads.factor, *self.mask.kernel_arguments

    @property
    def groups(self) -> int:
        return min(self.keys.batch, -(-_PARALLEL_PARTS // self.heads.count))


def number_embeddings(length: int, buckets: int, span: int) -> Tensor:
    """Return the number of DeBERTa's relative embedding for each distance query - key, from 1 - length to length - 1:
    int64, from 0 to 2 * buckets - 1, or without buckets 2 * span - 1. `length` is that of the longest example;
    `buckets` (0 or less: none) is `position_buckets`, and `span` `max_relative_positions`.
    """
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = torch.arange(1 - length, length)
    if buckets > 0 and span > 0:
        distances = make_log_bucket_position(distances, buckets, span).long()
    half = buckets if buckets > 0 else span
    return (distances + half).clamp(0, 2 * half - 1)


def _plain(tensors: tuple[Tensor, ...], arguments: _Arguments) -> Tensor:
    """Compute the same in plain torch from queries, keys, values and both positions, with torch's own gradients."""
    heads, queries, keys = arguments.heads, arguments.queries, arguments.keys
    grids = (queries, keys, keys)
    q, k, v = (
        split_heads(x, heads.size, grid).view(grid.batch, heads.count, grid.length, heads.size)
        for x, grid in zip(tensors[:3], grids, strict=True)
    )
    position_keys, position_queries = (x.view(-1, heads.count, heads.size).permute(1, 2, 0) for x in tensors[3:])
    ahead = torch.arange(keys.length) - torch.arange(queries.length)[:, None] + keys.length - 1
    shape = (keys.batch, heads.count, queries.length, keys.length)
    scores = (q @ k.transpose(2, 3)).float()
    scores = scores + (q @ position_keys).float().gather(3, ahead.expand(shape))
    behind = (2 * keys.length - 2 - ahead).T
    scores = scores + (k @ position_queries).float().gather(3, behind.expand(*shape[:2], *behind.shape)).transpose(2, 3)
    scores = scores * heads.factor
    if arguments.bias is not None:
        scores = scores + arguments.bias
    probabilities = scores.softmax(-1).to(q.dtype)
    dropped = probabilities * masked(torch.ones_like(probabilities), arguments.mask)
    context = (dropped @ v).transpose(1, 2).flatten(2).flatten(0, 1)
    return context if queries.places is None else context.index_select(0, queries.places)


class _Disentangled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor | None,
        packed: Tensor,
        position_keys: Tensor,
        position_queries: Tensor,
        arguments: _Arguments,
        forward_pass: ForwardPass,
    ) -> Tensor:
        ctx.arguments = arguments
        ctx.save_for_backward(query, packed, position_keys, position_queries)
        q, k, v = split_packed(query, packed, arguments.heads)
        context = torch.empty(q.shape, dtype=q.dtype)
        if forward_pass is ForwardPass.RECOMPUTE:
            return context
        positions = (position_keys, position_queries)
        if not (kernels := kernels_for(packed, *positions)):
            return _plain((q, k, v, *positions), arguments)
        arrays = (q, k, v, *positions, context, *arguments.places)
        kernels.run("disentangled_forward", q.dtype, *arrays, *arguments.sizes(q, k))
        return context

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, *positions = ctx.saved_tensors
        arguments: _Arguments = ctx.arguments
        q, k, v = parts = split_packed(query, packed, arguments.heads)
        dquery, dpacked = None if query is None else torch.empty_like(query), torch.empty_like(packed)
        outputs, grad = split_packed(dquery, dpacked, arguments.heads), grad.contiguous()
        if kernels := kernels_for(packed, grad, *positions):
            dpositions = torch.empty(2, arguments.groups, *positions[0].shape)
            arrays = (q, k, v, *positions, grad, *outputs, *dpositions, *arguments.places)
            kernels.run("disentangled_backward", q.dtype, *arrays, arguments.groups, *arguments.sizes(q, k))
            grads = [one.sum(0).to(packed.dtype) for one in dpositions]
        else:
            inputs = tuple(x.detach().requires_grad_() for x in (*parts, *positions))
            with torch.enable_grad():
                *own, one, two = torch.autograd.grad(_plain(inputs, arguments), inputs, grad)
            grads = [one, two]
            for output, part in zip(outputs, own, strict=True):
                output.copy_(part)
        return dquery, dpacked, *grads, None, None


_disentangled: Callable[..., Tensor] = _Disentangled.apply


def disentangled_attention(
    query: Tensor | None,
    packed: Tensor,
    position_keys: Tensor,
    position_queries: Tensor,
    bias: Tensor | None,
    heads: Heads,
    mask: Mask,
    grid: Grid,
    forward_pass: ForwardPass = ForwardPass.ONLY,
) -> Tensor:
    """Return the context, dropout(softmax(scores + bias)) value: one row for each query, in its order.

    The module's docstring has the formula of the scores. The context is (batch * queries, heads * size) with `query`,
    (tokens, heads * size) without, in the dtype of the inputs. Softmax is computed in fp32 and rounded to the dtype
    once. Gradients go to the first four arguments; second derivatives raise RuntimeError. Shapes are not checked.

    Parameters
    ----------
    query, packed, bias, mask, grid, forward_pass: see `attention.attention`. Query i of an example is at position i.
    position_keys: (2 * length - 1, heads * size), in the dtype of `packed`: the position of a key at distance key -
        query is in row key - query + length - 1.
    position_queries: likewise; the position of a query at distance query - key is in row query - key + length - 1.
    """
    queries = grid if query is None else Grid(grid.batch, query.shape[0] // grid.batch)
    query = None if query is None else query.contiguous()
    arguments = _Arguments(bias, heads, mask, grid, queries)
    positions = (position_keys.contiguous(), position_queries.contiguous())
    return _disentangled(query, packed.contiguous(), *positions, arguments, forward_pass)
