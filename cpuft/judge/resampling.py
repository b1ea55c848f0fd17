"""What chance can do to metrics: bootstrap intervals of one model, and tests of the difference between two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binom, binomtest

from cpuft.judge.weighted_metrics import Indices, Name, Numbers, Observations

_LEVEL = 0.05
"""A difference is real if chance alone makes one as large with a smaller probability."""
_LEAST_ROWS = 6
"""With fewer rows, no difference has such a small probability: two signs of five are equal with probability 2/32."""
_ESTIMATE_SAMPLES, _DIFFERENCE_SAMPLES = (200, 1000, 5_000_000), (500, 5000, 2**25)
"""The least and the most samples, and about how many random numbers are drawn for them."""
_MOST_NUMBERS = 2**18
"""Largest number of entries of the arrays of a block of samples: 2 MB each."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class MetricEstimate:
    """A metric with its 95 % interval; NaN where one is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between run A and run B, over the rows that both predicted."""

    metric: str
    a: float
    b: float
    interval: tuple[float, float] | None
    """95 % interval of B - A, paired by row; None if no resample differs from the others."""
    p: float
    """Probability of a difference at least as large if both models were equally good."""
    smallest: float | None
    """About the smallest difference that these rows can show; None if they can show none, however large."""
    is_real: bool
    """Whether chance alone is unlikely to make such a difference: p is below 5 %, and 0 is not in the interval."""
    is_same: bool
    """Whether each row counts the same for both."""
    rows: int
    """Number of validation rows; of queries in search."""
    better: tuple[int, int] | None
    """Number of rows in which only A was right, and only B; of queries for which A, and B, was better. None for
    scores."""

    @property
    def difference(self) -> float:
        """B - A."""
        return self.b - self.a


def _merge_alike(observations: Observations, rows: Indices) -> tuple[Indices, Indices]:
    """Return one observation for each group of equal ones (with both models), and the number of each group."""
    if observations.alike is None:
        return rows, np.ones(len(rows), np.int64)
    alike = observations.alike.reshape(-1, observations.count)[:, rows]
    _, first, counts = np.unique(alike, axis=1, return_index=True, return_counts=True)
    return rows[first], counts


def _draw_weights(counts: Indices, sizes: Iterator[int]) -> Iterator[Numbers]:
    """Yield how often each observation is drawn if as many as there are are drawn with replacement."""
    random, total = np.random.default_rng(0), int(counts.sum())
    for size in sizes:
        if len(counts) == total:
            drawn = [np.bincount(random.integers(total, size=total), minlength=total) for _ in range(size)]
            yield np.stack(drawn).astype(np.float64)
        else:
            yield random.multinomial(total, counts / total, size).astype(np.float64)


def _list_blocks(terms: Any, samples: tuple[int, int, int]) -> Iterator[int]:
    """Yield how many samples are made at once, so that memory does not grow with observations or classes."""
    cells, columns = terms.shape
    least, most, numbers = samples
    left, size = min(most, max(least, numbers // cells)), max(1, _MOST_NUMBERS // max(cells, columns))
    while left > 0:
        yield min(size, left)
        left -= size


def _join_samples(samples: Sequence[dict[Name, Numbers]]) -> dict[Name, Numbers]:
    return {name: np.concatenate([one[name] for one in samples]) for name in samples[0]}


def _is_share(values: Numbers) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def estimate_metrics(observations: Observations, names: Sequence[Name], rows: Indices) -> dict[Name, MetricEstimate]:
    """Return metrics of the observations `rows` with 95 % intervals: Wilson's for shares, else those of a bootstrap.

    The bounds are NaN if all samples of the bootstrap have the same value. A number in `names` is for a class's F1.
    """
    first, counts = _merge_alike(observations, rows)
    terms = observations.terms[first]
    values = observations.measure(names, terms, counts[None].astype(np.float64))
    blocks = _list_blocks(terms, _ESTIMATE_SAMPLES)
    samples = _join_samples([observations.measure(names, terms, drawn) for drawn in _draw_weights(counts, blocks)])
    found = dict[Name, MetricEstimate]()
    for name, (value,) in values.items():
        low, high = np.quantile(samples[name], (_LEVEL / 2, 1 - _LEVEL / 2))
        if name in observations.means and _is_share(observations.means[str(name)]):
            interval = binomtest(round(value * len(rows)), len(rows)).proportion_ci(method="wilson")
            low, high = interval.low, interval.high
        elif low == high:  # samples that are all alike, as those of a model without errors, say nothing of other rows
            low = high = math.nan
        found[name] = MetricEstimate(float(value), float(low), float(high))
    return found


def compare(observations: Observations, names: Sequence[str]) -> list[Difference]:
    """Return the difference between two models in each of `names`; always the same intervals and p-values.

    A share of the observations, such as accuracy, has McNemar's exact test and the interval of Agresti and Min (2005).
    Other metrics have a permutation test, which swaps the two predictions of random observations, and a bootstrap. The
    interval is widened to hold 0 where the test finds no difference, so that both never contradict each other.
    """
    first, counts = _merge_alike(observations, np.arange(observations.count))
    both = np.concatenate([first, observations.count + first])
    terms = observations.terms[both]
    terms_a, terms_b = terms[: len(first)], terms[len(first) :]
    differs = np.flatnonzero(np.asarray(abs(terms_a - terms_b).sum(1)))

    def measure(terms: Any, weights: Numbers | Indices) -> dict[Name, Numbers]:
        return observations.measure(names, terms, weights.astype(np.float64))

    def subtract(of_a: dict[Name, Numbers], of_b: dict[Name, Numbers]) -> dict[Name, Numbers]:
        return {name: of_b[name] - of_a[name] for name in names}

    shares = {name for name, values in observations.means.items() if _is_share(values)}
    drawn, swapped = dict[Name, Numbers](), dict[Name, Numbers]()
    if not shares.issuperset(names):
        draws = _draw_weights(counts, _list_blocks(terms, _DIFFERENCE_SAMPLES))
        drawn = _join_samples([subtract(measure(terms_a, weights), measure(terms_b, weights)) for weights in draws])
        swaps = _draw_swaps(counts, differs, _list_blocks(terms, _DIFFERENCE_SAMPLES))
        pairs = ((np.hstack([counts - moved, moved]), np.hstack([moved, counts - moved])) for moved in swaps)
        swapped = _join_samples([subtract(measure(terms, kept), measure(terms, moved)) for kept, moved in pairs])
    of_a, of_b = measure(terms_a, counts[None]), measure(terms_b, counts[None])
    found = []
    for name in names:
        a, b = float(of_a[name][0]), float(of_b[name][0])
        values = observations.means.get(name, observations.is_right)
        pair = None if values is None else np.asarray(values, np.float64)[both].reshape(2, -1)
        better = None if pair is None else (int(counts[pair[0] > pair[1]].sum()), int(counts[pair[1] > pair[0]].sum()))
        if name in shares and better:
            interval, p, smallest = _test_share(*better, observations.count)
        else:
            interval, p, smallest = _test_resampled(b - a, drawn[name], swapped[name])
        if interval and p >= _LEVEL:
            interval = (min(interval[0], 0.0), max(interval[1], 0.0))
        found.append(
            Difference(
                name,
                a,
                b,
                interval,
                p,
                smallest if observations.count >= _LEAST_ROWS else None,
                p < _LEVEL and not (interval and interval[0] <= 0 <= interval[1]),
                better == (0, 0) if name in observations.means else not len(differs),
                observations.count,
                better,
            )
        )
    return found


def _draw_swaps(counts: Indices, differs: Indices, sizes: Iterator[int]) -> Iterator[Indices]:
    """Yield in how many of the observations that differ the two models' predictions are swapped: a random half."""
    random = np.random.default_rng(0)
    for size in sizes:
        moved = np.zeros((size, len(counts)), np.int64)
        moved[:, differs] = random.binomial(counts[differs], 0.5, (size, len(differs)))
        yield moved


_Tested = tuple[tuple[float, float] | None, float, float]


def _test_share(only_a: int, only_b: int, rows: int) -> _Tested:
    differing = only_a + only_b
    p = float(binomtest(only_b, differing).pvalue) if differing else 1.0
    # Half a row is added to each of the four cells of right and wrong.
    middle = (only_b - only_a) / (rows + 2)
    off = 1.959964 * math.sqrt(max(differing + 1 - (only_b - only_a) ** 2 / (rows + 2), 0.0)) / (rows + 2)
    likely = max(differing, _LEAST_ROWS)
    fewer = int(binom.ppf(_LEVEL / 2, likely, 0.5))
    fewer -= int(binom.cdf(fewer, likely, 0.5) > _LEVEL / 2)
    return (max(middle - off, -1.0), min(middle + off, 1.0)), p, (likely - 2 * fewer) / rows


def _test_resampled(difference: float, drawn: Numbers, swapped: Numbers) -> _Tested:
    low, high = np.quantile(drawn, (_LEVEL / 2, 1 - _LEVEL / 2))
    as_large = int((np.abs(swapped) >= abs(difference) - _ROUNDING).sum())
    p = (1 + as_large) / (1 + len(swapped))
    # Where nearly all rows are alike, all resamples may be: then nothing is known about others.
    interval = (float(low), float(high)) if high - low > _ROUNDING else None
    return interval, p, float(np.quantile(np.abs(swapped), 1 - _LEVEL))
