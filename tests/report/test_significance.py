"""Student's t: intervals and tests of differences."""

from __future__ import annotations

import math

import pytest

from cpuft.report.significance import find_quantile, half_width, is_different


def test_intervals_are_students() -> None:
    from scipy.stats import t

    for count in (2, 3, 5, 11, 31):
        values = [float(value * value) for value in range(count)]
        mean = sum(values) / count
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
        wanted = t.ppf(0.975, count - 1) * deviation / math.sqrt(count)
        assert half_width(values) == pytest.approx(wanted, rel=1e-3)
    assert half_width([3.0, 3.0, 3.0]) == 0


def test_means_differ_if_a_t_test_over_seeds_says_so() -> None:
    one = {"a": 0.80, "b": 0.82, "c": 0.81}
    # Paired: the differences are 0.02, 0.03 and 0.02, although the ranges overlap.
    assert is_different(one, {"a": 0.82, "b": 0.85, "c": 0.83})
    assert not is_different(one, {"a": 0.85, "b": 0.79, "c": 0.83})
    # With other seeds the same means are too close, but not means that are far away.
    assert not is_different(one, {"d": 0.82, "e": 0.85, "f": 0.83})
    assert is_different(one, {"d": 0.92, "e": 0.95, "f": 0.93})


def test_what_a_t_test_cannot_tell() -> None:
    one = {"a": 0.80, "b": 0.82}
    assert is_different(one, {"a": 0.9}) is None
    # The differences are the same, apart from rounding: 0.7025 - 0.70 and 0.1025 - 0.10 differ in the last digits.
    far = {"a": 0.70, "b": 0.10}
    assert is_different(far, {seed: value + 0.0025 for seed, value in far.items()}) is None
    assert is_different(one, dict(one)) is None


def test_the_paired_test_is_that_of_scipy() -> None:
    from scipy.stats import ttest_rel

    one = {str(seed): 0.8 + 0.01 * math.sin(seed) for seed in range(8)}
    for shift in (0.001, 0.003, 0.005, 0.01, 0.02):
        other = {seed: value + shift * (1 + math.cos(7 * int(seed))) for seed, value in one.items()}
        result = ttest_rel([*one.values()], [*other.values()])
        assert is_different(one, other) == (result.pvalue < 0.05)
    assert find_quantile(500) == find_quantile(30)
    assert math.isinf(find_quantile(0))
