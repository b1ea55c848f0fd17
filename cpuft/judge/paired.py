"""The metrics of two runs' predictions for the same rows, in the form that `judge_chance` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array

from cpuft.errors import CpuftError
from cpuft.judge.predictions import RunPredictions
from cpuft.judge.ranking import LEAST_RELEVANT, measure_queries
from cpuft.judge.resampling import (
    Numbers,
    Paired,
    Ranks,
    compute_f1,
    compute_macro_f1,
    compute_matthews,
    compute_pearson,
    correlate_weighted,
    divide,
    list_moments,
)

if TYPE_CHECKING:
    import pyarrow

_Columns = tuple[Any, ...]
"""The columns `label`, `prediction` of A and `prediction` of B of the same rows."""


@dataclass(frozen=True)
class PairedMetric:
    """A metric of two runs, and in how many rows each of them was better."""

    paired: Paired
    better: tuple[int, int] | None
    """Number of rows, or queries, in which only A was right (or A was better), and the same for B; None for scores."""


def list_paired_metrics(a: RunPredictions, b: RunPredictions) -> dict[str, PairedMetric]:
    """Return by name the metrics that both runs have reported and whose rows tell them, in the order of A's.

    The rows of both have the same order. Raises CpuftError: a prediction is NaN or infinite.
    """
    for table in (a.table, b.table):
        numbers = (one.to_numpy() for one in table.columns if str(one.type) in ("float", "double"))
        if not all(np.isfinite(one).all() for one in numbers):
            raise CpuftError("one of the runs predicts no numbers (NaN): train it again with a smaller --learning-rate")
    splits = a.column("split").astype(str)
    suffixes = sorted(set(splits.tolist()), key=len, reverse=True)
    found = dict[str, PairedMetric]()
    for name in a.about.metrics:
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is None or name not in b.about.metrics:
            continue
        rows = np.flatnonzero(splits == suffix)
        of_a, of_b = a.table.take(rows), b.table.take(rows)
        if metric := _KINDS[a.about.kind](name.removesuffix(suffix), of_a, of_b, a.about.classes):
            found[name] = metric
    return found


def _take_columns(a: pyarrow.Table, b: pyarrow.Table) -> _Columns:
    columns = (a.column("label"), a.column("prediction"), b.column("prediction"))
    return tuple(one.to_numpy() for one in columns)


def _pair_classes(name: str, a: pyarrow.Table, b: pyarrow.Table, classes: Sequence[str]) -> PairedMetric | None:
    columns = _take_columns(a, b)
    known, numbers = np.unique(np.concatenate(columns), return_inverse=True)
    cells, counts = np.unique(numbers.reshape(3, -1).T, axis=0, return_counts=True)
    label, of_a, of_b = cells.T
    positive = known.tolist().index(classes[1]) if len(classes) > 1 and classes[1] in known else -1
    statistics: dict[str, tuple[Callable[[Numbers], Any], Callable[[Numbers], Numbers]]] = {
        "accuracy": (lambda one: _stack(one == label, np.ones(len(one))), divide),
        "f1": (
            lambda one: _stack((one == label) & (label == positive), one == positive, label == positive),
            compute_f1,
        ),
        "f1_macro": (lambda one: _count_by_class(one, label, len(known)), compute_macro_f1),
        "matthews_correlation": (lambda one: _count_by_class(one, label, len(known)), compute_matthews),
    }
    if name not in statistics:
        return None
    count, compute = statistics[name]
    paired = Paired(counts, count(of_a), count(of_b), compute)
    return PairedMetric(paired, _count_better(of_a == label, of_b == label, counts))


def _count_by_class(predicted: Numbers, label: Numbers, classes: int) -> Any:
    """Return for each cell what it adds to the numbers of found, predicted and true rows of all classes."""
    cells, is_right = np.arange(len(label)), predicted == label
    rows = np.concatenate([cells[is_right], cells, cells])
    columns = np.concatenate([label[is_right], classes + predicted, 2 * classes + label])
    return csr_array((np.ones(len(rows), np.int64), (rows, columns)), shape=(len(label), 3 * classes))


def _pair_label_sets(name: str, a: pyarrow.Table, b: pyarrow.Table, classes: Sequence[str]) -> PairedMetric | None:
    label, of_a, of_b = ([frozenset(one) for one in column] for column in _take_columns(a, b))
    numbers = {one: number for number, one in enumerate(classes)}

    def count_exact(rows: Sequence[frozenset[str]]) -> Numbers:
        return _stack([one == true for one, true in zip(rows, label)], np.ones(len(rows)))

    def count_labels(rows: Sequence[frozenset[str]]) -> Numbers:
        return np.asarray([(len(one & true), len(one), len(true)) for one, true in zip(rows, label)])

    def count_by_class(rows: Sequence[frozenset[str]]) -> Any:
        places = [
            (row, part * len(classes) + numbers[name])
            for row, (one, true) in enumerate(zip(rows, label))
            for part, names in enumerate((one & true, one, true))
            for name in names
        ]
        at = np.asarray(places, np.int64).reshape(-1, 2).T
        return csr_array((np.ones(at.shape[1], np.int64), at), shape=(len(rows), 3 * len(classes)))

    statistics: dict[str, tuple[Callable[[Sequence[frozenset[str]]], Any], Callable[[Numbers], Numbers]]] = {
        "accuracy": (count_exact, divide),
        "f1_micro": (count_labels, compute_f1),
        "f1_macro": (count_by_class, partial(compute_macro_f1, classes=len(classes))),
    }
    if name not in statistics:
        return None
    count, compute = statistics[name]
    ones = np.ones(len(label), np.int64)
    better = _count_better(count_exact(of_a)[:, 0], count_exact(of_b)[:, 0], ones)
    return PairedMetric(Paired(ones, count(of_a), count(of_b), compute), better)


def _pair_tags(name: str, a: pyarrow.Table, b: pyarrow.Table, _: Sequence[str]) -> PairedMetric | None:
    from seqeval.metrics.sequence_labeling import get_entities

    label, of_a, of_b = ([list(one) for one in column] for column in _take_columns(a, b))

    def count_words(rows: Sequence[list[str]]) -> Numbers:
        return np.asarray([(sum(map(str.__eq__, one, true)), len(true)) for one, true in zip(rows, label)])

    def count_entities(rows: Sequence[list[str]]) -> Numbers:
        pairs = ((set(get_entities(one)), set(get_entities(true))) for one, true in zip(rows, label))
        return np.asarray([(len(one & true), len(one), len(true)) for one, true in pairs])

    statistics: dict[str, tuple[Callable[[Sequence[list[str]]], Numbers], Callable[[Numbers], Numbers]]] = {
        "accuracy": (count_words, divide),
        "f1": (count_entities, compute_f1),
        "precision": (lambda rows: count_entities(rows)[:, :2], divide),
        "recall": (lambda rows: count_entities(rows)[:, ::2], divide),
    }
    if name not in statistics:
        return None
    count, compute = statistics[name]
    ones = np.ones(len(label), np.int64)
    right_a, right_b = (np.asarray([one == true for one, true in zip(rows, label)], bool) for rows in (of_a, of_b))
    return PairedMetric(Paired(ones, count(of_a), count(of_b), compute), _count_better(right_a, right_b, ones))


def _pair_scores(name: str, a: pyarrow.Table, b: pyarrow.Table, _: Sequence[str]) -> PairedMetric | None:
    if name not in ("pearson", "spearman"):
        return None
    columns = _take_columns(a, b)
    ones, ranks = np.ones(len(columns[0]), np.int64), [Ranks(one) for one in columns]
    label, of_a, of_b = columns if name == "pearson" else [one.find(ones) for one in ranks]

    def correlate_ranks(weights: Numbers) -> tuple[Numbers, Numbers]:
        label, of_a, of_b = (one.find(weights) for one in ranks)
        return correlate_weighted(weights, label, of_a), correlate_weighted(weights, label, of_b)

    moments = list_moments(label, of_a), list_moments(label, of_b)
    return PairedMetric(Paired(ones, *moments, compute_pearson, correlate_ranks if name == "spearman" else None), None)


def _pair_rankings(name: str, a: pyarrow.Table, b: pyarrow.Table, _: Sequence[str]) -> PairedMetric | None:
    label, of_a, of_b = _take_columns(a, b)
    if name.partition("@")[0] not in ("ndcg", "mrr", "map"):
        return None
    queries = a.column("query").to_numpy()
    return _pair_means(*(measure_queries(name, one, label >= LEAST_RELEVANT, queries) for one in (of_a, of_b)))


def _pair_queries(name: str, a: pyarrow.Table, b: pyarrow.Table, _: Sequence[str]) -> PairedMetric | None:
    if not all(name in one.column_names for one in (a, b)):
        return None
    return _pair_means(*(one.column(name).to_numpy() for one in (a, b)))


def _pair_means(a: Numbers, b: Numbers) -> PairedMetric:
    """Return a metric that is the mean of the values of queries."""
    ones = np.ones(len(a), np.int64)
    return PairedMetric(Paired(ones, _stack(a, ones), _stack(b, ones), divide), _count_better(a, b, ones))


def _stack(*columns: Any) -> Numbers:
    return np.stack([np.asarray(one, float) for one in columns], 1)


def _count_better(a: Numbers, b: Numbers, counts: Numbers) -> tuple[int, int]:
    return int(counts[a > b].sum()), int(counts[b > a].sum())


_KINDS = {
    "class": _pair_classes,
    "labels": _pair_label_sets,
    "tags": _pair_tags,
    "score": _pair_scores,
    "similarity": _pair_scores,
    "relevance": _pair_rankings,
    "pairs": _pair_queries,
}
"""How the metrics of each kind of task are counted, by `Task.kind`."""
