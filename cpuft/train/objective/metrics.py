"""GLUE's metrics, by scikit-learn and SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def compute_metrics(
    names: tuple[str, ...], outputs: NDArray[np.float32], labels: NDArray[np.float32]
) -> dict[str, float]:
    """Metrics by name.

    Parameters
    ----------
    outputs: the model's logits, shape (rows, classes), or scores, shape (rows, 1).
    labels: class numbers or scores, shape (rows,).

    A correlation with a constant is 0, as scikit-learn has it for Matthews'.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    scores = outputs.argmax(-1) if outputs.shape[-1] > 1 else outputs[:, 0]
    constant = bool(np.ptp(scores) == 0 or np.ptp(labels) == 0)

    def correlate(function: Any) -> float:
        return 0.0 if constant else float(function(scores, labels).statistic)

    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(labels, scores),
        "f1": lambda: f1_score(labels, scores, zero_division=0.0),
        "matthews_correlation": lambda: matthews_corrcoef(labels, scores),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}
