"""Evaluation: each rank predicts its share of the validation examples, and rank 0 computes the metrics of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from cpuft.record import EvaluationLine
from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import Indices
from cpuft.train.fast.packed_weights import PackedWeights
from cpuft.train.objective.base import Batch, Objective, Predictions
from cpuft.train.precision import autocast
from cpuft.train.ranks import broadcast_value, gather_to_first
from cpuft.train.setup import TrainingSetup

BatchPredictions = tuple[Indices, Predictions]
"""The numbers of a batch's examples in their split, and the predictions for them in the same order."""


@dataclass
class KeptPredictions:
    """What the model of one update predicted, as `Objective.list_predictions` returns it; empty on ranks but 0."""

    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Columns by the suffix of the split."""
    problem: str = ""
    """Why there are none; empty if there are."""

    def add(self, suffix: str, objective: Objective, predictions: Predictions, tokens: Tokens) -> None:
        """Keep the predictions for a split, or note any error in `problem`: such a fault must not end the training."""
        try:
            self.splits[suffix] = objective.list_predictions(predictions, tokens)
        except Exception as error:
            self.problem = repr(error)


def evaluate(setup: TrainingSetup, step: int, kept: KeptPredictions | None = None) -> EvaluationLine:
    """Evaluate the model after update `step` on all validation splits; return the metrics, named with the split's
    suffix, the same on each rank. Collective. The model is in training mode afterwards. `kept` gets rank 0's
    predictions.
    """
    start = time.perf_counter()
    setup.model.eval()
    metrics: dict[str, float] = {}
    for suffix, tokens in setup.prepared.validation.items():
        parts = _predict_on_all_ranks(setup, tokens)
        compute = None if parts is None else partial(_compute_metrics, setup.objective, parts, suffix, tokens, kept)
        found = _run_on_first(compute, setup.config.comm_timeout / 2)
        metrics |= {name + suffix: value for name, value in found.items()}
    setup.model.train()
    examples = sum(len(tokens) for tokens in setup.prepared.validation.values())
    return EvaluationLine(step, metrics, examples, time.perf_counter() - start)


def _compute_metrics(
    objective: Objective, parts: list[BatchPredictions], suffix: str, tokens: Tokens, kept: KeptPredictions | None
) -> dict[str, float]:
    predictions = join_batches(parts)
    if kept is not None:
        kept.add(suffix, objective, predictions, tokens)
    return objective.compute_metrics(predictions, tokens)


def _run_on_first(compute: Callable[[], dict[str, float]] | None, interval: float) -> dict[str, float]:
    """Return on all ranks what `compute` returns, which only rank 0 has. Other ranks get a message every `interval`
    seconds, so that --comm-timeout does not limit the computation. Collective.
    """
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(compute) if compute else None
        while True:
            if task:
                wait([task], interval)
            found: dict[str, float] | None = broadcast_value(task.result() if task and task.done() else None)
            if found is not None:
                return found


def _predict_on_all_ranks(setup: TrainingSetup, tokens: Tokens) -> list[BatchPredictions] | None:
    """Return the predictions of all ranks' batches on rank 0, and None on all others. Collective."""
    batches = plan_batches(tokens, setup.config.eval_batch_size, setup.world.size)[setup.world.rank]
    with autocast(setup.precision):
        own = predict_batches(partial(setup.objective.predict, setup.model), setup.objective, tokens, batches)
    found = gather_to_first(own)
    return None if found is None else [batch for batches in found for batch in batches]


def compute_outputs(
    model: torch.nn.Module, objective: Objective, tokens: Tokens, batch_size: int, ranks: int, precision: str
) -> Predictions:
    """Return the head's outputs for all examples in their order, an fp32 NumPy array, computed by this process alone.

    The batches are those of an evaluation on `ranks` ranks, so that the outputs are the same to the bit. The shape is
    (examples, outputs), or (examples, longest example, classes) for tags, filled up with -1. The model must be in
    evaluation mode already. `precision` is that of `autocast`. Raises ValueError: there are no examples.
    """
    batches = chain(*plan_batches(tokens, batch_size, ranks))
    with autocast(precision):
        return join_batches(predict_batches(partial(objective.outputs, model), objective, tokens, batches))


def plan_batches(tokens: Tokens, batch_size: int, ranks: int) -> list[list[Indices]]:
    """Return each rank's batches of example numbers, [] for a rank without any: examples sorted by length, shortest
    first, and dealt to ranks one by one in turn.
    """
    order = np.argsort(tokens.lengths, kind="stable")
    shares = [order[rank::ranks] for rank in range(ranks)]
    return [[share[start : start + batch_size] for start in range(0, len(share), batch_size)] for share in shares]


def predict_batches(
    predict: Callable[[Batch], Predictions], objective: Objective, tokens: Tokens, batches: Iterable[Indices]
) -> list[BatchPredictions]:
    """Call `predict` with each batch, without gradients; return (numbers of the examples, result) for each."""
    with torch.inference_mode(), PackedWeights():
        return [(examples, predict(objective.make_batch(tokens, examples))) for examples in batches]


def join_batches(parts: Sequence[BatchPredictions]) -> Predictions:
    """Return the predictions of all batches in the order of examples, fp32, (examples, longest, ...), shorter ones
    filled up with -1. The batches must contain each example of the split once. Raises ValueError: there are no batches.
    """
    width = max(predictions.shape[1] for _, predictions in parts)
    whole = np.full((sum(len(examples) for examples, _ in parts), width, *parts[0][1].shape[2:]), -1, np.float32)
    for examples, predictions in parts:
        whole[examples, : predictions.shape[1]] = predictions
    return whole
