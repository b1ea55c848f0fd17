"""The threshold for several labels, compared with all thresholds that scikit-learn measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from cpuft.errors import CpuftError
from cpuft.judge.predictions import About, write_predictions
from cpuft.judge.threshold import Threshold, choose_threshold, find_threshold


@given(st.data())
def test_no_other_threshold_has_a_better_f1(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)))
    some = st.sampled_from([0.0, 0.1, 0.30000001192092896, 0.3, 0.5, 0.5000001, 0.9, 1.0])
    cells = shape[0] * shape[1]
    probabilities = np.asarray(data.draw(st.lists(some, min_size=cells, max_size=cells))).reshape(shape)
    truth = np.asarray(data.draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).reshape(shape)

    def measure(threshold: float) -> float:
        return float(f1_score(truth.ravel(), (probabilities > threshold).ravel(), zero_division=0))

    found = choose_threshold(truth, probabilities)
    tried = {one: measure(one) for one in (1e-9, 0.5, *np.unique(probabilities))}
    assert found.examples == shape[0]
    assert (measure(found.value), measure(0.5)) == pytest.approx((found.f1, found.usual_f1))
    assert found.f1 == pytest.approx(max(tried.values()))
    assert 0 < found.value < 1
    if found.usual_f1 == pytest.approx(found.f1):
        assert found.value == 0.5
    assert found.value not in probabilities or found.value == 0.5


def test_a_short_threshold_is_taken_and_the_nearest_of_equal_ones() -> None:
    probabilities = np.asarray([[0.9], [0.41], [0.39], [0.02]])
    truth = np.asarray([[True], [True], [False], [False]])
    assert choose_threshold(truth, probabilities) == Threshold(0.4, 1.0, 2 / 3, 4)
    truth = np.asarray([[True], [False], [False], [True], [False]])
    for column, value in ([0.99, 0.7, 0.3, 0.2, 0.1], 0.8), ([0.95, 0.9, 0.3, 0.25, 0.1], 0.2):
        assert choose_threshold(truth, np.asarray(column)[:, None]) == Threshold(value, 2 / 3, 0.5, 5)


def save(folder: Path, kind: str = "labels", **columns: Any) -> str:
    usual: dict[str, Any] = {"label": [["a"], []], "probabilities": [[0.45, 0.1], [0.2, 0.3]]}
    write_predictions(folder, About(kind, ("a", "b"), {}, "", 1), usual | columns)
    return str(folder)


def test_the_run_s_predictions_choose(tmp_path: Path) -> None:
    assert find_threshold(save(tmp_path)) == Threshold(0.4, 1.0, 0.0, 2)


@pytest.mark.parametrize(
    "kind, columns, message",
    [
        ("class", {}, "has no probabilities of several labels: give a threshold with --threshold"),
        ("labels", {"label": [["a"], ["c"]]}, r"is damaged \(KeyError\('c'\)\): fetch or train the run again"),
        ("labels", {"probabilities": [[0.4, 0.1], [0.2]]}, "is damaged"),
        ("labels", {"probabilities": [0.4, 0.1]}, "is damaged"),
        ("labels", {"probabilities": [[0.4, None], [0.2, 0.3]]}, "is damaged"),
    ],
)
def test_predictions_that_cannot_choose(kind: str, columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=message):
        find_threshold(save(tmp_path, kind, **columns))
