"""GLUE's metrics."""

from __future__ import annotations

import numpy as np
import pytest

from cpuft.train.objective.labels import compute_metrics

ANSWERS = np.asarray([1, 0, 1, 1])


def test_classes() -> None:
    found = compute_metrics(("accuracy", "f1", "matthews_correlation"), ANSWERS, np.asarray([1, 0, 1, 0], np.float32))
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.8, "matthews_correlation": 0.5774}, abs=1e-4)


def test_scores() -> None:
    scores = np.asarray([1, 2, 4], np.float32)
    found = compute_metrics(("pearson", "spearman"), scores, np.asarray([1, 2, 3], np.float32))
    assert found == pytest.approx({"pearson": 0.9820, "spearman": 1.0}, abs=1e-4)


def test_a_constant_answer_correlates_with_nothing() -> None:
    assert compute_metrics(("pearson",), np.ones(3, np.float32), np.asarray([1, 2, 3], np.float32)) == {"pearson": 0.0}
