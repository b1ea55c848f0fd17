"""Where a model is right and where it fails: metrics with intervals, of each class, by length and by a column."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.stats import binomtest

from cpuft.judge.predictions import RunPredictions
from cpuft.judge.ranking import LEAST_RELEVANT, measure_queries
from cpuft.judge.resampling import Ranks, compute_matthews, correlate_weighted

MOST_CLASSES = 20
"""Largest number of classes whose confusion matrix is whole, and whose F1 have intervals."""
_MOST_CONFUSIONS = 20
_MOST_SLICES = 20
_BINS = 15
_SAMPLES, _LEAST_SAMPLES = 1000, 200
"""Samples of the bootstrap; fewer than the first number of them with more than 5,000 different rows."""
_MOST_DRAWN = 5_000_000
_MOST_NUMBERS = 2_000_000
"""Largest number of entries of the arrays of a block of samples: 16 MB each."""

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A metric with its 95 % interval; NaN where one is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan


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
    f1: Estimate
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
    metrics: dict[str, Estimate]


@dataclass(frozen=True)
class Judgement:
    """What the predictions for the first validation split say about a model."""

    kind: str
    unit: str
    """What is counted for each class, in the plural: rows, entities or words; queries where there are no classes."""
    rows: int
    """Number of rows; of queries if the kind has queries."""
    metrics: dict[str, Estimate]
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
    """The most frequent values of the column `slice_by`, the most frequent first."""
    slice_by: str
    values: int
    """Number of different values in that column."""


@dataclass(frozen=True)
class _Sample:
    """Rows from which the bootstrap draws, those that count alike as one."""

    names: tuple[str, ...]
    """Names of the metrics."""
    counts: Indices
    """How often each row occurs."""
    measure: Callable[[Numbers], Numbers]
    """Returns the metrics for each sample, (samples, metrics or more), from how often each row occurs in it."""
    width: int = 1
    """Number of entries of the largest array that measuring a sample takes."""
    proportion: str = ""
    """Name of a metric, maybe of another one, that is a share of independent rows: its interval needs no bootstrap."""
    table: Any = None
    """Counts of classes by row (`_make_table`); None for kinds without classes."""


@dataclass(frozen=True)
class _Units:
    """What the bootstrap draws: rows, or queries."""

    count: int
    names: tuple[str, ...]
    """Names of the metrics, the most telling ones first."""
    select: Callable[[Indices, tuple[str, ...]], _Sample]
    """Returns the sample of some of them, with the metrics of these names."""
    classes: tuple[str, ...] = ()
    """Names of the classes that `select` can measure."""
    name: str = "rows"
    first_rows: Indices | None = None
    """The first row of each query."""


def judge(predictions: RunPredictions) -> Judgement:
    """Return the metrics, intervals, classes, calibration and parts of the first validation split.

    Values equal those of scikit-learn, seqeval and sentence-transformers. Intervals come from drawing rows (queries)
    with replacement, the same ones in each call; those of shares of rows are Wilson's. Nothing grows with the square of
    the number of classes.
    """
    about, predictions = predictions.about, _select_first_split(predictions)
    units = _UNITS[about.kind](predictions)
    everything = units.select(np.arange(units.count), units.names)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimates = _estimate(everything)
        metrics = dict(zip(everything.names, estimates))
        named = {name: metrics.get(name, Estimate(value)) for name, value in about.metrics.items()}
        named = {name: replace(one, value=about.metrics[name]) for name, one in named.items()}
        confusions = _count_confusions(predictions) if units.classes and about.kind != "labels" else Counter()
        has_quarters = units.first_rows is None
        values, slices = _group_by_value(predictions, units)
        return Judgement(
            about.kind,
            units.name,
            units.count,
            named | {name: one for name, one in metrics.items() if name not in named},
            _score_classes(units, everything, estimates[len(everything.names) :], confusions),
            _choose_confusions(confusions),
            _calibrate(predictions) if about.kind == "class" else None,
            _judge_parts(units, _group_by_quarter(predictions.column("tokens")) if has_quarters else []),
            _judge_parts(units, _group_by_quarter(predictions.column("label")) if about.kind == "score" else []),
            _judge_parts(units, slices),
            about.slice_by,
            values,
        )


def _select_first_split(predictions: RunPredictions) -> RunPredictions:
    splits = predictions.column("split")
    return replace(predictions, table=predictions.table.filter(splits == splits[0]))


# The bootstrap.


def _estimate(sample: _Sample) -> list[Estimate]:
    """Return the metrics of a sample with their intervals."""
    values = sample.measure(sample.counts[None].astype(np.float64))[0]
    size, drawn = int(sample.counts.sum()), len(sample.counts)
    samples = min(_SAMPLES, max(_LEAST_SAMPLES, _MOST_DRAWN // drawn))
    block = max(1, _MOST_NUMBERS // max(drawn, sample.width))
    generator, found = np.random.default_rng(0), list[Numbers]()
    for start in range(0, samples, block):
        times = generator.multinomial(size, sample.counts / size, size=min(block, samples - start))
        found.append(sample.measure(times.astype(np.float64)))
    ends = np.quantile(np.concatenate(found), (0.025, 0.975), axis=0)
    # Samples that are all alike, such as those of a model without errors, say nothing about other rows.
    ends[:, ends[0] == ends[1]] = math.nan
    estimates = [Estimate(*map(float, one)) for one in zip(values, *ends)]
    if sample.proportion in sample.names:
        place = sample.names.index(sample.proportion)
        right = round(values[place] * size)
        interval = binomtest(right, size).proportion_ci(method="wilson")
        estimates[place] = Estimate(float(values[place]), float(interval.low), float(interval.high))
    return estimates


# Classes, several labels and tags: counts of each class add up.


def _use_classes(predictions: RunPredictions) -> _Units:
    """Return the units of rows with one class each."""
    labels, found = (predictions.number_classes(name) for name in ("label", "prediction"))
    known = np.union1d(labels, found)
    labels, found = np.searchsorted(known, labels), np.searchsorted(known, found)
    positive = np.flatnonzero(known == 1) if len(predictions.about.classes) == 2 else None
    more: tuple[str, ...] = ("f1",) if positive is not None else ()
    more += tuple(name for name in ("matthews_correlation",) if name in predictions.about.metrics)
    names = ("accuracy", "f1_macro", "f1_weighted", *more)

    def select(rows: Indices, names: tuple[str, ...]) -> _Sample:
        pairs, counts = np.unique(labels[rows] * len(known) + found[rows], return_counts=True)
        cells = np.arange(len(pairs))
        wanted, predicted = pairs // len(known), pairs % len(known)
        right = wanted == predicted
        entries = [(cells[right], 0, wanted[right]), (cells, 1, predicted), (cells, 2, wanted)]
        table = _make_table(entries, len(pairs), len(known), right, np.ones(len(pairs)))
        return _count_sample(names, counts, table, len(known), "accuracy", positive)

    classes = tuple(predictions.about.classes[number] for number in known)
    return _Units(len(labels), names, select, classes)


def _use_labels(predictions: RunPredictions) -> _Units:
    """Return the units of rows with any number of classes each."""
    classes = predictions.about.classes
    sets = [[set(one) for one in predictions.column(name)] for name in ("label", "prediction")]
    right = np.asarray([label == found for label, found in zip(*sets)])
    both = [label & found for label, found in zip(*sets)]
    table = _make_table(
        _list_entries(classes, [both, *reversed(sets)]), len(both), len(classes), right, np.ones(len(both))
    )
    names = ("f1_micro", "f1_macro", "accuracy", "f1_weighted")
    return _use_table(names, table, classes, "rows", "accuracy", all_classes=True)


def _use_tags(predictions: RunPredictions) -> _Units:
    """Return the units of rows with a tag for each word: entities if the task counts them, otherwise words."""
    from seqeval.metrics.sequence_labeling import get_entities

    tags = [[list(one) for one in predictions.column(name)] for name in ("label", "prediction")]
    right = np.asarray([sum(map(str.__eq__, *pair)) for pair in zip(*tags)])
    words = np.asarray([len(one) for one in tags[0]], np.float64)
    has_entities = "f1" in predictions.about.metrics
    find = get_entities if has_entities else lambda one: [(tag, place) for place, tag in enumerate(one)]
    sets = [[set(find(one)) for one in side] for side in tags]
    sets = [[label & found for label, found in zip(*sets)], *reversed(sets)]
    kinds = [[[thing[0] for thing in one] for one in side] for side in sets]
    classes = tuple(sorted({name for side in kinds for one in side for name in one}))
    table = _make_table(_list_entries(classes, kinds), len(words), len(classes), right, words)
    names = ("f1", "precision", "recall", "accuracy") if has_entities else ("accuracy",)
    unit = "entities" if has_entities else "words"
    return _use_table((*names, "f1_macro", "f1_weighted"), table, classes, unit)


Entries = list[tuple[Indices, int, Indices]]
"""Rows (also repeatedly), 0 for what is in both, 1 for predictions or 2 for labels, and the numbers of the classes."""


def _list_entries(classes: Sequence[str], sides: Sequence[Sequence[Iterable[str]]]) -> Entries:
    """Return the entries of what is in both, predictions and labels, each with names of classes for each row."""
    numbers = {name: number for number, name in enumerate(classes)}
    entries = Entries()
    for side, rows in enumerate(sides):
        found = [(row, numbers[name]) for row, names in enumerate(rows) for name in names]
        places, classes_of = np.asarray(found, np.int64).reshape(-1, 2).T
        entries.append((places, side, classes_of))
    return entries


def _make_table(entries: Entries, rows: int, classes: int, right: NDArray[Any], terms: NDArray[Any]) -> Any:
    """Return a sparse matrix (rows, 3 * classes + 2): counts by side and class, then right terms, then all terms."""
    everything = np.arange(rows)
    parts = [(places, side * classes + numbers, np.ones(len(places))) for places, side, numbers in entries]
    parts += [(everything, np.full(rows, 3 * classes), right), (everything, np.full(rows, 3 * classes + 1), terms)]
    places, columns, values = map(np.concatenate, zip(*parts))
    return sparse.csr_matrix((values.astype(np.float64), (places, columns)), (rows, 3 * classes + 2))


def _use_table(
    names: tuple[str, ...],
    table: Any,
    classes: tuple[str, ...],
    unit: str,
    proportion: str = "",
    all_classes: bool = False,
) -> _Units:
    def select(rows: Indices, names: tuple[str, ...]) -> _Sample:
        ones = np.ones(len(rows), np.int64)
        return _count_sample(names, ones, table[rows], len(classes), proportion, None, all_classes)

    return _Units(table.shape[0], names, select, classes, unit)


def _count_sample(
    names: tuple[str, ...],
    counts: Indices,
    table: Any,
    classes: int,
    proportion: str,
    positive: Indices | None,
    all_classes: bool = False,
) -> _Sample:
    measure = partial(_measure_counts, names, table, classes, positive, all_classes)
    return _Sample(names, counts, measure, table.shape[1], proportion, table)


def _measure_counts(
    names: tuple[str, ...], table: Any, classes: int, positive: Indices | None, all_classes: bool, times: Numbers
) -> Numbers:
    """Return the metrics by name, then the F1 of each class if there are at most `MOST_CLASSES`.

    `positive` is the class whose F1 is the metric f1; None: f1 counts all classes together. With `all_classes`, the
    mean over classes contains those that no row has, as scikit-learn's for several labels.
    """
    totals = times @ table
    both, found, labels = (totals[:, side * classes : (side + 1) * classes] for side in range(3))
    right, terms = totals[:, -2], totals[:, -1]
    f1 = _divide(2 * both, labels + found)
    sums = [one.sum(-1) for one in (both, found, labels)]
    micro = _divide(2 * sums[0], sums[1] + sums[2])
    measured: dict[str, Callable[[], Numbers]] = {
        "accuracy": lambda: right / terms,
        "precision": lambda: _divide(sums[0], sums[1]),
        "recall": lambda: _divide(sums[0], sums[2]),
        "f1": lambda: micro if positive is None else f1[:, positive].sum(-1),
        "f1_micro": lambda: micro,
        "f1_macro": lambda: _divide(f1.sum(-1), classes if all_classes else (labels + found > 0).sum(-1)),
        "f1_weighted": lambda: _divide((f1 * labels).sum(-1), sums[2]),
        "matthews_correlation": lambda: compute_matthews(totals[:, :-2]),
    }
    columns = [measured[name]() for name in names] + ([*f1.T] if classes <= MOST_CLASSES else [])
    return np.column_stack(columns)


def _divide(above: Any, below: Any) -> Numbers:
    """Return the quotients, 0 where nothing is divided by nothing, as the libraries define metrics."""
    below = np.asarray(below)
    result: Numbers = np.where(below == 0, 0.0, above / below)
    return result


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
    units: _Units, everything: _Sample, f1: Sequence[Estimate], confusions: Counter[tuple[str, str]]
) -> list[ClassScore]:
    """Return the scores of the classes that a label or a prediction has; `f1` has the intervals, if there are any."""
    if not units.classes:
        return []
    totals = everything.counts.astype(np.float64) @ everything.table
    both, found, labels = totals[:-2].reshape(3, -1)
    mistaken = dict[str, tuple[int, str]]()
    for (label, prediction), rows in confusions.items():
        if label != prediction and rows > mistaken.get(label, (0, ""))[0]:
            mistaken[label] = rows, prediction
    scores = []
    for place in np.flatnonzero(labels + found).tolist():
        name = units.classes[place]
        rows, prediction = mistaken.get(name, (0, ""))
        value = float(2 * both[place] / (labels[place] + found[place]))
        scores.append(
            ClassScore(
                name,
                int(labels[place]),
                int(found[place]),
                float(both[place] / found[place]),
                float(both[place] / labels[place]),
                f1[place] if f1 else Estimate(value),
                prediction,
                rows,
            )
        )
    return scores


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


# Scores and queries.


def _use_scores(predictions: RunPredictions) -> _Units:
    """Return the units of rows with a score each, or of pairs of texts, whose cosines have another scale."""
    labels, found = (predictions.column(name).astype(np.float64) for name in ("label", "prediction"))
    found[~np.isfinite(found)] = math.nan
    names: tuple[str, ...] = ("spearman", "pearson")
    if predictions.about.kind == "score":
        names = ("mean_absolute_error", "mean_error", "pearson", "spearman", "root_mean_squared_error")

    def select(rows: Indices, names: tuple[str, ...]) -> _Sample:
        pair = labels[rows], found[rows]
        measure = partial(_measure_scores, names, *pair, Ranks(pair[0]), Ranks(pair[1]))
        return _Sample(names, np.ones(len(rows), np.int64), measure)

    return _Units(len(labels), names, select)


def _measure_scores(
    names: tuple[str, ...], labels: Numbers, found: Numbers, label_ranks: Ranks, found_ranks: Ranks, times: Numbers
) -> Numbers:
    size, errors = times.sum(-1), found - labels
    # A prediction that is no number has a place in the order, but no rank.
    is_known = 0 * errors.sum()
    measured: dict[str, Callable[[], Numbers]] = {
        "mean_absolute_error": lambda: times @ np.abs(errors) / size,
        "mean_error": lambda: times @ errors / size,
        "root_mean_squared_error": lambda: np.sqrt(times @ errors**2 / size),
        "pearson": lambda: correlate_weighted(times, labels, found),
        "spearman": lambda: correlate_weighted(times, label_ranks.find(times), found_ranks.find(times)) + is_known,
    }
    return np.column_stack([measured[name]() for name in names])


def _use_relevance(predictions: RunPredictions) -> _Units:
    queries = predictions.column("query")
    relevant = predictions.column("label") >= LEAST_RELEVANT
    names = tuple(predictions.about.metrics)
    scores = predictions.column("prediction").astype(np.float32)
    values = {name: measure_queries(name, scores, relevant, queries) for name in names}
    return _use_means(values, np.unique(queries, return_index=True)[1])


def _use_pairs(predictions: RunPredictions) -> _Units:
    values = {name: predictions.column(name) for name in predictions.about.metrics}
    return _use_means(values, np.arange(len(predictions.table)))


def _use_means(values: dict[str, Numbers], first_rows: Indices) -> _Units:
    """Return the units of queries, each of which has a value of each metric."""
    # Of the first K documents of a query, one is relevant or none.
    proportion = next((name for name in values if name.startswith("accuracy@")), "")

    def select(queries: Indices, names: tuple[str, ...]) -> _Sample:
        chosen = np.column_stack([values[name][queries] for name in names])
        measure = partial(_measure_means, chosen)
        return _Sample(names, np.ones(len(queries), np.int64), measure, len(names), proportion)

    return _Units(len(first_rows), tuple(values), select, name="queries", first_rows=first_rows)


def _measure_means(columns: Numbers, times: Numbers) -> Numbers:
    means: Numbers = times @ columns / times.sum(-1, keepdims=True)
    return means


_UNITS: dict[str, Callable[[RunPredictions], _Units]] = {
    "class": _use_classes,
    "labels": _use_labels,
    "tags": _use_tags,
    "score": _use_scores,
    "similarity": _use_scores,
    "relevance": _use_relevance,
    "pairs": _use_pairs,
}

# Parts of the rows.

Groups = list[tuple[str, Indices]]
"""Names of parts, and the numbers of their units."""


def _judge_parts(units: _Units, groups: Groups) -> list[Part]:
    """Return the two most telling metrics of each part; one part alone says nothing."""
    if len(groups) < 2:
        return []
    names = units.names[:2]
    return [
        Part(name, len(members), dict(zip(names, _estimate(units.select(members, names))))) for name, members in groups
    ]


def _group_by_quarter(values: NDArray[Any]) -> Groups:
    """Divide rows into up to four groups of about the same size, by ascending values; equal values stay together."""
    if not np.isfinite(values).all():
        return []
    numbers = np.searchsorted(np.unique(np.quantile(values, (0.25, 0.5, 0.75))), values)
    groups = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
    return [(f"{values[one].min():.4g} to {values[one].max():.4g}", one) for one in groups]


def _group_by_value(predictions: RunPredictions, units: _Units) -> tuple[int, Groups]:
    """Return the number of different values of `slice`, and the units with each of the most frequent ones."""
    if "slice" not in predictions.table.column_names:
        return 0, []
    values = predictions.column("slice")
    values = values if units.first_rows is None else values[units.first_rows]
    known, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MOST_SLICES]
    return len(known), [(str(known[number]), np.flatnonzero(numbers == number)) for number in most]
