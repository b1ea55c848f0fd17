"""Evaluations while training: which one is the best, when they end the training, and what they leave in the record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from cpuft.config.train import TrainConfig
from cpuft.judge.predictions import read_predictions
from cpuft.record import EvaluationLine, Record, read_record
from cpuft.train.data.sources import read_data
from cpuft.train.early_stopping import find_best, should_stop_early
from tests.conftest import call_cpuft, run_cpuft
from tests.train.tiny import save_tiny

JOB = (
    *("--task", "files", "--train-file", "train.jsonl", "--validation-file", "validation.jsonl"),
    *("--batch-size", "8", "--max-length", "32", "--learning-rate", "1e-4", "--max-steps", "20", "--backend", "gloo"),
)
EVERY_EPOCH = ("--eval-every", "epoch")


def lines(values: list[float], metric: str = "accuracy") -> list[EvaluationLine]:
    return [EvaluationLine(step, {metric: value}, 1, 0.1) for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("accuracy", [0.1, 0.3, 0.3, 0.2], 2),
        ("perplexity", [9.0, 7.0, 8.0, 7.0], 2),
        ("accuracy", [0.5], 1),
        ("pearson", [math.nan, 0.1, 0.2, math.nan], 3),
        ("pearson", [math.nan, math.nan], 1),
    ],
)
def test_the_first_of_the_best_evaluations_is_the_best(metric: str, values: list[float], best: int) -> None:
    found = find_best(lines(values, metric), metric)
    assert found is not None
    assert found.step == best


def test_without_evaluations_none_is_the_best_and_nothing_ends() -> None:
    assert find_best([], "accuracy") is None
    assert not should_stop_early([], "accuracy", 1)


def stop_as_transformers(values: list[float], patience: int) -> int:
    """Number of evaluations after which a Trainer with EarlyStoppingCallback ends; 0 for never."""
    callback, control, state = EarlyStoppingCallback(patience), TrainerControl(), TrainerState()
    options: Any = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True)
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(options, state, control, {"eval_accuracy": value})
        if state.best_metric is None or value > state.best_metric:  # as Trainer._determine_best_metric
            state.best_metric = value
        if control.should_training_stop:
            return number
    return 0


@given(values=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=12), patience=st.integers(1, 4))
def test_training_ends_early_where_a_trainer_would_end_it(values: list[float], patience: int) -> None:
    stops = [n for n in range(1, len(values) + 1) if should_stop_early(lines(values[:n]), "accuracy", patience)]
    assert (stops or [0])[0] == stop_as_transformers(values, patience)


def write_data() -> None:
    """Write the demo's pairs, few of them for validation, so that evaluating is quick."""
    data = read_data(TrainConfig(task="demo"))
    for name, examples, count in (("train", data.train.load(), 160), ("validation", data.validation[""].load(), 48)):
        rows = zip(examples.texts[:count], examples.labels)
        lines = [json.dumps({"sentence1": a, "sentence2": b, "label": str(int(label))}) for (a, b), label in rows]
        Path(f"{name}.jsonl").write_text("\n".join(lines))


def train(name: str, *options: str) -> Record:
    write_data()
    done = run_cpuft("launch", *JOB, "--run-dir", name, *options)
    assert done.returncode == 0, done.stderr
    return read_record(name)


@pytest.mark.proof
def test_evaluations_change_neither_the_losses_nor_the_last_metrics(tmp_path: Path) -> None:
    plain = train("plain", "--np", "2", "--no-save-model")
    often = train("often", "--np", "2", "--no-save-model", "--eval-every", "8")
    assert [line.step for line in often.evaluations] == [8, 16, 20]
    assert [line.loss for line in often.steps] == [line.loss for line in plain.steps]
    assert often.metrics == plain.metrics
    assert plain.footer is not None
    assert often.footer is not None
    assert often.footer.checksum == plain.footer.checksum
    assert often.footer.evaluation_seconds == pytest.approx(sum(line.seconds for line in often.evaluations))


OTHER_WAYS = [("--lora-rank", "4"), ("--sync-every", "3"), ()]


@pytest.mark.parametrize(
    "how", [("--shard", "optimizer"), *(pytest.param(how, marks=pytest.mark.proof) for how in OTHER_WAYS)]
)
def test_the_saved_model_is_that_of_the_best_evaluation(
    how: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A high learning rate, so that the best evaluation is not the last one.
    model = save_tiny(tmp_path / "tiny")
    options = ("--np", "2", "--learning-rate", "2e-2", "--eval-every", "5", "--save-best", "--best-metric", "macro-f1")
    record = train("run", *options, *how, "--model", model)
    values = [line.metrics["f1_macro"] for line in record.evaluations]
    best = record.evaluations[values.index(max(values))]
    assert record.footer is not None
    assert record.footer.saved_step == (best.step if best.step != record.evaluations[-1].step else 0)
    assert record.metrics == best.metrics
    kept = read_predictions("run")
    assert (kept.about.step, kept.about.metrics) == (best.step, best.metrics)
    assert np.mean(kept.column("label") == kept.column("prediction")) == best.metrics["accuracy"]
    assert [*kept.column("text")[0]] == list(read_data(TrainConfig(task="demo")).validation[""].load().texts[0])
    code, said, warned = call_cpuft(capfd, "predict", "run", "--split", "validation")
    assert code == 0, warned
    assert f"accuracy {best.metrics['accuracy']:.4f}  f1 {best.metrics['f1']:.4f}" in said + warned
    assert not Path("run/checkpoints").exists()


@pytest.mark.proof
def test_early_stopping_ends_a_run_that_is_complete(tmp_path: Path) -> None:
    record = train("run", "--np", "2", "--learning-rate", "0", "--eval-every", "4", "--early-stopping", "2")
    assert [line.step for line in record.evaluations] == [4, 8, 12]
    assert (len(record.steps), record.footer is not None) == (12, True)


def test_what_no_evaluation_can_tell_is_refused() -> None:
    write_data()
    for options, message in (
        (("--save-best",), "--save-best changes nothing by itself: add --eval-every epoch, or leave it out"),
        (("--eval-every", "0"), "--eval-every '0' is not valid: give epoch, none, or a number of updates, 1 or more"),
        (
            (*EVERY_EPOCH, "--save-best", "--best-metric", "f2"),
            "--task files has no metric 'f2': did you mean f1?",
        ),
    ):
        done = run_cpuft("launch", *JOB, *options)
        assert done.returncode == 2
        assert message in done.stderr
