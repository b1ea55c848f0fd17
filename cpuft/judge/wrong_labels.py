"""Labels that are probably wrong, by confident learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.judge.predictions import RunPredictions

_ROUNDING = 1e-6
"""How far a probability may be below the threshold of its class, as in cleanlab."""


@dataclass(frozen=True)
class LabelRanking:
    """All rows in the order in which their labels should be looked at."""

    order: NDArray[np.int64]
    """Numbers of the rows, those with a label that is probably wrong first; shape (rows,)."""
    count: int
    """How many of the first of them have a label that is probably wrong."""
    probabilities: NDArray[np.float64]
    """The probability of the label of each row; of several labels, of the one in question. Shape (rows,)."""
    likely: Sequence[str]
    """For each row, the label that is more likely."""


def rank_labels(predictions: RunPredictions) -> LabelRanking | None:
    """Rank the labels of rows by how probably they are wrong; None for kinds other than class and labels.

    This is confident learning (Northcutt et al. 2021, https://doi.org/10.1613/jair.1.12125) as cleanlab has it: the
    label of a wrongly predicted row is probably wrong if another class is at least as likely as that class is in the
    mean over the rows with that label. All are sorted by the probability of the label minus that of the likeliest other
    class. With several labels, each class is a question of its own. Without the probabilities of all classes, only
    those of label and prediction are compared, and the result for several labels is None.
    """
    kind, columns = predictions.about.kind, predictions.table.column_names
    if kind == "class":
        return _rank_classes(predictions, "probabilities" in columns)
    return _rank_several_labels(predictions) if kind == "labels" and "probabilities" in columns else None


def _rank_classes(predictions: RunPredictions, has_probabilities: bool) -> LabelRanking:
    count = len(predictions.about.classes)
    labels, predicted = (predictions.number_classes(name) for name in ("label", "prediction"))
    own, others = (predictions.column(name).astype(np.float64) for name in ("label_probability", "confidence"))
    thresholds = _divide(np.bincount(labels, own, count), np.bincount(labels, minlength=count))
    if has_probabilities:
        probabilities = predictions.probabilities()
        is_likely = probabilities >= thresholds
        likely = np.where(is_likely, probabilities, -1.0).argmax(1)
        is_wrong = is_likely.any(1) & (likely != labels) & (predicted != labels)
        probabilities[np.arange(len(labels)), labels] = -1.0
        others = probabilities.max(1)
    else:
        likely = predicted
        is_wrong = (predicted != labels) & (others >= thresholds[predicted])
    names = np.asarray(predictions.about.classes, object)
    return LabelRanking(np.lexsort((own - others, ~is_wrong)), int(is_wrong.sum()), own, names[likely])


def _rank_several_labels(predictions: RunPredictions) -> LabelRanking:
    probabilities, is_label = predictions.probabilities(), predictions.mark_classes("label")
    own = np.where(is_label, probabilities, 1 - probabilities)
    yes, no = (_divide(own.sum(0, np.float64, where=mask), mask.sum(0)) for mask in (is_label, ~is_label))
    is_wrong = (1 - own >= np.where(is_label, no, yes)) & (own < 0.5)
    places = np.where(is_wrong, own, own + 1).argmin(1)
    own, has_wrong = own[np.arange(len(own)), places].astype(np.float64), is_wrong.any(1)
    likely = name_opposites(predictions.about.classes, places, is_label)
    return LabelRanking(np.lexsort((own, ~has_wrong)), int(has_wrong.sum()), own, likely)


def _divide(sums: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return means, less what rounding may make of them; of nothing infinity, which no probability reaches."""
    return np.where(counts > 0, sums / np.maximum(counts, 1) - _ROUNDING, np.inf)


def name_opposites(classes: Sequence[str], places: NDArray[np.int64], is_label: NDArray[np.bool_]) -> list[str]:
    """Return "not C" for each row with the label C, else "C"; C is class `places[row]`. `is_label`: (rows, classes)."""
    return [f"not {classes[place]}" if own[place] else classes[place] for place, own in zip(places, is_label)]
