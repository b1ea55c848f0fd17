"""Which examples each rank sees in each update: examples of similar length together, the same for any number of ranks.

The examples of an update depend only on the seed, the epoch and the global batch size: one rank with batch size 32 and
two ranks with batch size 16 train on the same examples in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cpuft.train.data.archive import Tokens

_POOL_BATCHES = 50
"""Number of batches whose examples are sorted by length together: enough that the examples of a batch are similar, and
few enough that batches stay random."""

Indices = NDArray[np.int64]
"""Numbers of examples in a split."""


def plan_epoch(lengths: NDArray[np.int64], global_batch: int, seed: int, epoch: int, grouped: bool) -> list[Indices]:
    """Return the examples of each update of an epoch; every example is in exactly one update. Empty without examples.

    The same arguments give the same plan.

    Parameters
    ----------
    lengths: number of tokens of each example, shape (examples,).
    global_batch: number of examples of an update. One update of the epoch may have fewer; with `grouped`, it has the
        shortest examples of the last pool.
    seed, epoch: seeds of the random order; neither may be negative.
    grouped: divide the examples at random into pools of 50 batches, sort each pool by length, cut it into batches, and
        shuffle the batches of the epoch. Without it, examples are in random order.
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


def select_for_rank(examples: Indices, rank: int, world_size: int) -> Indices:
    """Return a rank's examples of an update, `examples[rank::world_size]`, so that all ranks get similar lengths.

    If there are fewer examples than ranks, a rank without one gets the first; the caller has to give it weight zero.
    Empty only if `examples` is empty.
    """
    share = examples[rank::world_size]
    return share if len(share) else examples[:1]


def count_updates(examples: int, global_batch: int, epochs: float, max_steps: int) -> int:
    """Return the number of updates of a run: `max_steps` unless that is 0, else those of `epochs`, rounded up.

    An epoch has examples / global_batch updates, rounded up. `epochs` may be a fraction.
    """
    return max_steps or math.ceil(math.ceil(examples / global_batch) * epochs)


def plan_updates(
    tokens: Tokens, global_batch: int, seed: int, updates: int, grouped: bool
) -> Iterator[tuple[int, Indices]]:
    """Yield for each of `updates` updates its epoch, counted from 0, and the numbers of its examples (`plan_epoch`).

    Epochs follow each other until there are enough updates; the last one may be cut off.

    Parameters
    ----------
    tokens: the training split.
    global_batch: number of examples of an update; one update of an epoch may have fewer.
    grouped: whether examples of similar length are in one update; else their order is random.

    Raises ValueError: the split has no examples, so that no number of epochs would be enough.
    """
    if not len(tokens.lengths):
        raise ValueError("there are no examples to plan updates of")
    epoch, done = 0, 0
    while done < updates:
        for examples in plan_epoch(tokens.lengths, global_batch, seed, epoch, grouped)[: updates - done]:
            yield epoch, examples
            done += 1
        epoch += 1
