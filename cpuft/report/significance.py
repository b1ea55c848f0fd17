"""Whether two means differ: Student's t over repeated runs, paired by seed where both have the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

_STUDENT_T = (
    math.inf,
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""0.975 quantile of Student's t for 0, 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).

The table stands here because reports are also made where scipy is not installed."""
_ROUNDING = 1e-12
"""A relative standard error below this is one of rounding: all differences are the same, for example one example of the
validation set."""


def find_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t for 0 (infinity) to 30 degrees of freedom; above, that of 30, a bit too
    large.
    """
    return _STUDENT_T[min(freedom, len(_STUDENT_T) - 1)]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of two or more values; NaN if one of them is NaN or infinite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the mean's 95 % interval (Student's t) of 2 or more values; NaN if one is not finite."""
    return find_quantile(len(values) - 1) * standard_error(values)


def is_different(one: Mapping[str, float], other: Mapping[str, float]) -> bool | None:
    """Return whether two means of values by seed differ at the 5 % level of a two-sided t-test; None if unknown.

    The test is paired if both have the same keys; otherwise it is Welch's test with the degrees of freedom of the
    smaller number of values. Nothing can be said about a single value, or about a difference that does not vary.
    """
    fewer = min(len(one), len(other))
    if fewer < 2:
        return None
    if one.keys() == other.keys():
        error = standard_error([one[seed] - other[seed] for seed in one])
    else:
        error = math.hypot(standard_error([*one.values()]), standard_error([*other.values()]))
    difference = statistics.fmean(one.values()) - statistics.fmean(other.values())
    is_varying = error > _ROUNDING * max(map(abs, (*one.values(), *other.values())))
    return abs(difference) > find_quantile(fewer - 1) * error if is_varying else None
