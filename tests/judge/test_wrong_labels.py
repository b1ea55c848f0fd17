"""Confident learning, against its definition in the paper and what cleanlab makes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from cpuft.judge.predictions import RunPredictions
from cpuft.judge.wrong_labels import rank_labels
from tests.judge.predicted import make_predictions


def draw(rows: int, classes: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Labels of all classes but the last one, and probabilities that mostly agree with them."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes - 1, rows)
    probabilities = random.dirichlet(np.full(classes, 0.7), rows)
    probabilities[np.arange(rows), labels] += random.random(rows) * 1.5
    return labels, (probabilities / probabilities.sum(1, keepdims=True)).astype(np.float32)


def make_classes(labels: NDArray[np.int64], probabilities: NDArray[np.float32]) -> RunPredictions:
    names = np.asarray([f"class {number}" for number in range(probabilities.shape[1])], object)
    return make_predictions(
        "class",
        ("accuracy",),
        tuple(names),
        label=names[labels],
        prediction=names[probabilities.argmax(1)],
        confidence=probabilities.max(1),
        label_probability=probabilities[np.arange(len(labels)), labels],
        probabilities=list(probabilities),
    )


def define(labels: NDArray[np.int64], probabilities: NDArray[np.float32]) -> dict[int, tuple[float, int]]:
    """Equation 1 of the paper, less rows that are predicted as labelled: margin and likely class of each row."""
    used = sorted(set(labels.tolist()))
    thresholds = {
        one: float(np.mean([row[one] for row, label in zip(probabilities, labels) if label == one])) for one in used
    }
    found = {}
    for number, (row, label) in enumerate(zip(probabilities.tolist(), labels.tolist())):
        confident = [one for one in used if row[one] >= thresholds[one] - 1e-6]
        likely = max(confident, key=row.__getitem__, default=label)
        if likely != label and max(row) != row[label]:
            found[number] = (row[label] - max(p for one, p in enumerate(row) if one != label), likely)
    return found


@pytest.mark.parametrize("classes, seed", [(2, 1), (3, 2), (3, 3), (7, 4)])
def test_labels_are_ranked_as_the_paper_says(classes: int, seed: int) -> None:
    labels, probabilities = draw(300, classes + 1, seed)
    ranking = rank_labels(make_classes(labels, probabilities))
    assert ranking
    expected = define(labels, probabilities)
    assert 5 < len(expected) < 150
    suspects = ranking.order[: ranking.count].tolist()
    assert suspects == sorted(expected, key=lambda row: expected[row][0])
    assert [ranking.likely[row] for row in suspects] == [f"class {expected[row][1]}" for row in suspects]
    assert sorted(ranking.order.tolist()) == list(range(300))


def test_a_class_and_a_label_that_may_be_missing_are_the_same_question() -> None:
    labels, probabilities = draw(900, 3, 5)
    probabilities = probabilities[:, :2] / probabilities[:, :2].sum(1, keepdims=True)
    one = rank_labels(make_classes(labels, probabilities))
    several = rank_labels(
        make_predictions(
            "labels",
            ("f1",),
            ("spam",),
            label=[["spam"] * label for label in labels.tolist()],
            prediction=[["spam"] * (row[1] > row[0]) for row in probabilities.tolist()],
            probabilities=list(probabilities[:, 1:]),
        )
    )
    assert one
    assert several
    assert one.count == several.count > 10
    assert one.order[: one.count].tolist() == several.order[: one.count].tolist()
    row = int(one.order[0])
    assert (one.likely[row], several.likely[row]) == (f"class {1 - labels[row]}", "not spam" if labels[row] else "spam")


def test_without_the_probabilities_of_all_classes_label_and_prediction_are_compared() -> None:
    labels, probabilities = draw(300, 3, 6)
    whole = make_classes(labels, probabilities)
    part = dataclasses.replace(whole, table=whole.table.drop_columns("probabilities"))
    one, other = rank_labels(whole), rank_labels(part)
    assert one
    assert other
    assert 0 < other.count <= one.count
    assert {*other.order[: other.count].tolist()} <= {*one.order[: one.count].tolist()}


def test_nothing_is_wrong_with_one_class() -> None:
    ranking = rank_labels(make_classes(np.zeros(4, np.int64), np.ones((4, 1), np.float32)))
    assert ranking
    assert (ranking.count, len(ranking.order)) == (0, 4)
    assert rank_labels(make_predictions("score", ("pearson",), label=[1.0], prediction=[2.0])) is None
