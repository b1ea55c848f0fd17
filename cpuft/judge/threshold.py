"""The threshold above which one of several labels is predicted, chosen on a run's validation predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuft.errors import CpuftError
from cpuft.judge.predictions import FILE_NAME, MOST_PROBABILITIES, explain_damage, read_predictions

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT = 0.5
"""The threshold of a run's own metrics."""


@dataclass(frozen=True)
class Threshold:
    """The threshold for all labels with the best f1_micro on the validation examples."""

    value: float
    f1: float
    usual_f1: float
    examples: int


def find_threshold(run: str) -> Threshold:
    """Choose the threshold for a run's labels. CpuftError: no probabilities of several labels, or a damaged file."""
    import numpy as np

    found = read_predictions(run)
    if found.about.kind != "labels" or len(found.about.classes) > MOST_PROBABILITIES:
        raise CpuftError(f"{run}/{FILE_NAME} has no probabilities of several labels: give a threshold with --threshold")
    with explain_damage(run):
        truth, probabilities = found.mark_classes("label"), found.probabilities().astype(np.float64)
        if not np.isfinite(probabilities).all():
            raise ValueError("not all probabilities are numbers")
    return choose_threshold(truth, probabilities)


def choose_threshold(truth: NDArray[Any], probabilities: NDArray[Any]) -> Threshold:
    """Return the threshold with the best f1_micro, of equal ones that nearest to 0.5; shapes (examples, labels).

    All numbers between two neighbouring probabilities predict the same labels, and a short one of them is taken.
    """
    import numpy as np

    order = np.argsort(-probabilities, axis=None, kind="stable")
    descending, hits = probabilities.ravel()[order], np.cumsum(truth.ravel()[order])
    # The n-th is that of a threshold between `lows` and `highs`, which predicts the n most likely labels.
    f1 = np.concatenate([[0.0], 2 * hits / (np.arange(1, len(order) + 1) + truth.sum())])
    lows, highs = np.concatenate([descending, [0.0]]), np.concatenate([[1.0], descending])
    usual = int((probabilities > DEFAULT).sum())
    cuts = np.flatnonzero((lows < highs) & (f1 == f1[lows < highs].max()))
    value = DEFAULT
    if usual not in cuts:
        best = cuts[np.maximum(lows[cuts] - DEFAULT, DEFAULT - highs[cuts]).argmin()]
        value = _shorten(float(lows[best]), float(highs[best]))
    return Threshold(value, float(f1[cuts[0]]), float(f1[usual]), len(truth))


def _shorten(low: float, high: float) -> float:
    """Return the number nearest to the middle with the fewest decimal places that is above `low` and below `high`."""
    middle = (low + high) / 2
    rounded = (round(middle, places) for places in range(1, 9))
    return next((value for value in rounded if low < value < high), middle)
