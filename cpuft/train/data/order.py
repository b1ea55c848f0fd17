"""Which rows each rank sees in each step: rows of like length together, the same for any number of ranks.

The rows of an update depend on the seed, the epoch and the global batch only, so one rank with batch 32 and two
ranks with batch 16 train on the same rows in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cpuft.train.data.archive import Tokens

_POOL_BATCHES = 50
"""Batches that are sorted together: large enough that rows of a batch are alike, small enough to stay random."""

Order = NDArray[np.int64]


def plan_epoch(lengths: NDArray[np.int64], global_batch: int, seed: int, epoch: int, grouped: bool) -> list[Order]:
    """Row numbers of each update of an epoch; every row stands in exactly one.

    With `grouped`, rows are drawn at random into pools, each sorted by length and cut into batches, and the batches
    of the epoch shuffled. The rows of an update that is not full come last in their pool.
    """
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths))
    if not grouped:
        return [order[i : i + global_batch] for i in range(0, len(order), global_batch)]
    pool = global_batch * _POOL_BATCHES
    updates = []
    for start in range(0, len(order), pool):
        rows = order[start : start + pool]
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        updates += [rows[i : i + global_batch] for i in range(0, len(rows), global_batch)]
    return [updates[i] for i in generator.permutation(len(updates))]


def deal(rows: Order, rank: int, world_size: int) -> Order:
    """A rank's share of an update: rows are dealt in turn, so that neighbours in length go to different ranks.

    Where there are fewer rows than ranks, a rank without a row gets the first one, to be weighted with zero.
    """
    share = rows[rank::world_size]
    return share if len(share) else rows[:1]


def count_updates(rows: int, global_batch: int, epochs: float, max_steps: int) -> int:
    """Updates of the whole run."""
    return max_steps or math.ceil(math.ceil(rows / global_batch) * epochs)


def plan_updates(
    tokens: Tokens, global_batch: int, seed: int, updates: int, grouped: bool
) -> Iterator[tuple[int, Order]]:
    """Epoch and rows of each of `updates` updates."""
    epoch, done = 0, 0
    while done < updates:
        for rows in plan_epoch(tokens.lengths, global_batch, seed, epoch, grouped)[: updates - done]:
            yield epoch, rows
            done += 1
        epoch += 1
