"""Metrics of labels, scores and tags, computed by scikit-learn, SciPy and seqeval. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def compute_label_metrics(
    names: tuple[str, ...], predictions: NDArray[Any], labels: NDArray[np.float32]
) -> dict[str, float]:
    """Return metrics by name, from 0 to 1 (correlations from -1), computed by scikit-learn and SciPy.

    Predictions and labels are class numbers or scores, shape (examples,), or 0 and 1, shape (examples, classes). The
    correlation with a constant is 0, as scikit-learn defines it for Matthews'; an F1 without any positive is 0, too.
    Raises KeyError for an unknown name.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    constant = bool(np.ptp(predictions) == 0 or np.ptp(labels) == 0)

    def correlate(function: Any) -> float:
        return 0.0 if constant else float(function(predictions, labels).statistic)

    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(labels, predictions),
        "f1": lambda: f1_score(labels, predictions, zero_division=0.0),
        "f1_micro": lambda: f1_score(labels, predictions, average="micro", zero_division=0.0),
        "f1_macro": lambda: f1_score(labels, predictions, average="macro", zero_division=0.0),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predictions),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}


def compute_tag_metrics(
    names: tuple[str, ...], predicted: Sequence[list[str]], tags: Sequence[list[str]]
) -> dict[str, float]:
    """Return metrics by name, from 0 to 1, computed by seqeval from the tags of each example's words.

    They are defined as in conlleval: f1, precision and recall are those of whole entities, 0 if there are none;
    accuracy is that of words. Raises KeyError for any other name.
    """
    from seqeval import metrics

    compute: dict[str, Callable[[], Any]] = {
        "f1": lambda: metrics.f1_score(tags, predicted, zero_division=0),
        "precision": lambda: metrics.precision_score(tags, predicted, zero_division=0),
        "recall": lambda: metrics.recall_score(tags, predicted, zero_division=0),
        "accuracy": lambda: metrics.accuracy_score(tags, predicted),
    }
    return {name: float(compute[name]()) for name in names}
