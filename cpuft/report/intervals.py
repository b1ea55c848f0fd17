"""How far a mean of few runs may be off: 95 % intervals by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantile for 1, 2, ... degrees of freedom. Source: NIST/SEMATECH e-Handbook, 1.3.6.7.2. A report is made
where scipy is not."""


def half_width(values: Sequence[float]) -> float:
    """Half the interval around the mean of two or more values; beyond 31 of them a little too wide."""
    quantile = _T[min(len(values) - 1, len(_T)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
