"""Whether the difference of two runs' metrics is real, or could be chance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cpuft.errors import CpuftError, counted, requires
from cpuft.judge.predictions import FILE_NAME, QUERY_KINDS, RunPredictions

if TYPE_CHECKING:  # a report without predictions is also made where NumPy is not installed
    from cpuft.judge.resampling import Difference

_LEAST_P = 0.001
_SAME = ("split", "row", "query", "label")
"""Columns that must be equal in both files, where they have them."""


@dataclass(frozen=True)
class Differences:
    """The differences of all metrics that two runs have reported, at least one."""

    kind: str
    found: tuple[Difference, ...]

    @property
    def first(self) -> Difference:
        """The metric that decides."""
        return self.found[0]

    def count(self, number: int) -> str:
        """Return a number with its unit: "408 rows", or "408 queries" in tasks of search, which score queries."""
        if self.kind in QUERY_KINDS:
            return "1 query" if number == 1 else f"{number} queries"
        return counted(number, "row")


def compare_predictions(a: RunPredictions, b: RunPredictions) -> Differences:
    """Compare two runs' metrics row by row. CpuftError: rows, kinds or classes differ, a NaN, or no metric in both."""
    with requires("train", "predictions are compared with NumPy and SciPy"):
        import numpy as np

        from cpuft.judge.resampling import compare
        from cpuft.judge.weighted_metrics import observe, select_split
    _refuse_others(a, b)
    try:
        a, b = _sort_rows(a), _sort_rows(b)
        for name in _SAME:
            if name in a.table.column_names and not a.table.column(name).equals(b.table.column(name)):
                raise CpuftError(
                    f"the two runs have read different values of {name}: train both with the same options of the data"
                )
        numbers = (
            one.to_numpy() for run in (a, b) for one in run.table.columns if str(one.type) in ("float", "double")
        )
        if not all(np.isfinite(one).all() for one in numbers):
            raise CpuftError("one of the runs predicts no numbers (NaN): train it again with a smaller --learning-rate")
        found: dict[str, Difference] = {}
        for suffix in a.table.column("split").unique().to_pylist():
            observations = observe([select_split(run, suffix) for run in (a, b)])
            names = [name for name in observations.names if all(name + suffix in run.about.metrics for run in (a, b))]
            for one in compare(observations, names) if names else ():
                found[one.metric + suffix] = replace(one, metric=one.metric + suffix)
    except (KeyError, TypeError, ValueError) as error:
        raise CpuftError(f"the predictions of the two runs do not fit together ({error}): train them again") from None
    if not found:
        raise CpuftError(
            f"the two runs report no metric that can be compared row by row: compare their {FILE_NAME} yourself"
        )
    return Differences(a.about.kind, tuple(found[name] for name in a.about.metrics if name in found))


def _refuse_others(a: RunPredictions, b: RunPredictions) -> None:
    if a.about.kind != b.about.kind:
        raise CpuftError(f"the runs predict {a.about.kind} and {b.about.kind}: give two runs of the same kind of task")
    if a.about.rows != b.about.rows or len(a.table) != len(b.table):
        raise CpuftError("the two runs have different validation rows: train both with the same --validation-file")
    if a.about.classes != b.about.classes:
        names = sorted({*a.about.classes} ^ {*b.about.classes})
        raise CpuftError(
            f"the two runs have different classes ({', '.join(names)[:200] or 'in another order'}): train both alike"
        )


def _sort_rows(predictions: RunPredictions) -> RunPredictions:
    left_out = ("text", "slice", "tokens", "probabilities")
    table = predictions.table
    kept = table.select([name for name in table.column_names if name not in left_out])
    return predictions.replace(kept.sort_by([("split", "ascending"), ("row", "ascending")]))


def describe_difference(differences: Differences, a: str = "A", b: str = "B", metric: Difference | None = None) -> str:
    """Return "No difference: ...", "No difference can be shown: ..." or "B is better: ...: the difference is real (p)",
    without a full stop, on a metric, by default the first; `a` and `b` replace A and B.
    """
    one = metric or differences.first
    name, rows = one.metric.replace("_", " "), differences.count(one.rows)
    if one.is_same:
        return f"No difference: {name} is {one.a:.4f} in both, and the same in each of {rows}"
    change = f"{name} {one.a:.4f} -> {one.b:.4f} ({one.difference:+.4f}"
    change += f", 95 % interval {format_interval(one)})" if one.interval else ")"
    if one.is_real:
        return f"{b if one.difference > 0 else a} is better: {change}: the difference is real ({format_p(one)})"
    text = f"No difference can be shown: {change} may be chance ({format_p(one)})"
    if one.smallest is None:
        return f"{text}. With {rows}, no difference can be told from chance, however large"
    smallest = max(one.smallest, abs(one.difference))
    return f"{text}. With {rows}, less than about {smallest:.2g} cannot be told apart" if smallest else text


def format_interval(one: Difference) -> str:
    """Return the interval of a difference, such as "-0.0100 to +0.0312"; "-" without one."""
    return f"{one.interval[0]:+.4f} to {one.interval[1]:+.4f}" if one.interval else "-"


def format_p(one: Difference) -> str:
    """Return a p-value with at most two significant digits, "p = 0.013", or "p < 0.001" if it is less."""
    return f"p < {_LEAST_P}" if one.p < _LEAST_P else f"p = {one.p:.2g}"


def describe_better(differences: Differences) -> str:
    """Return "of 408 rows, only A is right in 12, and only B in 20" by the first metric; "" for scores.

    In tasks of search, that is "of 408 queries, A is better for 12, and B for 20, by METRIC".
    """
    one = differences.first
    if one.better is None:
        return ""
    rows, (of_a, of_b) = differences.count(one.rows), one.better
    if differences.kind in QUERY_KINDS:
        return f"of {rows}, A is better for {of_a}, and B for {of_b}, by {one.metric}"
    return f"of {rows}, only A is right in {of_a}, and only B in {of_b}"
