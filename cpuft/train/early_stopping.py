"""Which evaluation of a run is the best, and whether a run without a better one ends (`--early-stopping`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cpuft.record import EvaluationLine
from cpuft.train.data.recipe import LOWER_IS_BETTER


def is_better(value: float, than: float, metric: str) -> bool:
    """Return whether `value` is better than the other: lower for perplexity, else higher; False if equal or nan."""
    return value < than if metric.startswith(LOWER_IS_BETTER) else value > than


def find_best(evaluations: Sequence[EvaluationLine], metric: str) -> EvaluationLine | None:
    """Return the evaluation with the best value of a metric, of equal ones the first; None without evaluations. One
    whose value is nan is the best only if all are. KeyError: an evaluation lacks the metric.
    """
    choose = min if metric.startswith(LOWER_IS_BETTER) else max
    known = [line for line in evaluations if not math.isnan(line.metrics[metric])]
    return choose(known or evaluations, key=lambda line: line.metrics[metric], default=None)


def should_stop_early(evaluations: Sequence[EvaluationLine], metric: str, patience: int) -> bool:
    """Return whether at least `patience` evaluations have followed the best one; False with `patience` 0."""
    # The rule of EarlyStoppingCallback in transformers.
    best = find_best(evaluations, metric)
    return bool(patience and best) and len(evaluations) - 1 - evaluations.index(best) >= patience
