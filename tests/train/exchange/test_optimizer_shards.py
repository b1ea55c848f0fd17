"""Every element is in the shard of exactly one rank, and all shards are equally long."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpuft.train.arena import plan_buckets
from cpuft.train.exchange.optimizer_shards import ALIGNMENT, fill_shard, shard_length

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=12)
RUNS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from("ab"), st.integers(1, 90)), min_size=1, max_size=12)
"""Layers: how many matrices are packed in one block, of what kind and size."""


@given(SIZES, st.integers(1, 9), st.sampled_from([ALIGNMENT, 48]))
def test_every_element_is_in_one_shard(sizes: list[int], ranks: int, unit: int) -> None:
    length = shard_length(sum(sizes), ranks, unit)
    whole = torch.arange(1.0, sum(sizes) + 1)
    # Matrices where that is possible: a shard has their elements as they lie in memory.
    values = [part.view(2, -1) if len(part) % 2 == 0 else part for part in torch.split(whole, sizes)]
    shards = torch.zeros(ranks, length)
    for rank, shard in enumerate(shards):
        fill_shard(shard, rank * length, values)
    assert torch.equal(shards.view(-1)[: len(whole)], whole)
    assert not shards.view(-1)[len(whole) :].any()
    assert length % unit == 0
    assert 0 <= length * ranks - sum(sizes) < unit * ranks


@given(RUNS, st.integers(1, 300))
def test_buckets_have_every_parameter_and_packed_ones_side_by_side(
    runs: list[tuple[int, str, int]], min_elements: int
) -> None:
    # Of packed layers, the weights lie in one block and the biases in another, and the model has both in turn.
    packed = [[torch.zeros(count, size).unbind() for _ in "wb"] for count, _, size in runs]
    parameters, kinds, blocks = list[nn.Parameter](), dict[nn.Parameter, str](), dict[nn.Parameter, int]()
    for run, (weights, biases) in enumerate(packed):
        for pair in zip(weights, biases, strict=True):
            for offset, view in enumerate(pair):
                parameter = nn.Parameter(view)
                parameters.append(parameter)
                kinds[parameter], blocks[parameter] = runs[run][1], 2 * run + offset
    buckets = plan_buckets(parameters, kinds.__getitem__, min_elements)
    assert sorted(map(id, itertools.chain(*buckets))) == sorted(map(id, parameters))
    places = {one: (bucket, place) for bucket, some in enumerate(buckets) for place, one in enumerate(some)}
    for bucket in buckets:
        assert len({kinds[one] for one in bucket}) == 1
    for block in set(blocks.values()):
        (first, start), *others = [places[one] for one in parameters if blocks[one] == block]
        assert others == [(first, start + number) for number in range(1, len(others) + 1)]
    # No bucket is worth two messages, but for what cannot be cut.
    for bucket in buckets:
        assert sum(one.numel() for one in bucket if blocks[one] != blocks[bucket[0]]) < min_elements


@pytest.mark.parametrize(
    "kinds, min_elements, buckets",
    [
        ("aaaa", 2, [[2, 3], [0, 1]]),
        ("abab", 2, [[1, 3], [0, 2]]),
        # The last of a kind waits for the first parameter, whose gradient comes last.
        ("baaaa", 2, [[3, 4], [1, 2], [0]]),
        ("baaba", 1, [[4], [3], [2], [1], [0]]),
    ],
)
def test_buckets_come_in_the_order_of_their_gradients(kinds: str, min_elements: int, buckets: list[list[int]]) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in kinds]
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    planned = plan_buckets(parameters, lambda one: kinds[numbers[one]], min_elements)
    assert [[numbers[one] for one in bucket] for bucket in planned] == buckets
