"""Everything that the updates of a run need: model, objective, data, optimizer and exchange."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from cpuft.comm.compression.embedding_rows import check_lookups
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, describe_error
from cpuft.rank.world import World
from cpuft.train.arena import UNUSED_ATTRIBUTE
from cpuft.train.data.archive import Prepared
from cpuft.train.data.order import count_updates
from cpuft.train.data.recipe import find_best_metric
from cpuft.train.exchange.compression_choice import choose_compression
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.model import get_model_name
from cpuft.train.objective.base import Objective
from cpuft.train.optimizer import make_optimizer
from cpuft.train.passes import Clock
from cpuft.train.precision import autocast


class UpdateObserver(Protocol):
    """Something that measures the updates of a training, such as scripts/record-layer-times."""

    def begin_update(self, setup: TrainingSetup) -> None:
        """Prepare for the update that follows."""

    def end_update(self, clock: Clock, waited: float) -> None:
        """Take note of an update, whose phases the clock has measured; in its last backward pass this rank waited for
        messages for `waited` seconds.
        """


class TrainingSetup:
    """Everything that the updates of a run need, made once. Collective.

    The model is tried on two examples, and gets the layers of the fast path or of --engine in place. The exchange may
    wrap model and optimizer: use `exchange.forward_model` and `optimizer`. With `independent`, nothing is exchanged.
    `global_batch` is the number of examples of an update on all ranks; 0: by the options. `earlier_compression` is what
    a resumed run chose when it began. Raises CpuftError: the model cannot be trained with these options.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        config: TrainConfig,
        prepared: Prepared,
        precision: str,
        world: World,
        independent: bool = False,
        global_batch: int = 0,
        earlier_compression: str = "",
    ) -> None:
        config = config.choose_lora(0)  # the learning rate, if a run has not chosen it before it loaded the model
        self.model, self.objective, self.config, self.prepared = model, objective, config, prepared
        self.precision, self.world, self.independent = precision, world, independent
        self.global_batch = global_batch or config.batch_size * config.gradient_accumulation * world.size
        self.updates = count_updates(len(prepared.train), self.global_batch, config.epochs, config.max_steps)
        """Number of updates of the whole run."""
        intervals = {"none": 0, "epoch": math.ceil(len(prepared.train) / self.global_batch)}
        self.evaluation_interval = int(intervals.get(config.eval_every, config.eval_every))
        """Number of updates between two evaluations while training; 0: there are none."""
        self.best_metric = find_best_metric(config, prepared)
        """Name of the metric that compares evaluations."""
        # A resumed run compares the examples of as many ranks as it began with.
        ranks = self.global_batch // (config.batch_size * config.gradient_accumulation)
        check_negatives(config, prepared, 1 if independent else ranks)
        try_model(model, objective, config, prepared, precision)
        optimizer = make_optimizer(model, config, precision)
        self.compression, self.compression_reason = "", ""
        """What `--grad-compression auto` has chosen, and why; empty if there was nothing to choose."""
        if not independent:
            self.compression, self.compression_reason = choose_compression(
                config, precision, model, objective, prepared, world, earlier_compression
            )
        config = replace(config, grad_compression=self.compression or config.grad_compression)
        exchange = choose_exchange(config, 1 if independent else world.size)
        self.exchange = exchange(model, optimizer, config, precision)
        self.optimizer = self.exchange.optimizer
        self.observers: list[UpdateObserver] = []
        """Are told when an update begins and ends. The lines of updates, which come later, are what `train` yields."""


def check_negatives(config: TrainConfig, prepared: Prepared, ranks: int) -> None:
    """Raise CpuftError if a loss compares only one pair without negatives on `ranks` ranks: that loss is always 0."""
    compared = config.batch_size * (ranks if config.gather_negatives and config.sync_every == 1 else 1)
    if prepared.kind == "pairs" and compared == 1 and len(prepared.texts) == 2:
        raise CpuftError("--batch-size 1 leaves an anchor no text to tell its positive from: give a larger one")


def try_model(
    model: torch.nn.Module, objective: Objective, config: TrainConfig, prepared: Prepared, precision: str
) -> None:
    """Run a first forward pass on two examples, of different length if any differ, and note in the model what the
    exchange needs.

    That is whether the word embedding is looked up by more than input ids, and which parameters are unused. Nothing
    else changes. Raises CpuftError: the model cannot compute a padded batch in this precision. Raises MemoryError or
    RuntimeError: there is not enough memory.
    """
    lengths = prepared.train.lengths[:1000]
    batch = objective.make_batch(prepared.train, np.unique([lengths.argmax(), lengths.argmin()]))
    losses: list[torch.Tensor] = []

    def forward() -> None:
        # No backward pass follows. Without this, transformers' own layers would keep more activations than the fast
        # ones do in training, and a decoder's peak of memory would be here.
        with autocast(precision), torch.autograd.graph.saved_tensors_hooks(_keep_nothing, _keep_nothing):
            losses.append(objective.losses(model, batch))

    was_training = model.training
    model.eval()  # dropout would draw random numbers
    try:
        check_lookups(model, batch.inputs["input_ids"], forward)
        setattr(model, UNUSED_ATTRIBUTE, find_unused_parameters(model, losses[-1]))
    except Exception as error:  # models raise whatever their layers raise
        reason = describe_error(error)
        if isinstance(error, (CpuftError, MemoryError)) or "allocate memory" in reason:
            raise
        problem = f"{type(model).__name__} of {get_model_name(config)} cannot compute a batch of two examples"
        other = "try --precision fp32, or " * (precision != "fp32")
        raise CpuftError(f"{problem} in {precision} ({reason}): {other}give another --model") from None
    finally:
        model.train(was_training)


def _keep_nothing(tensor: torch.Tensor) -> Any:
    """Drop what autograd saves for a backward pass."""


def find_unused_parameters(model: torch.nn.Module, losses: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the trainable parameters that are not in the autograd graph of the losses, in model order."""
    used, seen, waiting = set[int](), set[Any](), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        used.add(id(getattr(node, "variable", None)))
        waiting += [one for one, _ in node.next_functions]
    return tuple(name for name, one in model.named_parameters() if one.requires_grad and id(one) not in used)
