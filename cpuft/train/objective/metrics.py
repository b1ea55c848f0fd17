"""GLUE's metrics and those of its kin, by scikit-learn, SciPy and seqeval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def compute_metrics(names: tuple[str, ...], answers: NDArray[Any], labels: NDArray[np.float32]) -> dict[str, float]:
    """Metrics by name, of class numbers or scores, both of shape (rows,), or of 0 and 1, both of shape (rows, classes).

    A correlation with a constant is 0, as scikit-learn has it for Matthews'.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    constant = bool(np.ptp(answers) == 0 or np.ptp(labels) == 0)

    def correlate(function: Any) -> float:
        return 0.0 if constant else float(function(answers, labels).statistic)

    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(labels, answers),
        "f1": lambda: f1_score(labels, answers, zero_division=0.0),
        "f1_micro": lambda: f1_score(labels, answers, average="micro", zero_division=0.0),
        "f1_macro": lambda: f1_score(labels, answers, average="macro", zero_division=0.0),
        "matthews_correlation": lambda: matthews_corrcoef(labels, answers),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}


def compute_tag_metrics(
    names: tuple[str, ...], answers: Sequence[list[str]], tags: Sequence[list[str]]
) -> dict[str, float]:
    """Metrics by name, of rows' tags, as conlleval has them: of whole entities, but accuracy of words."""
    from seqeval import metrics

    compute: dict[str, Callable[[], Any]] = {
        "f1": lambda: metrics.f1_score(tags, answers, zero_division=0),
        "precision": lambda: metrics.precision_score(tags, answers, zero_division=0),
        "recall": lambda: metrics.recall_score(tags, answers, zero_division=0),
        "accuracy": lambda: metrics.accuracy_score(tags, answers),
    }
    return {name: float(compute[name]()) for name in names}
