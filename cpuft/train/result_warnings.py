"""Warnings of what a run has reached: a model that gives one answer for all rows, or is no better than the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cpuft.config.train import TrainConfig
from cpuft.record import EvaluationLine
from cpuft.tasks import LABEL_KINDS
from cpuft.train.data.archive import Prepared, count_classes
from cpuft.train.data.recipe import LOWER_IS_BETTER
from cpuft.train.early_stopping import is_better
from cpuft.train.evaluate import KeptPredictions
from cpuft.train.objective.base import Objective
from cpuft.train.run_warnings import RunWatch, advise_rate, find_standard_error

_FEW_OTHERS = 0.25
"""Share of the rows with other labels than one: a model that gives another label to fewer hardly tells rows apart."""
_LEAST_ROWS = 10
"""Validation rows below which nothing is said of a metric."""
_LEAST_OTHER_ROWS = 5
"""Validation rows without the commonest label, below which one answer for all rows says nothing: a model that finds
half of them misses all of 5 in 3 % of the cases."""


def find_last_warning(
    watch: RunWatch,
    objective: Objective,
    evaluation: EvaluationLine | None,
    predictions: KeptPredictions | None = None,
    baseline: Mapping[str, float] | None = None,
) -> str:
    """Return a warning of the losses or result of a run that has ended, else "". An error becomes a warning, too."""
    try:
        warning = watch.finish()
        if not warning and evaluation:
            columns = predictions.splits.get("", {}) if predictions else {}
            warning = find_result_warning(
                watch.config, objective, watch.prepared, evaluation.metrics, columns, baseline
            )
        return warning
    except Exception as error:  # scikit-learn and NumPy raise many kinds of errors
        return f"warning: the result could not be compared with that of one answer for every row ({error!r:.200})"


def find_result_warning(
    config: TrainConfig,
    objective: Objective,
    prepared: Prepared,
    metrics: Mapping[str, float],
    columns: Mapping[str, Any],
    baseline: Mapping[str, float] | None = None,
) -> str:
    """Return a warning if a model gives (nearly) one answer for all rows, or if its metrics are not clearly better than
    those of one answer or of the baseline; else "", as for fewer than 10 rows. `columns` are those of
    `Objective.list_predictions` for the first validation split, or none.
    """
    if len(prepared.validation[""]) < _LEAST_ROWS:
        return ""
    if prepared.kind == "class" and columns and (rows := _describe_main_answer(columns)):
        return f"warning: the model hardly tells the rows apart, as {rows}: {advise_rate(config)}"
    answer, constant = _find_constant_answer(objective, prepared)
    simple = dict(baseline or {})
    if config.class_weights:  # they ask for a model that gives up some accuracy, in order to find rare classes
        simple.pop("accuracy", None)
    elif found := _describe_hardly_better(prepared, metrics, constant):
        return f"warning: the model is not clearly better than {answer} for every row: {found}: {advise_rate(config)}"
    if not (found := _describe_hardly_better(prepared, metrics, simple)):
        return ""
    if not _describe_hardly_better(prepared, simple, metrics):
        return f"warning: the model is worse than the baseline: {found}: {advise_rate(config)}"
    return f"warning: the model is not clearly better than the baseline: {found}: label more rows, or use the baseline"


def _describe_main_answer(columns: Mapping[str, Any]) -> str:
    """Return the numbers of rows with the commonest prediction, if too few rows get another one; else ""."""
    labels, predictions = np.asarray(columns["label"]), np.asarray(columns["prediction"])
    names, counts = np.unique(predictions, return_counts=True)
    main = names[counts.argmax()]
    others, found = np.count_nonzero(labels != main), np.count_nonzero(predictions != main)
    # A model that finds half of the others finds so few of them by chance in 2 % of the cases (a normal distribution).
    if others < _LEAST_OTHER_ROWS or found > min(_FEW_OTHERS * others, others / 2 - math.sqrt(others)):
        return ""
    return f"it calls {counts.max():,} of {len(labels):,} rows {main}, and {len(labels) - others:,} have this label"


def _describe_hardly_better(prepared: Prepared, metrics: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Return the first metric that both have, of both, if no metric is better by a standard error; else ""."""
    described = ""
    for name in [name for name in other if name in metrics]:
        error = find_standard_error(prepared, name, metrics[name])
        limit = other[name] + (-error if name.startswith(LOWER_IS_BETTER) else error)
        if not math.isfinite(limit) or is_better(metrics[name], limit, name):
            return ""
        described = described or f"{name} {metrics[name]:.4f} (standard error {error:.4f}) against {other[name]:.4f}"
    return described


def _find_constant_answer(objective: Objective, prepared: Prepared) -> tuple[str, dict[str, float]]:
    """Return the commonest label, and the metrics of this answer for all rows; empty if too few have another one."""
    tokens = prepared.validation[""]
    if prepared.kind not in LABEL_KINDS:
        return "", {}
    if prepared.kind in ("class", "tags"):
        counts = count_classes(tokens.labels, len(prepared.labels))
        if counts.sum() - counts.max() < _LEAST_OTHER_ROWS:
            return "", {}
        one, is_tags = int(counts.argmax()), prepared.kind == "tags"
        answer = f"the {'tag' if is_tags else 'label'} {prepared.labels[one]}"
        output = np.full(tokens.lengths.max(), one) if is_tags else np.arange(len(counts)) == one
    elif (tokens.labels != tokens.labels[:1]).any():
        answer = "one score" if prepared.kind == "score" else "no label"
        output = -np.ones(tokens.labels[0].size)
    else:
        return "", {}
    outputs = np.broadcast_to(output.astype(np.float32), (len(tokens), *output.shape))
    return answer, objective.compute_metrics(outputs, tokens)
