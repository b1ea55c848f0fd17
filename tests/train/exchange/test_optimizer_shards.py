"""Who keeps which numbers: all of them, each once, as many on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.train.exchange.optimizer_shards import ALIGNED, Member, find_pieces, part_width, plan_buckets

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=12)
RUNS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from("ab"), st.integers(1, 90)), min_size=1, max_size=12)
"""Layers: how many matrices are packed in one block, of what kind and size."""


@given(SIZES, st.integers(1, 9), st.sampled_from([ALIGNED, 48]))
def test_every_number_is_one_rank_s(sizes: list[int], ranks: int, unit: int) -> None:
    width = part_width(sum(sizes), ranks, unit)
    seen = [np.zeros(size, int) for size in sizes]
    bucket = np.concatenate([np.full(size, member) for member, size in enumerate(sizes)])
    for rank in range(ranks):
        filled = 0
        for piece in find_pieces(sizes, ranks, rank, unit):
            seen[piece.member][piece.start : piece.start + piece.length] += 1
            # Parts one after another are the parameters one after another.
            assert set(bucket[rank * width + piece.place :][: piece.length]) == {piece.member}
            assert piece.place == filled
            filled += piece.length
        assert filled <= width
    assert all((count == 1).all() for count in seen)
    assert width % unit == 0
    assert 0 <= width * ranks - sum(sizes) < unit * ranks


@given(RUNS, st.integers(1, 300))
def test_buckets_have_every_parameter_and_packed_ones_side_by_side(
    runs: list[tuple[int, str, int]], least: int
) -> None:
    members = [Member(size, kind, block) for block, (count, kind, size) in enumerate(runs) for _ in range(count)]
    buckets = plan_buckets(members, least)
    assert sorted(number for bucket in buckets for number in bucket) == list(range(len(members)))
    for bucket in buckets:
        assert len({members[number].kind for number in bucket}) == 1
        assert bucket == sorted(bucket)
    homes = {number: place for place, bucket in enumerate(buckets) for number in bucket}
    for number in range(1, len(members)):
        assert members[number].block != members[number - 1].block or homes[number] == homes[number - 1]
    # No bucket is worth two messages, but for what cannot be cut.
    for bucket in buckets:
        first = members[bucket[0]].block
        assert sum(members[number].size for number in bucket if members[number].block != first) < least


@pytest.mark.parametrize(
    "kinds, least, buckets",
    [
        ("aaaa", 2, [[2, 3], [0, 1]]),
        ("abab", 2, [[1, 3], [0, 2]]),
        # The last of a kind waits for the first parameter, whose gradient comes last.
        ("baaaa", 2, [[3, 4], [1, 2], [0]]),
        ("baaba", 1, [[4], [3], [2], [1], [0]]),
    ],
)
def test_buckets_come_in_the_order_of_their_gradients(kinds: str, least: int, buckets: list[list[int]]) -> None:
    assert plan_buckets([Member(1, kind, block) for block, kind in enumerate(kinds)], least) == buckets
