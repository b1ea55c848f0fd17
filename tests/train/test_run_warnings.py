"""Warnings of runs that did not fail: before they train, while they train, and of what they have reached."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpuft.config.train import TrainConfig
from cpuft.record import EvaluationLine
from cpuft.train.data.archive import EMPTY, UNTAGGED, Prepared, Tokens, count_repeated
from cpuft.train.objective.table import make_objective
from cpuft.train.result_warnings import find_last_warning, find_result_warning
from cpuft.train.run_warnings import (
    RunWatch,
    find_chance_loss,
    find_early_warnings,
    find_standard_error,
)
from tests.conftest import run_cpuft
from tests.records import make_steps
from tests.train.tiny import save_tiny
from tests.train.tokens import make_tokens

CONFIG = TrainConfig(learning_rate=2e-5)
GOOD = make_steps(20, [0.1])
TIMES = 60


def prepare(kind: str, labels: Any, names: tuple[str, ...], metrics: tuple[str, ...], times: int = TIMES) -> Prepared:
    """Examples of one token, or for tags of two, which have these labels again and again."""
    values = np.asarray(labels, np.int32 if kind == "tags" else np.float32)
    values = np.tile(values, (times, *[1] * (values.ndim - 1)))
    count = len(values) // (2 if kind == "tags" else 1)
    tokens = replace(make_tokens([2 if kind == "tags" else 1] * count), labels=values)
    return Prepared(names, metrics, "", 0, tokens, {"": tokens}, kind)


CLASSES = prepare("class", [0, 1, 1, 1], ("no", "yes"), ("accuracy", "f1"))


def judge(
    prepared: Prepared, predictions: Any, config: TrainConfig = CONFIG, baseline: dict[str, float] | None = None
) -> str:
    objective, tokens = make_objective(config, prepared), prepared.validation[""]
    found = np.asarray(predictions, np.float32)
    found = np.tile(found, (len(tokens) // len(found), *[1] * (found.ndim - 1)))
    metrics, columns = objective.compute_metrics(found, tokens), objective.list_predictions(found, tokens)
    return find_result_warning(config, objective, prepared, metrics, columns, baseline)


def list_early(config: TrainConfig, prepared: Prepared) -> list[str]:
    return [*find_early_warnings(config, prepared)]


NO, YES = [1, 0], [0, 1]
PERFECT = [NO, YES, YES, YES]


@pytest.mark.parametrize(
    "prepared, predictions, answer",
    [
        (CLASSES, [YES] * 4, "it calls 240 of 240 rows yes, and 180 have this label"),
        (CLASSES, [NO] * 4, "it calls 240 of 240 rows no, and 60 have this label"),
        (CLASSES, PERFECT, ""),
        # 12 of 240 rows get the other label, where 60 have it.
        (CLASSES, [*PERFECT, *[YES] * 16], "it calls 228 of 240 rows yes, and 180 have this label"),
        # As many rows get each label as have it, but not the right ones: accuracies of 0.75 and 0.83.
        (CLASSES, [YES, NO, YES, YES, *PERFECT], "better than the label yes for every row: accuracy 0.7500"),
        (CLASSES, [YES, NO, YES, YES, *PERFECT * 2], ""),
        (prepare("class", [0, 1, 1, 1], ("no", "yes"), ("accuracy",), 4), [YES] * 4, ""),
        (prepare("class", [1, 1, 1, 1], ("no", "yes"), ("accuracy",)), [YES] * 4, ""),
        (prepare("score", [0, 1, 2, 3], (), ("pearson",)), [[1]] * 4, "clearly better than one score for every row"),
        (prepare("score", [0, 1, 2, 3], (), ("pearson",)), [[1], [1], [1], [2]], ""),
        (prepare("score", [0, 1, 2, 3], (), ("pearson",)), [[1], [3], [2], [1]], "clearly better than one score"),
        (
            prepare("labels", [[0, 1], [1, 1], [0, 1], [0, 0]], ("a", "b"), ("f1_micro",)),
            [[-1, -2]] * 4,
            "clearly better than no label for every row: f1_micro 0.0000",
        ),
        (prepare("labels", [[0, 1], [1, 1], [0, 1], [0, 0]], ("a", "b"), ("f1_micro",)), [[1, -2]] * 4, ""),
        (
            prepare("tags", [0, UNTAGGED, 0, 1, 0, 0, 0, 0], ("O", "B-PER"), ("f1", "accuracy")),
            np.zeros((4, 2)),
            "clearly better than the tag O for every row",
        ),
        (
            prepare("tags", [0, UNTAGGED, 0, 1, 0, 0, 0, 0], ("O", "B-PER"), ("f1", "accuracy")),
            [[0, 0], [0, 1], [0, 0], [0, 1]],
            "",
        ),
    ],
)
def test_one_answer_for_every_row_is_noticed(prepared: Prepared, predictions: Any, answer: str) -> None:
    warning = judge(prepared, predictions)
    assert answer in warning
    assert bool(warning) == bool(answer)


def test_class_weights_may_cost_accuracy_but_not_all_rows() -> None:
    balanced = replace(CONFIG, class_weights="balanced")
    assert judge(CLASSES, [YES, NO, YES, YES, *PERFECT], balanced) == ""
    assert judge(CLASSES, [YES, NO, YES, YES, *PERFECT], balanced, {"accuracy": 0.9}) == ""
    assert "worse than the baseline: f1 0.8" in judge(CLASSES, [YES, NO, YES, YES, *PERFECT], balanced, {"f1": 0.99})
    assert "it calls 228 of 240 rows yes" in judge(CLASSES, [*PERFECT, *[YES] * 16], balanced)


def test_a_model_that_is_not_better_than_the_baseline_is_noticed() -> None:
    good = [*PERFECT * 9, YES, NO, YES, YES]  # accuracy 0.95, standard error 0.015
    assert judge(CLASSES, good, baseline={"accuracy": 0.93, "f1": 0.9}) == ""
    assert judge(CLASSES, good, baseline={"accuracy": 0.94, "f1": 0.96}).startswith(
        "warning: the model is not clearly better than the baseline: accuracy 0.9500 (standard error 0.0149) against "
    )
    assert judge(CLASSES, good, baseline={"accuracy": 0.94, "f1": math.nan}) == ""
    worse = judge(CLASSES, good, baseline={"accuracy": 0.99, "f1": 0.99})
    assert worse.startswith("warning: the model is worse than the baseline: accuracy 0.9500 (standard error 0.0149)")
    assert "train longer, or with a higher or lower --learning-rate" in worse


@pytest.mark.parametrize("weights", ["", "balanced", "1,5,2"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_of_one_answer_is_that_of_torch(weights: str, smoothing: float) -> None:
    config = replace(CONFIG, class_weights=weights, label_smoothing=smoothing)
    prepared = prepare("class", [0, 1, 1, 2, 1, 1], ("a", "b", "c"), ("accuracy",))
    objective, labels = make_objective(config, prepared), torch.from_numpy(prepared.train.labels).long()
    numbers = torch.tensor(getattr(objective, "class_weights", ()) or (1.0, 1.0, 1.0))
    logits = torch.zeros(3, requires_grad=True)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits.expand(len(labels), 3), labels, numbers, label_smoothing=smoothing
        )

    optimizer: Any = torch.optim.LBFGS([logits], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        torch.autograd.backward(value)
        return float(value.detach())

    optimizer.step(closure)
    assert find_chance_loss(config, prepared) == pytest.approx(float(loss()), rel=1e-5)


def test_the_loss_of_one_answer_of_other_kinds() -> None:
    assert find_chance_loss(CONFIG, prepare("score", [0, 2, 4, 2], (), ("pearson",))) == 2
    several = prepare("labels", [[0, 1], [1, 1]], ("a", "b"), ("f1_micro",))
    assert find_chance_loss(CONFIG, several) == pytest.approx(math.log(2) / 2)
    tags = prepare("tags", [0, UNTAGGED, 1, UNTAGGED], ("O", "B"), ("f1",))
    assert find_chance_loss(CONFIG, tags) == pytest.approx(math.log(2))
    assert find_chance_loss(CONFIG, replace(tags, kind="masked", vocab_size=100)) == pytest.approx(math.log(100))
    assert math.isnan(find_chance_loss(CONFIG, replace(tags, kind="pairs")))


def watch(losses: Any, prepared: Prepared = CLASSES, **options: Any) -> list[str]:
    """Return all warnings of a run with these losses, first those that come while it trains, with their updates."""
    one = RunWatch(replace(CONFIG, **options), prepared, len(losses), 16, "accuracy")
    lines = [replace(GOOD[0], step=step, loss=float(loss)) for step, loss in enumerate(losses, 1)]
    found = [f"{line.step}: {warning}" for line in lines if (warning := one.add(line))]
    return found + [one.finish()] * bool(one.finish())


def draw(means: Any) -> Any:
    """Losses with these means, with the noise of batches of 16 examples."""
    return np.asarray(means) * np.random.default_rng(0).normal(1, 0.12, len(means))


CURVES = json.loads(Path(__file__).parents[1].joinpath("data", "losses.json").read_text(encoding="utf-8"))
"""Losses of runs of MiniLM on GLUE's tasks in batches of 16 examples, of long runs every second one, with options, and
the number of examples of each class, or mean and standard deviation of the scores."""


@pytest.mark.parametrize(
    "name, warning",
    [
        ("sst2-normal", ""),
        ("sst2-smooth", ""),
        ("sst2-lora", ""),
        ("sst2-head", ""),  # trained before
        ("sst2-high", "learned nothing in 63 updates: the loss is 0.7"),
        ("mrpc-low", "learned nothing in 115 updates: the loss is 0.6"),
        ("mrpc-high", "learned nothing in 75 updates: the loss is 0.7"),
        ("mrpc-lora", ""),
        ("mrpc-smooth", ""),
        ("mrpc-balanced", ""),
        ("imbalanced", ""),
        ("imbalanced-balanced", ""),
        ("stsb-normal", ""),
        ("stsb-high", ""),  # it has learned the mean, which is what its metric says
        ("stsb-low", "learned nothing in 100 updates: the loss is 8.596, "),
        ("wnli", "learned nothing in 60 updates: the loss is 0.693, and that of one answer for every example is 0.693"),
        ("overfit", ""),
        ("demo", ""),
        ("tiny", ""),
    ],
)
def test_losses_of_real_runs(name: str, warning: str) -> None:
    curve = CURVES[name]
    numbers = curve["labels"]
    is_score = curve["kind"] == "score"
    labels = np.add(numbers[0], [-numbers[1], numbers[1]]) if is_score else np.repeat(range(len(numbers)), numbers)
    prepared = prepare(curve["kind"], labels, tuple("ab"), ("accuracy",), 1)
    found = watch(curve["losses"], prepared, **curve["options"])
    assert [warning in one for one in found] == [True] * bool(warning)


def test_a_loss_that_diverges_is_said_once() -> None:
    assert watch([0.7, *[2.7e7] * 79]) == [
        "20: warning: the training has diverged: the loss rose from 0.7 to 2.7e+07 until update 20: try a tenth "
        "of --learning-rate 2e-05 or --warmup-ratio 0.1"
    ]
    [short] = watch([0.7, 0.9, *[30.0] * 6])
    assert short.startswith("warning: the training has diverged: ")
    assert watch([0.001, *[0.3] * 79]) == []
    assert watch(draw([0.05] * 100 + [0.3] * 100)) == []  # a model that was trained before
    assert watch([0.3, 0.01, 0.2, 3.0, 0.1, 2.0, 1.9]) == []  # batches of one example
    scores = prepare("score", [10, 60, 80, 90], (), ("pearson",))
    assert watch([10.0 * step for step in range(1, 81)], scores) == []
    assert watch([1e6 if step % 7 == 3 else 100.0 for step in range(80)], scores) == []
    tokens = replace(CLASSES, kind="causal", vocab_size=30000)
    assert watch([0.5, *[2.0] * 79], tokens) == []  # a short answer, then usual ones
    assert watch([3.0] * 40 + [9.0] * 40, tokens)[0].startswith("60: warning: the training has diverged: the loss rose")
    assert watch([0.0, *[3.5] * 79], replace(CLASSES, kind="similarity")) == []


def test_a_loss_that_does_not_move_is_said_at_half_of_a_run_or_at_its_end() -> None:
    said = (
        "warning: the model has learned nothing in 300 updates: the loss is 0.5608, and that of one answer for every "
        "example is 0.5623: "
    )
    [warning] = watch(draw([0.57] * 600))
    assert warning.startswith(f"300: {said}train longer, or with a higher or lower --learning-rate 2e-05, unless")
    assert watch(draw([0.565] * 600), learning_rate=1e-9, lora_rank=8)[0].endswith("1e-09 is too low, try 0.0002")
    [warning] = watch(draw([0.58] * 600), warmup_ratio=0.25)
    assert warning.startswith("375: ")
    [warning] = watch(draw([0.58] * 300))
    assert warning.startswith("warning: the model has learned nothing in 300 updates: ")
    assert watch(draw([0.565] * 15)) == []  # too few updates to know
    assert watch(draw([0.565] * 250 + [0.5] * 50)) == []  # begins late
    assert watch(draw([0.3] * 600)) == []  # a model that was trained before, and a rate that is too low
    assert watch(draw([0.60] * 600), label_smoothing=0.1) != []
    assert watch(draw([0.57] * 600), label_smoothing=0.1) == []
    assert watch(draw([0.70] * 600), class_weights="balanced") != []
    assert watch(draw([0.67] * 600), class_weights="balanced") == []
    scores = prepare("score", [10, 60, 80, 90], (), ("pearson",))
    assert watch(draw(np.linspace(4500, 2000, 600)), scores) == []  # the mean of the scores is not learned yet


def evaluate_all(values: list[float], metric: str = "accuracy", **options: Any) -> list[str]:
    one = RunWatch(replace(CONFIG, **options), CLASSES, 100 * len(values), 24, metric)
    lines = [EvaluationLine(100 * place, {metric: value}, 240, 1.0) for place, value in enumerate(values, 1)]
    return [one.add(line) for line in lines]


def test_a_validation_curve_that_has_turned_is_said_once() -> None:
    *before, said, after = evaluate_all([0.80, 0.90, 0.89, 0.85, 0.84, 0.80])
    assert (before, after) == ([""] * 4, "")
    assert said == (
        "warning: since update 200 the model has become worse on validation rows: accuracy was 0.9000, and after "
        "update 500 is 0.8400 (standard error 0.0198): add --save-best, or train less (--epochs 20)"
    )
    assert evaluate_all([0.90, 0.88, 0.89, 0.87, 0.88]) == [""] * 5  # within the noise of 240 rows
    assert evaluate_all([0.90, 0.80, 0.90, 0.80]) == [""] * 4  # one bad evaluation is no trend
    assert evaluate_all([0.80, 0.90, 0.84, 0.84], save_best=True) == [""] * 4
    assert any(evaluate_all([20.0, 10.0, 10.3, 10.9], "perplexity"))
    assert not any(evaluate_all([20.0, 10.0, 10.1, 10.1], "perplexity"))


def test_standard_errors_are_those_of_the_rows_that_decide() -> None:
    assert find_standard_error(CLASSES, "accuracy", 0.5) == pytest.approx(0.5 / math.sqrt(240), rel=0.01)
    assert find_standard_error(CLASSES, "accuracy", 1.0) > 0.005
    assert find_standard_error(CLASSES, "f1", 0.5) == pytest.approx(0.5 / math.sqrt(180), rel=0.02)
    rare = prepare("class", [0] * 9 + [1], ("no", "yes"), ("f1_macro",))
    assert find_standard_error(rare, "f1_macro", 0.5) > 2 * find_standard_error(rare, "accuracy", 0.5) / math.sqrt(2)
    assert find_standard_error(CLASSES, "matthews_correlation", 0.0) == pytest.approx(1 / math.sqrt(239))
    tokens = CLASSES.train
    both = replace(CLASSES, validation={"": tokens, "_mismatched": replace(tokens, offsets=tokens.offsets[:61])})
    assert find_standard_error(both, "accuracy_mismatched", 0.5) > find_standard_error(both, "accuracy", 0.5)


def test_what_harms_a_run_is_said_before_it() -> None:
    assert list_early(CONFIG, CLASSES) == []
    assert list_early(CONFIG, replace(CLASSES, repeated=2)) == []
    small = prepare("class", [0, 1, 1], ("no", "yes"), ("accuracy",), 58)
    assert list_early(CONFIG, small) == [
        "warning: with 174 validation rows, accuracies that differ by less than 0.034 cannot be told apart: to compare "
        "them, add rows"
    ]
    assert list_early(CONFIG, replace(small, kind="score")) == []
    tiny = list_early(CONFIG, prepare("class", [0, 1], ("no", "yes"), ("accuracy",), 1))
    assert tiny[0].startswith("warning: with 2 validation rows, two accuracies cannot be told apart: ")
    unknown, repeated, rate = list_early(
        replace(CONFIG, learning_rate=2e5), replace(CLASSES, repeated=12, unknown_share=0.2)
    )
    assert unknown.startswith("warning: 20% of the tokens of the training texts are unknown")
    assert repeated.startswith("warning: 12 of 240 validation rows have the same tokens as a training row, so that ")
    assert rate.startswith("warning: --learning-rate 200000 is far")
    assert [list_early(replace(CONFIG, learning_rate=one), CLASSES) for one in (0.0, 2e-5, 0.1)] == [[]] * 3


def test_validation_rows_that_are_training_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*rows: list[int]) -> Tokens:
        offsets = np.cumsum([0, *map(len, rows)])
        return Tokens(np.asarray([*chain.from_iterable(rows)], np.int32), EMPTY, offsets, EMPTY)

    train = make([5, 6, 7], [], [7, 6, 5], [0], [0, 0], [8] * 40, [9])
    validation = make([5, 6, 7], [5, 6], [6, 7], [0, 0, 0], [9], [8] * 40, [8] * 39, [9], [5, 7, 6])
    assert count_repeated(train, validation) == 4
    assert count_repeated(validation, train) == 3
    assert count_repeated(make([1]), make([], [])) == 0
    monkeypatch.setattr("cpuft.train.data.archive._HASHED_AT_ONCE", 3)
    assert count_repeated(train, validation) == 4


def test_no_training_is_noticed() -> None:
    objective = make_objective(CONFIG, CLASSES)
    none = find_last_warning(RunWatch(replace(CONFIG, epochs=0.0), CLASSES, 0, 32, "accuracy"), objective, None)
    assert none.startswith("warning: nothing was trained, because of --epochs 0: ")
    [warning] = watch([0.7] * 20, learning_rate=0.0)
    assert "because of --learning-rate 0" in warning


def test_a_fault_in_judging_a_result_does_not_fail_the_run() -> None:
    one = RunWatch(CONFIG, CLASSES, 20, 32, "accuracy")
    one.add(GOOD[0])
    broken = replace(make_objective(CONFIG, CLASSES), metrics=("unknown",))
    warning = find_last_warning(one, broken, EvaluationLine(1, {}, 240, 1.0))
    assert warning.startswith("warning: the result could not be compared with that of one answer for every row (")


def test_a_run_ends_with_the_warning(tmp_path: Path) -> None:
    model = ("--model", save_tiny(tmp_path / "tiny"), "--max-length", "32")
    done = run_cpuft("launch", "--task", "demo", *model, "--epochs", "0", "--no-save-model")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].startswith("warning: nothing was trained, because of --epochs 0: ")
