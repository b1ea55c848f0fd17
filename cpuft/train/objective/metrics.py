"""GLUE's metrics, by scikit-learn and SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def compute_metrics(names: tuple[str, ...], answers: NDArray[Any], labels: NDArray[np.float32]) -> dict[str, float]:
    """Metrics by name, of class numbers or scores; both of shape (rows,).

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
        "matthews_correlation": lambda: matthews_corrcoef(labels, answers),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}
