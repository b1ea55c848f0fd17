"""What chance can do to the difference of a metric between two models that predicted the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, binomtest

_LEVEL = 0.05
"""A difference is real if chance alone makes one as large with a smaller probability."""
_LEAST_ROWS = 6
"""With fewer rows, no difference has such a small probability: two signs of five are equal with probability 2/32."""
_MOST_RESAMPLES, _LEAST_RESAMPLES = 5000, 500
_MOST_DRAWS = 2**25
"""About how many random numbers are drawn at most; with very many rows, _LEAST_RESAMPLES decides."""
_AT_ONCE = 2**21
"""Numbers of one block of resamples: 16 MB."""
_SEED = 0
_ROUNDING = 1e-12

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Paired:
    """A metric of two models, A and B, as a function of sums over the rows of a validation set.

    Rows that are alike, with both models, share a cell.
    """

    counts: Numbers
    """Number of rows of each cell."""
    a: Any
    """What a row of each cell adds to the sums of A, shape (cells, columns): an array, or a sparse one by rows."""
    b: Any
    compute: Callable[[Numbers], Numbers]
    """From sums, shape (..., columns), to the metric, shape (...)."""
    resample: Callable[[Numbers], tuple[Numbers, Numbers]] | None = None
    """From how often each row counts, shape (..., rows), to the metric of both, where it is no function of sums."""


@dataclass(frozen=True)
class Chance:
    """The metric of two models, and what chance can do to its difference."""

    a: float
    b: float
    interval: tuple[float, float] | None
    """95 % interval of B - A; None if nothing varies."""
    p: float
    """Probability of a difference at least as large if both models were equally good."""
    smallest: float | None
    """About the smallest difference that these rows can show; None if they can show none, however large."""
    is_real: bool
    """Whether the test finds a difference, and the interval does not contradict it."""
    is_same: bool
    """Whether each row counts the same for both models."""


def divide(sums: Numbers) -> Numbers:
    """Return the first sum divided by the second one, 0 where that is 0."""
    return _divide(sums[..., 0], sums[..., 1])


def _divide(above: Numbers, below: Numbers) -> Numbers:
    return np.divide(above, below, out=np.zeros(np.shape(above)), where=np.asarray(below) != 0)


def compute_f1(sums: Numbers) -> Numbers:
    """Return F1 from the numbers of found, predicted and true ones; 0 without any."""
    return _divide(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def compute_macro_f1(sums: Numbers, classes: int = 0) -> Numbers:
    """Return the mean F1 of `classes`, or of those that occur, from the numbers of all classes, as `compute_f1`."""
    found, predicted, true = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
    scores = _divide(2.0 * found, predicted + true)
    return _divide(
        scores.sum(-1), np.asarray(classes or ((predicted + true) > 0).sum(-1)) + np.zeros(scores.shape[:-1])
    )


def compute_matthews(sums: Numbers) -> Numbers:
    """Return Matthews' correlation for any number of classes, from numbers as for `compute_macro_f1`; 0 if undefined.

    The formula is that of Gorodkin (2004), which scikit-learn uses.
    """
    found, predicted, true = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1).astype(float), -2, 0)
    rows = true.sum(-1)
    spread = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (true**2).sum(-1))
    return _divide(found.sum(-1) * rows - (predicted * true).sum(-1), np.sqrt(np.maximum(spread, 0)))


def list_moments(values: Numbers, others: Numbers) -> Numbers:
    """Return for each row what the sums of `compute_pearson` need, shape (rows, 6)."""
    x, y = (_standardize(one.astype(float)) for one in (values, others))
    return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], 1)


def _standardize(values: Numbers) -> Numbers:
    """Return the values with mean 0 and deviation 1: so sums lose no digits, and two models have one scale."""
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


def compute_pearson(sums: Numbers) -> Numbers:
    """Return the correlation from the sums of `list_moments`; 0 with a constant."""
    x, y, xx, yy, xy = (sums[..., place] / sums[..., 0] for place in range(1, 6))
    spread = np.maximum(xx - x * x, 0) * np.maximum(yy - y * y, 0)
    return _divide(xy - x * y, np.where(spread > _ROUNDING, np.sqrt(spread), 0))


class Ranks:
    """The ranks of values, which depend on how often each row counts."""

    def __init__(self, values: Numbers) -> None:
        self._order = np.argsort(values, kind="stable")
        is_new = np.diff(values[self._order], prepend=np.nan) != 0
        self._starts, self._groups = np.flatnonzero(is_new), np.cumsum(is_new) - 1

    def find(self, weights: Numbers) -> Numbers:
        """Return each row's rank if it counts so often, shape (..., rows); equal values share their mean rank."""
        together = np.add.reduceat(weights[..., self._order], self._starts, axis=-1)
        middle = np.cumsum(together, axis=-1) - (together - 1) / 2
        ranks = np.empty(weights.shape)
        ranks[..., self._order] = middle[..., self._groups]
        return ranks


def correlate_weighted(weights: Numbers, values: Numbers, others: Numbers) -> Numbers:
    """Return the correlation of rows that count so often; all have the shape (..., rows)."""
    total = weights.sum(-1)
    x, y = (one - ((weights * one).sum(-1) / total)[..., None] for one in (values, others))
    spread = (weights * x * x).sum(-1) * (weights * y * y).sum(-1)
    return _divide((weights * x * y).sum(-1), np.sqrt(spread))


def judge_chance(paired: Paired) -> Chance:
    """Return the metric of both models, a 95 % interval of the difference, and a p-value; always the same ones.

    A share of the rows, such as accuracy, has McNemar's exact test and the interval of Agresti and Min (2005), which
    holds also where nearly all rows are right. Other metrics have a permutation test, which swaps the two predictions
    of random rows, and a bootstrap over rows. So that test and interval never contradict each other, the interval is
    widened to hold 0 where the test finds no difference.
    """
    a, b = (float(paired.compute(paired.counts @ one)) for one in (paired.a, paired.b))
    judge = _judge_share if _is_share(paired) else _judge_by_resampling
    interval, p, smallest = judge(paired, b - a)
    if interval and p >= _LEVEL:
        interval = (min(interval[0], 0.0), max(interval[1], 0.0))
    is_real = p < _LEVEL and not (interval and interval[0] <= 0 <= interval[1])
    is_same = not abs(paired.b - paired.a).sum()
    return Chance(a, b, interval, p, smallest if paired.counts.sum() >= _LEAST_ROWS else None, is_real, is_same)


_Found = tuple[tuple[float, float] | None, float, float]
"""Interval, p-value and smallest difference."""


def _is_share(paired: Paired) -> bool:
    """Return whether the metric is the share of the rows that are right."""
    return paired.compute is divide and all(
        bool(np.isin(one[:, 0], (0, 1)).all() and (one[:, 1] == 1).all()) for one in (paired.a, paired.b)
    )


def _judge_share(paired: Paired, difference: float) -> _Found:
    rows, change = int(paired.counts.sum()), paired.b[:, 0] - paired.a[:, 0]
    only_a, only_b = (int(paired.counts[change == one].sum()) for one in (-1, 1))
    differing = only_a + only_b
    p = float(binomtest(only_b, differing).pvalue) if differing else 1.0
    # Half a row is added to each of the four cells of right and wrong.
    middle = (only_b - only_a) / (rows + 2)
    off = 1.959964 * np.sqrt(max(differing + 1 - (only_b - only_a) ** 2 / (rows + 2), 0.0)) / (rows + 2)
    likely = max(differing, _LEAST_ROWS)
    fewer = int(binom.ppf(_LEVEL / 2, likely, 0.5))
    fewer -= int(binom.cdf(fewer, likely, 0.5) > _LEVEL / 2)
    return (max(float(middle - off), -1.0), min(float(middle + off), 1.0)), p, float(likely - 2 * fewer) / rows


def _judge_by_resampling(paired: Paired, difference: float) -> _Found:
    found = _bootstrap(paired)
    low, high = np.quantile(found, (_LEVEL / 2, 1 - _LEVEL / 2))
    swapped = np.abs(_permute(paired))
    as_large = int((swapped >= abs(difference) - _ROUNDING).sum())
    p = (1 + as_large) / (1 + len(swapped))
    # Where nearly all rows are alike, all resamples may be: then nothing is known about others.
    return (float(low), float(high)) if high - low > _ROUNDING else None, p, float(np.quantile(swapped, 1 - _LEVEL))


def _bootstrap(paired: Paired) -> Numbers:
    """Return B - A for as many rows that are drawn with replacement, the same ones for both models."""
    random, counts, found = np.random.default_rng(_SEED), paired.counts, list[Numbers]()
    rows = int(counts.sum())
    for size in _list_blocks(paired):
        if len(counts) == rows:
            drawn = np.stack([np.bincount(random.integers(rows, size=rows), minlength=rows) for _ in range(size)])
        else:
            drawn = random.multinomial(rows, counts / rows, size)
        if paired.resample:
            a, b = paired.resample(drawn)
        else:
            a, b = (paired.compute(drawn @ one) for one in (paired.a, paired.b))
        found.append(b - a)
    return np.concatenate(found)


def _permute(paired: Paired) -> Numbers:
    """Return B - A with the predictions of the two models swapped in a random half of the rows."""
    random, change, found = np.random.default_rng(_SEED), paired.b - paired.a, list[Numbers]()
    differs = np.flatnonzero(np.asarray(abs(change).sum(1)).ravel() > 0)
    counts, change = paired.counts[differs], change[differs]
    a, b = (paired.counts @ one for one in (paired.a, paired.b))
    for size in _list_blocks(paired):
        moved = random.binomial(counts, 0.5, (size, len(counts))) @ change
        found.append(paired.compute(b - moved) - paired.compute(a + moved))
    return np.concatenate(found)


def _list_blocks(paired: Paired) -> Iterator[int]:
    """Yield how many resamples are made at once, so that memory does not grow with rows or classes."""
    cells, columns = paired.a.shape
    left = min(_MOST_RESAMPLES, max(_LEAST_RESAMPLES, _MOST_DRAWS // cells))
    size = max(1, _AT_ONCE // max(cells, columns))
    while left > 0:
        yield min(size, left)
        left -= size
