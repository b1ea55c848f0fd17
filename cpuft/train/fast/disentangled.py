"""DeBERTa's disentangled attention: scores that also depend on products of queries and keys with their distance.

The score of a query and a key is

    factor * (query key + query position_key[key - query] + key position_query[query - key]),

see He and others 2021, arXiv 2006.03654. transformers multiplies all relative positions and gathers into arrays of the
size of the scores. Here only the distances of the batch have positions, and the C++ kernel makes the products for a few
queries at a time, in the core's cache. Backward recomputes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpuft.kernels import Kernels
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Arguments, Grid, find_distances, find_queries, run_attention
from cpuft.train.fast.elementwise import Mask
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
class _Arguments(Arguments):
    """Those of disentangled attention, whose positions are position_keys and position_queries."""

    @property
    def groups(self) -> int:
        return min(self.keys.batch, -(-_PARALLEL_PARTS // self.heads.count))

    def _list_own(self, query: Tensor, key: Tensor, *more: int) -> tuple[Any, ...]:
        sizes = (self.keys.batch, self.heads.count, self.queries.length, self.keys.length, self.heads.size)
        places = self.bias, self.queries.rows, self.keys.rows
        return *places, *more, *sizes, *self.list_strides(query, key)

    def run_forward(self, kernels: Kernels, parts: Sequence[Tensor], context: Tensor) -> None:
        kernels.run("disentangled_forward", context.dtype, *parts, context, *self._list_own(parts[0], parts[1]))

    def run_backward(
        self, kernels: Kernels, parts: Sequence[Tensor], grad: Tensor, outputs: Sequence[Tensor], wanted: bool
    ) -> Sequence[Tensor]:
        dpositions = torch.empty(2, self.groups, *parts[3].shape)
        arrays = (*parts, grad, *outputs, *dpositions, *self._list_own(parts[0], parts[1], self.groups))
        kernels.run("disentangled_backward", grad.dtype, *arrays)
        return [one.sum(0).to(grad.dtype) for one in dpositions]

    def score(self, q: Tensor, k: Tensor, positions: Sequence[Tensor]) -> Tensor:
        heads, length = self.heads, self.keys.length
        q, k = (x.view(self.keys.batch, heads.count, -1, heads.size) for x in (q, k))
        position_keys, position_queries = (x.view(-1, heads.count, heads.size).permute(1, 2, 0) for x in positions)
        ahead = find_distances(self.queries.length, length) + length - 1
        behind = (2 * length - 2 - ahead).T
        shape = (self.keys.batch, heads.count)
        scores = (q @ k.transpose(2, 3)).float()
        scores = scores + (q @ position_keys).float().gather(3, ahead.expand(*shape, *ahead.shape))
        turned = (k @ position_queries).float().gather(3, behind.expand(*shape, *behind.shape))
        scores = (scores + turned.transpose(2, 3)) * heads.factor
        return scores if self.bias is None else scores + self.bias


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
    query, queries = find_queries(query, grid)
    arguments = _Arguments(bias, heads, mask, grid, queries)
    positions = (position_keys.contiguous(), position_queries.contiguous())
    return run_attention(query, packed.contiguous(), arguments, forward_pass, *positions)
