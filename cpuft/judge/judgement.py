"""Where a model is right and where it fails: metrics with intervals, of each class, by length and by a column."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.judge.predictions import RunPredictions
from cpuft.judge.resampling import MetricEstimate, estimate_metrics
from cpuft.judge.weighted_metrics import Indices, Observations, observe, select_split

MOST_CLASSES = 20
"""Largest number of classes whose confusion matrix is whole, and whose F1 have intervals."""
_MOST_CONFUSIONS = 20
_MOST_SLICES = 20
_BINS = 15


@dataclass(frozen=True)
class ClassScore:
    """How well a model predicts one class, type of entity or tag; NaN where nothing was divided by nothing."""

    name: str
    rows: int
    """Number of validation rows (entities, words) that have it."""
    predicted: int
    """Number of them that are predicted to have it."""
    precision: float
    recall: float
    f1: MetricEstimate
    """It has an interval with at most `MOST_CLASSES` classes."""
    mistaken_for: str = ""
    """The wrong class that is predicted most often for it; empty if there is none."""
    mistaken: int = 0
    """Number of its rows for which `mistaken_for` is predicted."""


@dataclass(frozen=True)
class Confusion:
    """How many rows with a label have a prediction."""

    label: str
    prediction: str
    rows: int


@dataclass(frozen=True)
class Bin:
    """The rows whose predictions have about the same probability."""

    confidence: float
    """Mean probability of their predictions."""
    accuracy: float
    rows: int


@dataclass(frozen=True)
class Calibration:
    """Whether the probabilities of predictions tell how often they are right."""

    error: float
    """Expected calibration error: mean difference between confidence and accuracy of 15 bins of equal width (Guo and
    others 2017, arXiv:1706.04599)."""
    confidence: float
    accuracy: float
    bins: list[Bin]


@dataclass(frozen=True)
class Part:
    """The metrics of a part of the validation rows."""

    name: str
    rows: int
    metrics: dict[str, MetricEstimate]


@dataclass(frozen=True)
class Judgement:
    """What the predictions for the first validation split say about a model."""

    kind: str
    unit: str
    """What is counted for each class, in the plural: rows, entities or words; queries where there are no classes."""
    rows: int
    """Number of rows; of queries if the kind has queries."""
    metrics: dict[str, MetricEstimate]
    """The task's metrics with the values of the record, then others."""
    classes: list[ClassScore]
    """The classes that validation rows or predictions have, in their order; empty for kinds without classes."""
    confusions: list[Confusion]
    """All with at most `MOST_CLASSES` classes, otherwise the most frequent wrong ones; the most frequent first."""
    calibration: Calibration | None
    lengths: list[Part]
    """Quarters of the rows by their number of tokens."""
    ranges: list[Part]
    """Quarters of the rows by their score."""
    slices: list[Part]
    slice_by: str
    values: int

    @property
    def of_rows(self) -> str:
        """What `rows` counts: "queries" or "rows"."""
        return "queries" if self.unit == "queries" else "rows"


def judge(predictions: RunPredictions) -> Judgement:
    """Return the metrics, intervals, classes, calibration and parts of the first validation split.

    Values equal those of scikit-learn, seqeval and sentence-transformers. Intervals come from drawing rows (queries)
    with replacement, the same ones in each call; those of shares of rows are Wilson's.
    """
    about = predictions.about
    predictions = select_split(predictions, predictions.column("split")[0])
    observations = observe([predictions])
    classes, is_query = observations.classes, observations.unit == "queries"
    numbers = range(len(classes) if len(classes) <= MOST_CLASSES else 0)
    estimates = estimate_metrics(observations, (*observations.names, *numbers), np.arange(observations.count))
    metrics = {
        name: replace(estimates.get(name, MetricEstimate(value)), value=value) for name, value in about.metrics.items()
    }
    confusions = _count_confusions(predictions) if classes and about.kind != "labels" else Counter()
    values, slices = _group_by_value(predictions, observations.first_rows)
    return Judgement(
        about.kind,
        observations.unit,
        observations.count,
        metrics | {name: estimates[name] for name in observations.names if name not in metrics},
        _score_classes(observations, [estimates[number] for number in numbers], confusions),
        _choose_confusions(confusions),
        _calibrate(predictions) if about.kind == "class" else None,
        _judge_parts(observations, [] if is_query else _group_by_quarter(predictions.column("tokens"))),
        _judge_parts(observations, _group_by_quarter(predictions.column("label")) if about.kind == "score" else []),
        _judge_parts(observations, slices),
        about.slice_by,
        values,
    )


def _count_confusions(predictions: RunPredictions) -> Counter[tuple[str, str]]:
    """Count pairs of label and prediction: of rows, or of words, where B- and the like are left out."""
    labels, found = predictions.column("label"), predictions.column("prediction")
    if predictions.about.kind == "class":
        return Counter(zip(labels, found))
    starts = "f1" in predictions.about.metrics
    pairs = (pair for row in zip(labels, found) for pair in zip(*row))
    return Counter((_drop_start(a), _drop_start(b)) if starts else (a, b) for a, b in pairs)


def _drop_start(tag: str) -> str:
    return tag.partition("-")[2] or tag


def _score_classes(
    observations: Observations, f1: Sequence[MetricEstimate], confusions: Counter[tuple[str, str]]
) -> list[ClassScore]:
    """Return the scores of the classes that a label or a prediction has; `f1` has the intervals, if there are any."""
    if not observations.classes:
        return []
    both, predicted, label = np.asarray(observations.terms.sum(0)).ravel()[:-2].reshape(3, -1).tolist()
    mistaken = dict[str, tuple[str, int]]()
    for (name, prediction), rows in confusions.most_common():
        if name != prediction:
            mistaken.setdefault(name, (prediction, rows))
    return [
        ClassScore(
            name,
            int(label[place]),
            int(predicted[place]),
            both[place] / predicted[place] if predicted[place] else math.nan,
            both[place] / label[place] if label[place] else math.nan,
            f1[place] if f1 else MetricEstimate(2 * both[place] / (label[place] + predicted[place])),
            *mistaken.get(name, ()),
        )
        for place, name in enumerate(observations.classes)
        if label[place] + predicted[place]
    ]


def _choose_confusions(confusions: Counter[tuple[str, str]]) -> list[Confusion]:
    ordered = [Confusion(*names, rows) for names, rows in confusions.most_common()]
    if len({name for names in confusions for name in names}) <= MOST_CLASSES:
        return ordered
    return [one for one in ordered if one.label != one.prediction][:_MOST_CONFUSIONS]


def _calibrate(predictions: RunPredictions) -> Calibration | None:
    """Compare the probabilities of predictions with how often they are right; rows without a number are left out."""
    confidence = predictions.column("confidence").astype(np.float64)
    right = predictions.column("label") == predictions.column("prediction")
    known = np.isfinite(confidence)
    confidence, right = confidence[known], right[known]
    if not len(confidence):
        return None
    numbers = np.searchsorted(np.linspace(0, 1, _BINS + 1)[1:-1], confidence)
    rows, sums, rights = (np.bincount(numbers, weights, _BINS) for weights in (None, confidence, right))
    bins = [Bin(s / n, r / n, int(n)) for n, s, r in zip(rows.tolist(), sums.tolist(), rights.tolist()) if n]
    error = float(np.abs(sums - rights).sum() / len(confidence))
    return Calibration(error, float(confidence.mean()), float(right.mean()), bins)


# Parts of the rows.

Groups = list[tuple[str, Indices]]
"""Names of parts, and the numbers of their units."""


def _judge_parts(observations: Observations, groups: Groups) -> list[Part]:
    """Return the two most telling metrics of each part; one part alone says nothing."""
    names = observations.names[:2]
    found = [(name, rows, estimate_metrics(observations, names, rows)) for name, rows in groups if len(groups) > 1]
    return [Part(name, len(rows), {name: metrics[name] for name in names}) for name, rows, metrics in found]


def _group_by_quarter(values: NDArray[Any]) -> Groups:
    """Divide rows into up to four groups of about the same size, by ascending values; equal values stay together."""
    if not np.isfinite(values).all():
        return []
    numbers = np.searchsorted(np.unique(np.quantile(values, (0.25, 0.5, 0.75))), values)
    groups = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
    return [(f"{values[one].min():.4g} to {values[one].max():.4g}", one) for one in groups]


def _group_by_value(predictions: RunPredictions, first_rows: Indices | None) -> tuple[int, Groups]:
    """Return the number of different values of `slice`, and the rows (queries) with each of the most frequent ones."""
    if "slice" not in predictions.table.column_names:
        return 0, []
    values = predictions.column("slice")
    values = values if first_rows is None else values[first_rows]
    known, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MOST_SLICES]
    return len(known), [(str(known[number]), np.flatnonzero(numbers == number)) for number in most]
