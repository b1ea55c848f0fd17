"""Passes of embedding models, whose loss compares the examples of all ranks.

Each rank sends what the loss needs of its examples (embeddings or cosines) to all others, and computes the losses of
all examples. The gradient goes to its own examples only: added up over the ranks, that is the gradient of the whole
batch, the same as on one rank, and nothing has to be sent back.

With gradient caching (Gao and others 2021, arXiv:2101.06983), for batches larger than memory, a rank computes its
examples without gradients, `--micro-batch` at a time, then the gradient of the loss with respect to them, and then
takes it through the model by running each micro-batch again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cpuft.comm.collectives import gather_single
from cpuft.train.data.order import Indices, select_for_rank
from cpuft.train.objective.base import Batch
from cpuft.train.passes import Clock
from cpuft.train.precision import autocast

if TYPE_CHECKING:
    from cpuft.train.objective.embeddings import EmbeddingObjective
    from cpuft.train.setup import TrainingSetup


@dataclass(frozen=True)
class JointBatch:
    """The examples that one loss compares, on all ranks, as one rank needs them."""

    parts: list[Batch]
    """This rank's examples, at most --micro-batch in each, or --batch-size without it."""
    labels: torch.Tensor
    """Labels of the examples of all ranks that are compared, rank by rank."""
    counts: list[int]
    """Number of examples of each of these ranks."""
    place: int
    """This rank's index in `counts`."""
    is_cached: bool
    """Whether gradients are cached, because one of these ranks has more than one part; the same on all of them."""

    @property
    def own(self) -> slice:
        """Where this rank's examples are among those of all ranks."""
        start = sum(self.counts[: self.place])
        return slice(start, start + self.counts[self.place])


def make_joint_batches(
    objective: EmbeddingObjective, setup: TrainingSetup, examples: Indices, epoch: int
) -> list[JointBatch]:
    """Return the batches of the examples of an update (of all ranks), at least one: as many batches on every rank, each
    with as many examples of each rank, or one fewer, in parts of at most --micro-batch, or --batch-size, examples.
    """
    config, world, tokens = setup.config, setup.world, setup.prepared.train
    batches = []
    for group in _split_into_batches(setup, examples):
        most = config.micro_batch or config.batch_size
        shares = [split_evenly(group[rank :: world.size], most) for rank in range(world.size)]
        members, place = (shares, world.rank) if _compares_ranks(setup) else ([shares[world.rank]], 0)
        # A rank without an example takes the first one, as every rank has to run a pass; its gradient is 0.
        parts = shares[world.rank] if len(shares[world.rank][0]) else [group[:1]]
        compared = np.concatenate([part for member in members for part in member])
        labels = objective.make_labels(tokens, compared, np.zeros(0, bool)) if len(compared) else torch.zeros(0)
        made = [objective.make_batch(tokens, part, epoch) for part in parts]
        counts, is_cached = [sum(map(len, member)) for member in members], any(len(member) > 1 for member in members)
        batches.append(JointBatch(made, labels, counts, place, is_cached))
    return batches


def _split_into_batches(setup: TrainingSetup, examples: Indices) -> Iterator[Indices]:
    """Yield the examples of each batch of all ranks, the longest first, so that all ranks get as many tokens."""
    config, offsets = setup.config, setup.prepared.train.offsets
    size = config.batch_size * setup.world.size
    if config.gather_negatives and config.sync_every == 1:
        # A run that is resumed on another number of ranks keeps this size, because it decides which texts are compared.
        size = setup.global_batch // config.gradient_accumulation
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        yield batch[np.argsort(offsets[batch] - offsets[batch + 1], kind="stable")]


def deal_examples(setup: TrainingSetup, examples: Indices) -> list[Indices]:
    """Return, for each rank, the numbers of the examples of an update whose texts the rank embeds, at least one."""
    batches, size = list(_split_into_batches(setup, examples)), setup.world.size
    return [np.concatenate([select_for_rank(batch, rank, size) for batch in batches]) for rank in range(size)]


def split_evenly(examples: Indices, most: int) -> list[Indices]:
    """Return `examples`, which are sorted by length, in as few parts of at most `most` as possible, at least one; each
    part has every n-th example, so that all take about the same memory.
    """
    count = max(1, math.ceil(len(examples) / most))
    return [examples[first::count] for first in range(count)]


def _compares_ranks(setup: TrainingSetup) -> bool:
    config = setup.config
    return setup.world.size > 1 and not setup.independent and config.gather_negatives and config.sync_every == 1


def run_joint_batch(
    objective: EmbeddingObjective, setup: TrainingSetup, batch: JointBatch, factor: float, is_last: bool, clock: Clock
) -> float:
    """Run the forward and backward passes of a batch; return the sum of the losses of this rank's examples. Collective.

    The gradient of the sum of all ranks' losses with respect to this rank's examples, times `factor`, is added to the
    parameters' gradients. `is_last` marks the update's last batch, in whose last pass gradients are sent.
    """
    model, states, lap = setup.exchange.forward_model, list[torch.Tensor](), clock.lap
    # A rank with one part does the same as the others.
    if batch.is_cached:
        with torch.no_grad():
            found = [_represent(objective, setup, setup.model, part, states) for part in batch.parts]
        own = torch.cat(found).requires_grad_()
        lap("forward")
        loss = _backward_to_examples(objective, batch, own, factor, lap)
        assert own.grad is not None
        gradients = torch.split(own.grad, [len(one) for one in found])
        # The micro-batches are run again with the same dropout masks.
        for number, (part, state, gradient) in enumerate(zip(batch.parts, states, gradients), start=1):
            setup.exchange.begin_pass(is_last and number == len(batch.parts))
            torch.set_rng_state(state)
            represented = _represent(objective, setup, model, part, [])
            lap("forward")
            torch.autograd.backward(represented, gradient)
            lap("backward")
        return loss
    setup.exchange.begin_pass(is_last)
    own = _represent(objective, setup, model, batch.parts[0], states)
    lap("forward")
    return _backward_to_examples(objective, batch, own, factor, lap)


def _represent(
    objective: EmbeddingObjective, setup: TrainingSetup, model: torch.nn.Module, part: Batch, states: list[torch.Tensor]
) -> torch.Tensor:
    """Run a forward pass; append the state of the random generator before it to `states`."""
    states.append(torch.get_rng_state())
    with autocast(setup.precision):
        return objective.represent(model, part)


def _backward_to_examples(
    objective: EmbeddingObjective, batch: JointBatch, own: torch.Tensor, factor: float, lap: Callable[[str], None]
) -> float:
    """Exchange what the loss needs, and run the backward pass from the losses of all examples to this rank's."""
    count = batch.counts[batch.place]
    compared = exchange_examples(own[:count], batch.counts, batch.place) if len(batch.counts) > 1 else own[:count]
    lap("communication")
    losses = objective.joint_losses(compared, batch.labels) if len(compared) else own.sum() * 0
    # A rank without examples of its own has no part in the losses, but its pass must have a gradient.
    torch.autograd.backward(losses.sum() * factor + own.sum() * 0)
    lap("backward")
    return float(losses.detach()[batch.own].sum()) if count else 0.0


def exchange_examples(own: torch.Tensor, counts: list[int], rank: int) -> torch.Tensor:
    """Return the rows of all ranks in their order, fp32, (sum of `counts`, numbers). `own` are the `counts[rank]` rows
    of this rank, (rows, numbers), to which alone gradients go. Collective.
    """
    largest = max(counts)
    # All ranks have to send equally many rows.
    sent = own.new_zeros(largest, own.shape[1])
    sent[: counts[rank]] = own.detach()
    received = own.new_empty(len(counts) * largest, own.shape[1])
    gather_single(received, sent)
    rows = [part[:count] for part, count in zip(torch.split(received, largest), counts)]
    return torch.cat([*rows[:rank], own, *rows[rank + 1 :]])
