"""The metrics of each kind of predictions as functions of sample weights, so that rows can be drawn or swapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.stats import rankdata

from cpuft.judge.metrics import LEAST_RELEVANT, RERANKING_METRICS, measure_rankings
from cpuft.judge.predictions import RunPredictions

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]
Runs = Sequence[RunPredictions]
"""One run, or two with the same rows in the same order; a single split of them."""
Name = str | int
"""Name of a metric, or the number of a class, which stands for its F1."""
Entries = tuple[Any, Any]
"""Arrays with the numbers of rows (also repeatedly), and a class of each."""


@dataclass(frozen=True)
class Observations:
    """The rows of one run or of two, or their queries, and how metrics are computed of them.

    All arrays have the observations of the first run and then those of the second one.
    """

    count: int
    """Number of observations of a run."""
    names: tuple[str, ...]
    terms: Any
    """What each observation adds to the metrics: an array or a sparse matrix, (observations, columns)."""
    measure: Callable[[Sequence[Name], Any, Numbers], dict[Name, Numbers]]
    """Computes metrics by name, each (samples,), from terms and their sample weights, (samples, observations)."""
    means: dict[str, Numbers] = field(default_factory=dict)
    """The metrics that are the mean of a value of each observation, and these values."""
    is_right: NDArray[np.bool_] | None = None
    """Which observations are wholly right; None for kinds that know no right and wrong."""
    alike: Indices | None = None
    """A number for each observation, equal for those with equal terms, where many are equal."""
    classes: tuple[str, ...] = ()
    """Names of the classes; the terms of kinds with classes are counts (`_count`)."""
    unit: str = "rows"
    """What is counted for each class, in the plural: rows, entities or words; queries where there are no classes."""
    first_rows: Indices | None = None
    """The first row of each query."""


def select_split(run: RunPredictions, suffix: str) -> RunPredictions:
    """Return the rows whose split is `suffix`, and the metrics whose names end with `suffix`, named without it."""
    metrics = {name.removesuffix(suffix): value for name, value in run.about.metrics.items() if name.endswith(suffix)}
    return run.replace(run.table.filter(run.column("split") == suffix), metrics=metrics)


def observe(runs: Runs) -> Observations:
    """Return the rows of one run or of two, or for pairs and relevance their queries."""
    return _KINDS[runs[0].about.kind](runs)


def _join(runs: Runs, name: str) -> Any:
    return np.concatenate([run.column(name) for run in runs])


# Classes, several labels and tags: metrics of counts.


def _observe_classes(runs: Runs) -> Observations:
    about = runs[0].about
    numbers = [run.number_classes(name) for name in ("label", "prediction") for run in runs]
    known, places = np.unique(np.concatenate(numbers), return_inverse=True)
    label, predicted = places.reshape(2, -1)
    is_right, rows = label == predicted, np.arange(len(label))
    terms = _count([(rows[is_right], label[is_right]), (rows, predicted), (rows, label)], len(known), is_right)
    positive = int(np.searchsorted(known, 1)) if len(about.classes) == 2 else None
    more = ["f1"] * (positive is not None) + ["matthews_correlation"] * ("matthews_correlation" in about.metrics)
    return Observations(
        len(label) // len(runs),
        ("accuracy", "f1_macro", "f1_weighted", *more),
        terms,
        partial(_measure_counts, len(known), positive, False),
        {"accuracy": is_right.astype(np.float64)},
        is_right,
        label * len(known) + predicted,
        tuple(about.classes[number] for number in known),
    )


def _observe_labels(runs: Runs) -> Observations:
    classes = runs[0].about.classes
    label, predicted = ([set(one) for one in _join(runs, name)] for name in ("label", "prediction"))
    is_right = np.asarray([a == b for a, b in zip(label, predicted)])
    return Observations(
        len(label) // len(runs),
        ("f1_micro", "f1_macro", "accuracy", "f1_weighted"),
        _count(_list_entries(classes, label, predicted), len(classes), is_right),
        partial(_measure_counts, len(classes), None, True),
        {"accuracy": is_right.astype(np.float64)},
        is_right,
        classes=classes,
    )


def _observe_tags(runs: Runs) -> Observations:
    """Observe entities if the task counts them, otherwise words."""
    from seqeval.metrics.sequence_labeling import get_entities

    label, predicted = ([list(one) for one in _join(runs, name)] for name in ("label", "prediction"))
    right_words = np.asarray([sum(map(str.__eq__, *pair)) for pair in zip(label, predicted)])
    words = np.asarray([len(one) for one in label])
    has_entities = "f1" in runs[0].about.metrics
    find = get_entities if has_entities else lambda tags: [(tag, place) for place, tag in enumerate(tags)]
    found = [[set(find(tags)) for tags in side] for side in (label, predicted)]
    classes = tuple(sorted({one[0] for side in found for row in side for one in row}))
    names = ("f1", "precision", "recall", "accuracy") if has_entities else ("accuracy",)
    return Observations(
        len(label) // len(runs),
        (*names, "f1_macro", "f1_weighted"),
        _count(_list_entries(classes, found[0], found[1], lambda one: one[0]), len(classes), right_words, words),
        partial(_measure_counts, len(classes), None, False),
        is_right=right_words == words,
        classes=classes,
        unit="entities" if has_entities else "words",
    )


def _list_entries(
    classes: Sequence[str], label: list[set[Any]], predicted: list[set[Any]], class_of: Callable[[Any], str] = str
) -> list[Entries]:
    """Return the entries of what both have, of the predictions and of the labels."""
    numbers = {name: number for number, name in enumerate(classes)}
    sides = (list(map(set.intersection, label, predicted)), predicted, label)
    entries = ([(row, numbers[class_of(one)]) for row, found in enumerate(side) for one in found] for side in sides)
    arrays = (np.asarray(one, np.int64).reshape(-1, 2) for one in entries)
    return [(one[:, 0], one[:, 1]) for one in arrays]


def _count(entries: Sequence[Entries], classes: int, right: NDArray[Any], terms: NDArray[Any] | None = None) -> Any:
    """Return a sparse matrix, (rows, 3 * classes + 2), of the counts from which metrics are computed.

    For each class: how often label and prediction have it, the prediction, the label (`entries`, in this order). Then
    how much of a row is right, and how much there is of it, which is 1 without `terms`.
    """
    everything = np.arange(len(right))
    parts = [(rows, side * classes + numbers, np.ones(len(rows))) for side, (rows, numbers) in enumerate(entries)]
    for place, values in enumerate((right, np.ones(len(right)) if terms is None else terms), 3 * classes):
        parts.append((everything, np.full(len(right), place), values))
    rows, columns, values = map(np.concatenate, zip(*parts))
    return sparse.csr_matrix((values.astype(np.float64), (rows, columns)), (len(right), 3 * classes + 2))


def _measure_counts(
    classes: int, positive: int | None, all_classes: bool, names: Sequence[Name], counts: Any, weights: Numbers
) -> dict[Name, Numbers]:
    """Return metrics of counts as scikit-learn and seqeval define them, and F1 of classes by their numbers.

    `positive` is the class whose F1 is the metric f1; None: f1 counts all classes together. With `all_classes`, the
    mean over classes contains those that no row has, as scikit-learn's for several labels.
    """
    totals = weights @ counts
    both, predicted, label = np.moveaxis(totals[:, :-2].reshape(len(totals), 3, classes), 1, 0)
    f1 = _divide(2 * both, label + predicted)
    all_both, all_predicted, all_label = (one.sum(-1) for one in (both, predicted, label))
    micro = _divide(2 * all_both, all_predicted + all_label)
    compute: dict[str, Callable[[], Numbers]] = {
        "accuracy": lambda: totals[:, -2] / totals[:, -1],
        "precision": lambda: _divide(all_both, all_predicted),
        "recall": lambda: _divide(all_both, all_label),
        "f1": lambda: micro if positive is None else f1[:, positive : positive + 1].sum(-1),
        "f1_micro": lambda: micro,
        "f1_macro": lambda: _divide(f1.sum(-1), classes if all_classes else (label + predicted > 0).sum(-1)),
        "f1_weighted": lambda: _divide((f1 * label).sum(-1), all_label),
        "matthews_correlation": lambda: _compute_matthews(both, predicted, label),
    }
    return {name: f1[:, name] if isinstance(name, int) else compute[name]() for name in names}


def _compute_matthews(both: Numbers, predicted: Numbers, label: Numbers) -> Numbers:
    """Return Matthews' correlation for any number of classes, 0 if undefined: Gorodkin (2004), as in scikit-learn."""
    rows = label.sum(-1)
    spread = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (label**2).sum(-1))
    return _divide(both.sum(-1) * rows - (predicted * label).sum(-1), np.sqrt(np.maximum(spread, 0)))


def _divide(above: Numbers, below: Any) -> Numbers:
    """Return the quotients, 0 where nothing is divided by nothing, as the libraries define metrics."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(below) == 0, 0.0, above / below)


# Scores and similarities.


def _observe_scores(runs: Runs) -> Observations:
    label, predicted = _join(runs, "label").astype(np.float64), _join(runs, "prediction").astype(np.float64)
    predicted[~np.isfinite(predicted)] = np.nan
    # The predictions of two models can be swapped only where they have the same scale.
    models = predicted.reshape(len(runs), -1)
    standard = np.concatenate([*map(_standardize, models)])
    ranks = np.concatenate([rankdata(one) for one in models])
    names: tuple[str, ...] = ("spearman", "pearson")
    if runs[0].about.kind == "score":
        names = ("mean_absolute_error", "mean_error", "pearson", "spearman", "root_mean_squared_error")
    terms = np.column_stack([label, predicted, _standardize(label), standard, ranks])
    return Observations(len(label) // len(runs), names, terms, _measure_scores)


def _standardize(values: Numbers) -> Numbers:
    """Return the values with mean 0 and deviation 1, so that sums of squares lose no digits."""
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


def _measure_scores(names: Sequence[Name], scores: Numbers, weights: Numbers) -> dict[Name, Numbers]:
    label, predicted, standard_label, standard, ranks = np.ascontiguousarray(scores.T)
    size, errors = weights.sum(-1), predicted - label
    compute: dict[Name, Callable[[], Numbers]] = {
        "mean_absolute_error": lambda: weights @ np.abs(errors) / size,
        "mean_error": lambda: weights @ errors / size,
        "root_mean_squared_error": lambda: np.sqrt(weights @ errors**2 / size),
        "pearson": lambda: _correlate(weights, standard_label, standard),
        # A prediction that is no number has a place in the order, but no rank.
        "spearman": lambda: _correlate(weights, _rank(label, weights), _rank(ranks, weights)) + 0 * ranks.sum(),
    }
    return {name: compute[name]() for name in names}


def _rank(values: Numbers, weights: Numbers) -> Numbers:
    """Return each value's rank, less the mean rank, if it occurs as often as its weight says; ties share a rank."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    together = np.add.reduceat(weights[:, np.argsort(values, kind="stable")], starts, axis=1)
    middle = np.cumsum(together, axis=1) - together / 2
    ranks: Numbers = (middle - together.sum(1, keepdims=True) / 2)[:, group]
    return ranks


def _correlate(weights: Numbers, x: Numbers, y: Numbers) -> Numbers:
    """Return Pearson's correlation, 0 with a constant; x and y are the same for all samples, or have their shape."""
    total = weights.sum(-1)

    def average(values: Numbers) -> Numbers:
        sums = weights @ values if values.ndim == 1 else np.einsum("ij,ij->i", weights, values)
        return np.asarray(sums / total)

    mean_x, mean_y = average(x), average(y)
    xx, yy, xy = average(x * x) - mean_x**2, average(y * y) - mean_y**2, average(x * y) - mean_x * mean_y
    is_constant = (xx < _ROUNDING) | (yy < _ROUNDING)
    return _divide(xy, np.where(is_constant, 0, np.sqrt(np.maximum(xx, 0) * np.maximum(yy, 0))))


_ROUNDING = 1e-12
"""Variance that rounding may give to equal values, whose mean is about 0."""


# Queries: each metric is a mean.


def _observe_relevance(runs: Runs) -> Observations:
    def measure(run: RunPredictions, name: str) -> Numbers:
        scores, relevant = run.column("prediction").astype(np.float32), run.column("label") >= LEAST_RELEVANT
        return measure_rankings(name, scores, relevant, run.column("query"))

    names = [name for name in runs[0].about.metrics if name.partition("@")[0] in RERANKING_METRICS]
    values = {name: np.concatenate([measure(run, name) for run in runs]) for name in names}
    first_rows = np.unique(runs[0].column("query"), return_index=True)[1]
    return _observe_means(values, len(first_rows), first_rows)


def _observe_pairs(runs: Runs) -> Observations:
    names = [name for name in runs[0].about.metrics if all(name in run.table.column_names for run in runs)]
    return _observe_means({name: _join(runs, name) for name in names}, len(runs[0].table))


def _observe_means(values: dict[str, Numbers], count: int, first_rows: Indices | None = None) -> Observations:
    places = {name: place for place, name in enumerate(values)}

    def measure(names: Sequence[Name], terms: Numbers, weights: Numbers) -> dict[Name, Numbers]:
        means = weights @ terms / weights.sum(-1, keepdims=True)
        return {name: means[:, places[str(name)]] for name in names}

    terms = np.column_stack([*values.values()]) if values else np.zeros((count, 0))
    return Observations(count, tuple(values), terms, measure, values, unit="queries", first_rows=first_rows)


_KINDS: dict[str, Callable[[Runs], Observations]] = {
    "class": _observe_classes,
    "labels": _observe_labels,
    "tags": _observe_tags,
    "score": _observe_scores,
    "similarity": _observe_scores,
    "relevance": _observe_relevance,
    "pairs": _observe_pairs,
}
