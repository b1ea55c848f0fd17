"""Warnings of runs that did not fail and have learned nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuft.config.train import TrainConfig
from cpuft.record import EvaluationLine
from cpuft.train.data.archive import UNTAGGED, Prepared
from cpuft.train.objective.table import make_objective
from cpuft.train.remarks import find_remark, warn_of_learning_rate
from tests.conftest import run_cpuft
from tests.records import make_steps
from tests.train.tiny import save_tiny
from tests.train.tokens import make_tokens

CONFIG = TrainConfig(learning_rate=2e-5)
GOOD = make_steps(20, [0.1])


def prepare(kind: str, labels: Any, names: tuple[str, ...], metrics: tuple[str, ...]) -> Prepared:
    """Four examples of one token, or for tags of two."""
    values = np.asarray(labels, np.int32 if kind == "tags" else np.float32)
    tokens = replace(make_tokens([2 if kind == "tags" else 1] * 4), labels=values)
    return Prepared(names, metrics, "", 0, tokens, {"": tokens}, kind)


CLASSES = prepare("class", [0, 1, 1, 1], ("no", "yes"), ("accuracy", "f1"))


def judge(prepared: Prepared, predictions: Any, steps: Any = GOOD, config: TrainConfig = CONFIG) -> str:
    objective = make_objective(config, prepared)
    metrics = objective.compute_metrics(np.asarray(predictions, np.float32), prepared.validation[""])
    return find_remark(config, objective, prepared, steps, EvaluationLine(20, metrics, 4, 1.0))


ONLY_NO, ONLY_YES, MIXED = [[1, 0]] * 4, [[0, 2], [0, 1], [1, 3], [0, 1]], [[0, 1], [1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    "prepared, predictions, answer",
    [
        (CLASSES, ONLY_YES, "accuracy 0.7500, f1 0.8571 is what the label yes for every example gives"),
        (CLASSES, ONLY_NO, "accuracy 0.2500, f1 0.0000 is what the label no for every example gives"),
        (CLASSES, MIXED, ""),
        (CLASSES, [[1, 0], [0, 1], [0, 1], [0, 1]], ""),
        (
            replace(CLASSES, metrics=("matthews_correlation",)),
            ONLY_YES,
            "matthews_correlation 0.0000 is what the label",
        ),
        (prepare("class", [1, 1, 1, 1], ("no", "yes"), ("accuracy",)), ONLY_YES, ""),
        (prepare("score", [0, 1, 2, 3], (), ("pearson",)), [[1], [1], [1], [1]], "is what one score for every example"),
        (prepare("score", [0, 1, 2, 3], (), ("pearson",)), [[1], [1], [1], [2]], ""),
        (
            prepare("labels", [[0, 1], [1, 1], [0, 1], [0, 0]], ("a", "b"), ("f1_micro",)),
            [[-1, -2]] * 4,
            "f1_micro 0.0000 is what no label for every example gives",
        ),
        (prepare("labels", [[0, 1], [1, 1], [0, 1], [0, 0]], ("a", "b"), ("f1_micro",)), [[1, -2]] * 4, ""),
        (
            prepare("tags", [0, UNTAGGED, 0, 1, 0, 0, 0, 0], ("O", "B-PER"), ("f1", "accuracy")),
            np.zeros((4, 2)),
            "is what the tag O for every example gives",
        ),
        (
            prepare("tags", [0, UNTAGGED, 0, 1, 0, 0, 0, 0], ("O", "B-PER"), ("f1", "accuracy")),
            [[0, 0], [0, 1], [0, 0], [0, 1]],
            "",
        ),
    ],
)
def test_one_answer_for_every_example_is_noticed(prepared: Prepared, predictions: Any, answer: str) -> None:
    remark = judge(prepared, predictions)
    assert answer in remark
    assert bool(remark) == bool(answer)


def test_a_training_that_diverged_is_noticed() -> None:
    risen = [replace(line, loss=0.7 if line.step == 1 else 2.7e7) for line in GOOD]
    assert judge(CLASSES, MIXED, risen) == (
        "warning: the training has diverged: the loss rose from 0.7 in the first update to 2.7e+07 in the last ones: "
        "try a tenth of --learning-rate 2e-05, or --warmup-ratio 0.1"
    )
    lucky = [replace(line, loss=0.001 if line.step == 1 else 0.3) for line in GOOD]
    assert judge(CLASSES, MIXED, lucky) == ""
    scores = prepare("score", [10, 60, 80, 90], (), ("pearson",))
    assert judge(scores, [[1], [2], [3], [3]], [replace(line, loss=20.0 * line.step) for line in GOOD]) == ""


def test_no_training_is_noticed() -> None:
    assert judge(CLASSES, MIXED, [], replace(CONFIG, epochs=0.0)).startswith(
        "warning: nothing was trained, because of --epochs 0: "
    )
    assert "because of --learning-rate 0" in judge(CLASSES, MIXED, config=replace(CONFIG, learning_rate=0.0))


def test_a_learning_rate_far_above_the_usual_ones_is_said_at_once() -> None:
    assert warn_of_learning_rate(TrainConfig(learning_rate=2e5)).startswith("warning: --learning-rate 200000 is far")
    assert [warn_of_learning_rate(TrainConfig(learning_rate=rate)) for rate in (-1.0, 0.0, 2e-5, 0.1)] == [""] * 4


def test_a_run_ends_with_the_warning(tmp_path: Path) -> None:
    model = ("--model", save_tiny(tmp_path / "tiny"), "--max-length", "32")
    done = run_cpuft("launch", "--task", "demo", *model, "--epochs", "0", "--no-save-model")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].startswith("warning: nothing was trained, because of --epochs 0: ")
