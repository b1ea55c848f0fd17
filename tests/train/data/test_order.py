"""Which examples each rank sees in each update."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import count_updates, plan_epoch, plan_updates, select_for_rank
from tests.train.tokens import make_tokens

LENGTHS = st.lists(st.integers(1, 128), min_size=1, max_size=300)


@given(LENGTHS, st.integers(1, 40), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_every_example_is_in_exactly_one_update(
    lengths: list[int], batch: int, seed: int, epoch: int, grouped: bool
) -> None:
    updates = plan_epoch(np.asarray(lengths), batch, seed, epoch, grouped)
    assert sorted(np.concatenate(updates)) == list(range(len(lengths)))
    assert len(updates) == -(-len(lengths) // batch)
    assert max(map(len, updates)) <= batch


@given(st.integers(1, 100), st.integers(1, 8))
def test_ranks_share_an_update_evenly(rows: int, ranks: int) -> None:
    order = np.arange(rows)
    shares = [select_for_rank(order, rank, ranks) for rank in range(ranks)]
    weighted = [share for rank, share in enumerate(shares) if rank < rows]
    assert sorted(np.concatenate(weighted)) == list(order)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(len(share) for share in shares)


def test_updates_do_not_depend_on_the_number_of_ranks_but_on_epoch_and_seed() -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 500)
    first = plan_epoch(lengths, 32, 1, 0, True)
    assert all((a == b).all() for a, b in zip(first, plan_epoch(lengths, 32, 1, 0, True)))
    assert not all(np.array_equal(a, b) for a, b in zip(first, plan_epoch(lengths, 32, 1, 1, True)))
    assert not all(np.array_equal(a, b) for a, b in zip(first, plan_epoch(lengths, 32, 2, 0, True)))


def test_examples_of_similar_length_are_together_and_ranks_get_equal_work() -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 4000)
    updates = plan_epoch(lengths, 64, 1, 0, True)
    padded = sum(len(rows) * lengths[rows].max() for rows in updates)
    assert padded < 1.03 * lengths.sum()
    shares = [[lengths[select_for_rank(rows, rank, 2)].sum() for rank in (0, 1)] for rows in updates]
    assert max(abs(a - b) / (a + b) for a, b in shares) < 0.02


@pytest.mark.parametrize(
    "rows, batch, epochs, steps, updates",
    [(3668, 32, 3, 0, 345), (3668, 64, 3, 0, 174), (10, 4, 0.5, 0, 2), (10, 4, 3, 7, 7)],
)
def test_updates_of_a_run(rows: int, batch: int, epochs: float, steps: int, updates: int) -> None:
    assert count_updates(rows, batch, epochs, steps) == updates


def test_epochs_follow_each_other() -> None:
    found = list(plan_updates(make_tokens([3, 4, 5]), 2, 0, 5, grouped=False))
    assert [epoch for epoch, _ in found] == [0, 0, 1, 1, 2]


@pytest.mark.timeout(10)
def test_an_empty_split_has_no_updates() -> None:
    empty = Tokens(np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(1, np.int64), np.zeros(0, np.float32))
    with pytest.raises(ValueError, match=r"^there are no examples to plan updates of$"):
        next(plan_updates(empty, 2, 0, 5, grouped=False))
