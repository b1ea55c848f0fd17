"""The losses of two commits."""

import pytest

from scripts.benchmarks.compare_losses import find_difference


@pytest.mark.parametrize(
    "before, after, found",
    [([1.0, 0.5], [1.0, 0.5], (0, 0.0)), ([1.0, 0.5, 0.25], [1.0, 0.75, 0.0], (2, 0.25)), ([], [], (0, 0.0))],
)
def test_the_first_and_the_largest_difference(
    before: list[float], after: list[float], found: tuple[int, float]
) -> None:
    assert find_difference(before, after) == found


def test_trainings_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="longer"):
        find_difference([1.0], [1.0, 0.5])
