"""Which examples each rank sees in each update: examples of similar length together.

The examples of an update depend only on the seed, the epoch and the global batch size: one rank with batch size 32 and
two ranks with batch size 16 train on the same examples in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cpuft.tasks import EMBEDDING_KINDS
from cpuft.train.data.archive import Tokens

_POOL_BATCHES = 50
"""Batches whose examples are sorted by length together: few enough that batches stay random."""

Indices = NDArray[np.int64]
"""Numbers of examples in a split."""


def plan_epoch(lengths: NDArray[np.int64], global_batch: int, seed: int, epoch: int, grouped: bool) -> list[Indices]:
    """Return the examples of each update of an epoch, each in exactly one; the same for the same arguments.

    If they do not divide evenly, the last update has fewer than `global_batch` examples or, with `grouped` (by length),
    an update at a random place does, which has the shortest ones of the last pool.
    """
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths))
    if not grouped:
        return [order[i : i + global_batch] for i in range(0, len(order), global_batch)]
    pool_size = global_batch * _POOL_BATCHES
    updates = []
    for start in range(0, len(order), pool_size):
        pool = order[start : start + pool_size]
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        updates += [pool[i : i + global_batch] for i in range(0, len(pool), global_batch)]
    return [updates[i] for i in generator.permutation(len(updates))]


def is_grouped(kind: str) -> bool:
    """Return whether an update of this kind of task has texts of similar length: not for pairs and similarity."""
    # Texts of similar length as negatives would change what an embedding model learns.
    return kind not in EMBEDDING_KINDS


def select_for_rank(examples: Indices, rank: int, world_size: int) -> Indices:
    """Return `examples[rank::world_size]`, so that all ranks get similar lengths; for a rank without any, the first
    example of all, to which the caller has to give weight zero.
    """
    share = examples[rank::world_size]
    return share if len(share) else examples[:1]


def count_updates(examples: int, global_batch: int, epochs: float, max_steps: int) -> int:
    """Return `max_steps`, or if that is 0 ceil(`epochs` * U) with U = ceil(`examples` / `global_batch`)."""
    return max_steps or math.ceil(math.ceil(examples / global_batch) * epochs)


def plan_updates(
    tokens: Tokens, global_batch: int, seed: int, updates: int, grouped: bool
) -> Iterator[tuple[int, Indices]]:
    """Yield the epoch, from 0, and the examples of each of `updates` updates, as `plan_epoch` plans them: one of each
    epoch may have fewer than `global_batch`. Raises ValueError: there are no examples.
    """
    if not len(tokens.lengths):
        raise ValueError("there are no examples to plan updates of")
    epoch, done = 0, 0
    while done < updates:
        for examples in plan_epoch(tokens.lengths, global_batch, seed, epoch, grouped)[: updates - done]:
            yield epoch, examples
            done += 1
        epoch += 1
