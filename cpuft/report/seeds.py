"""Compare metrics over seeds with those of the baseline: means, differences paired by seed, and what follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuft.errors import counted
from cpuft.record import Record
from cpuft.report.significance import half_width, is_different, standard_error

if TYPE_CHECKING:
    from cpuft.report.comparison import Row

SEED = "seed"
NOT_DISTINGUISHABLE, SAME, UNKNOWN = "not distinguishable", "the same", "not known"
LARGER, SMALLER = "larger", "smaller"
"""What can be said about a metric over several seeds in comparison with the baseline's."""


@dataclass(frozen=True)
class SeedComparison:
    """A metric of one number of ranks over several seeds, compared with the baseline's metric with the same seeds."""

    seeds: int
    mean: float
    standard_error: float
    common: int
    """Number of seeds that the baseline has, too."""
    difference: float
    """Mean of the metric minus that of the baseline, over the common seeds; 0 for the baseline itself."""
    interval: float | None
    """Half the width of the 95 % confidence interval of the difference, paired by seed; None for the baseline and with
    one common seed or none."""
    is_different: bool | None
    """Whether the difference is clear in a paired two-sided t-test at the 5 % level; None if that cannot be told."""


def seed_of(record: Record) -> str:
    """Return the seed of a run as a text, because a record may hold anything as an option; "0" if it has none."""
    return str(record.header.options.get(SEED) or 0)


def compare_seeds(group: Sequence[Record], baseline: Sequence[Record]) -> dict[str, SeedComparison]:
    """Return by name the metrics of a group of runs over their seeds, without those with fewer than two seeds."""
    found = dict[str, SeedComparison]()
    for name in group[0].metrics:
        own, base = _list_by_seed(group, name), _list_by_seed(baseline, name)
        if len(own) < 2:
            continue
        common = [seed for seed in own if seed in base]
        differences = [own[seed] - base[seed] for seed in common]
        is_paired = group is not baseline and len(common) > 1
        found[name] = SeedComparison(
            len(own),
            statistics.fmean(own.values()),
            standard_error([*own.values()]),
            len(common),
            statistics.fmean(differences) if common else 0.0,
            half_width(differences) if is_paired else None,
            is_different({one: own[one] for one in common}, {one: base[one] for one in common}) if is_paired else None,
        )
    return found


def _list_by_seed(group: Sequence[Record], name: str) -> dict[str, float]:
    """Return a metric of each seed, the mean of its repeats, without values that are not finite."""
    values: dict[str, list[float]] = {}
    for run in group:
        if math.isfinite(value := run.metrics.get(name, math.nan)):
            values.setdefault(seed_of(run), []).append(value)
    return {seed: statistics.fmean(found) for seed, found in values.items()}


def note_seeds(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Return notes on the seeds, and on whether rows reach the metrics of the first; [] if no row has several seeds."""
    if not any(row.seeds for row in rows):
        return []
    seeds = list(dict.fromkeys(map(seed_of, records)))
    notes = [
        f"the seeds are {', '.join(seeds)}. Metrics are means over the seeds; their differences are paired by seed "
        "and tested with a two-sided t-test at the 5 % level."
    ]
    return notes + [f"{describe_seeds(row, rows[0])}." for row in rows[1:] if row.seeds]


def describe_seeds(row: Row, base: Row) -> str:
    """Return clauses, joined by "; ", without a full stop, on whether metrics of a row, which has `seeds`, differ from
    the baseline's: larger, smaller, the same, not distinguishable, or not to be told with too few common seeds.
    """
    pair, clauses = f"np {row.np} and np {base.np}", list[str]()
    results: dict[str, list[str]] = {}
    for name, one in row.seeds.items():
        results.setdefault(judge_seeds(one), []).append(name.replace("_", " "))
    common = min(one.common for one in row.seeds.values())
    for result, names in results.items():
        listed = " and ".join(names)
        if result == SAME:
            clauses.append(f"{pair} have the same {listed} with each of {common} seeds")
        elif result == UNKNOWN:
            clauses.append(
                f"whether {pair} differ in {listed} cannot be told from {counted(common, 'common seed')}: compare with "
                "--seeds 5"
            )
        elif result == NOT_DISTINGUISHABLE:
            clauses.append(
                f"{pair} are not distinguishable in {listed} over {common} seeds, which does not mean that they are "
                "equal: more seeds may show a difference"
            )
        else:
            clauses.append(f"the {listed} of np {row.np} is {result} than that of np {base.np} over {common} seeds")
    return "; ".join(clauses)


def judge_seeds(one: SeedComparison) -> str:
    """Return "the same" (all differences are 0), "not known" (`is_different` is None), "not distinguishable" (it is
    False), "larger" or "smaller".
    """
    if one.interval == 0 and one.difference == 0:
        return SAME
    if one.is_different is None:
        return UNKNOWN
    if not one.is_different:
        return NOT_DISTINGUISHABLE
    return LARGER if one.difference > 0 else SMALLER
