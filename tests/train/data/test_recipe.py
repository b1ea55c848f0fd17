"""Options of the recipe that must fit the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import UNTAGGED, Prepared
from cpuft.train.data.recipe import check_recipe, find_best_metric, find_class_weights, find_metrics
from cpuft.train.objective.table import make_objective
from tests.train.tokens import make_tokens

TOKENS = replace(make_tokens([1, 1, 1, 1]), labels=np.asarray([0, 1, 1, 1], np.float32))
DATA = Prepared(("no", "yes"), ("accuracy", "f1"), "", 0, TOKENS, {"": TOKENS, "_other": TOKENS})


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    expected = compute_class_weight("balanced", classes=np.asarray([0, 1]), y=TOKENS.labels)
    assert find_class_weights("balanced", DATA) == pytest.approx(tuple(expected))


def test_words_without_a_tag_do_not_count_in_balanced_weights() -> None:
    tags = replace(TOKENS, labels=np.asarray([UNTAGGED, 1, 0, 1], np.int32))
    assert find_class_weights("balanced", replace(DATA, kind="tags", train=tags)) == (1.5, 0.75)


def test_weights_are_given_in_the_order_of_classes() -> None:
    assert find_class_weights("0.5,2", DATA) == (0.5, 2.0)
    assert find_class_weights("", DATA) == ()


@pytest.mark.parametrize("text", ["1", "1,2,3", "1,x", "1,0", "1,-2", "1,inf", "1,nan", "equal"])
def test_weights_that_are_not_one_positive_number_for_each_class_are_refused(text: str) -> None:
    with pytest.raises(CpuftError, match=r"is not valid: give balanced, or a positive .* the 2 classes \(no, yes\)"):
        find_class_weights(text, DATA)


def test_the_metric_is_the_first_of_the_task_or_the_given_one() -> None:
    assert find_best_metric(TrainConfig(), DATA) == "accuracy"
    assert find_best_metric(TrainConfig(best_metric="f1_other"), DATA) == "f1_other"
    with pytest.raises(CpuftError, match=r"--task demo has no metric 'loss': choose one of accuracy, .* f1_other$"):
        find_best_metric(TrainConfig(best_metric="loss"), DATA)


@pytest.mark.parametrize("name", ["macro-f1", "f1_macro"])
def test_all_classes_have_the_mean_f1(name: str) -> None:
    config = TrainConfig(best_metric=name)
    assert find_best_metric(config, DATA) == "f1_macro"
    assert make_objective(config, DATA).metrics == ("accuracy", "f1", "f1_macro")
    assert find_best_metric(TrainConfig(best_metric=f"{name}_other"), DATA) == "f1_macro_other"
    several = replace(DATA, kind="labels", metrics=("f1_micro", "f1_macro"))
    assert (find_best_metric(config, several), find_metrics(config, several)) == ("f1_macro", several.metrics)
    assert find_metrics(TrainConfig(), DATA) == DATA.metrics
    with pytest.raises(CpuftError, match="has no metric"):
        find_best_metric(config, replace(DATA, kind="score", metrics=("pearson",)))


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"class_weights": "balanced"}])
def test_data_without_classes_has_no_weights_and_no_smoothing(options: dict[str, Any]) -> None:
    config = replace(TrainConfig(), **options)
    check_recipe(config, DATA)
    with pytest.raises(CpuftError, match="is for one class per example or word"):
        check_recipe(config, replace(DATA, kind="score"))
