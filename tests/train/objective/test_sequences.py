"""Classes and scores of rows: head, labels, loss and metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpuft.config import TrainConfig
from cpuft.train.data.prepare import Prepared
from cpuft.train.objective import make_objective
from cpuft.train.objective.base import Batch
from cpuft.train.objective.labels import Classification, Regression
from tests.train.tokens import make_tokens

BINARY = (("no", "yes"), ("accuracy", "f1", "matthews_correlation"))
SCORES = ((), ("pearson", "spearman"))
CLASSES = Classification(*BINARY, pad_id=9, width=0)
NUMBERS = Regression(*SCORES, pad_id=9, width=0)


class Answers(torch.nn.Module):
    """A model that gives the numbers that it gets."""

    def forward(self, outputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=outputs)


def answered(outputs: list[list[float]], labels: torch.Tensor) -> Batch:
    return Batch({"outputs": torch.tensor(outputs, dtype=torch.bfloat16)}, labels, 0)


def test_a_batch_is_padded_to_its_longest_row() -> None:
    batch = Classification(*BINARY, pad_id=9, width=0).make_batch(make_tokens([2, 5, 3]), np.asarray([0, 2]))
    assert batch.inputs["input_ids"].tolist() == [[1, 1, 9], [3, 3, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.inputs["token_type_ids"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert (batch.labels.dtype, batch.tokens, len(batch.labels)) == (torch.int64, 5, 2)
    wide = Regression(*SCORES, pad_id=0, width=8).make_batch(make_tokens([2, 5], types=False), np.asarray([0, 1]))
    assert wide.inputs["input_ids"].shape == (2, 8)
    assert ("token_type_ids" in wide.inputs, wide.labels.dtype) == (False, torch.float32)


def test_the_words_of_rows_are_theirs_and_the_one_that_pads() -> None:
    assert CLASSES.name_tokens(make_tokens([2, 5, 1]), np.asarray([2, 0])).tolist() == [3, 1, 1, 9]


def test_each_row_has_its_loss_in_fp32() -> None:
    losses = CLASSES.losses(Answers(), answered([[0, 0], [0, 2]], torch.tensor([1, 0])))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.e**2)])
    squares = NUMBERS.losses(Answers(), answered([[1], [4]], torch.tensor([0.5, 4.0])))
    assert squares.dtype == torch.float32
    assert squares.tolist() == pytest.approx([0.25, 0.0])


def test_answers_are_the_head_s_outputs_in_fp32() -> None:
    answers = CLASSES.answers(Answers(), answered([[0, 1], [1, 0]], torch.tensor([1, 0])))
    assert answers.dtype == np.dtype(np.float32)
    assert answers.tolist() == [[0, 1], [1, 0]]


def test_the_likeliest_classes_are_measured() -> None:
    tokens = replace(make_tokens([1] * 4), labels=np.asarray([1, 0, 1, 0], np.float32))
    found = CLASSES.measure(np.asarray([[0, 1], [1, 0], [0, 1], [0, 1]], np.float32), tokens)
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.8, "matthews_correlation": 0.5774}, abs=1e-4)


def test_scores_are_measured() -> None:
    tokens = replace(make_tokens([1] * 3), labels=np.asarray([1, 2, 3], np.float32))
    found = NUMBERS.measure(np.asarray([[1], [2], [4]], np.float32), tokens)
    assert found == pytest.approx({"pearson": 0.9820, "spearman": 1.0}, abs=1e-4)


@pytest.mark.parametrize(
    "labels, kind, wanted, outputs",
    [
        (("a", "b", "c"), "class", "single_label_classification", 3),
        ((), "score", "regression", 1),
        (("a", "b", "c"), "labels", "multi_label_classification", 3),
        (("a", "b", "c"), "tags", None, 3),
    ],
)
def test_the_rows_decide_on_the_head(labels: tuple[str, ...], kind: str, wanted: str | None, outputs: int) -> None:
    rows = make_tokens([1])
    objective = make_objective(TrainConfig(), Prepared(labels, ("accuracy",), "", 0, rows, {"": rows}, kind))
    model = objective.load_model(TrainConfig(dropout=0.25))
    assert (model.config.problem_type, model.config.num_labels) == (wanted, outputs)
    assert model.classifier.weight.shape == (outputs, 384)
    assert model.config.hidden_dropout_prob == 0.25
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("padding, width", [("dynamic", 2), ("max_length", 16)])
def test_rows_are_padded_as_asked_for(padding: str, width: int) -> None:
    rows = make_tokens([2, 1])
    config = TrainConfig(padding=padding, max_length=16)
    objective = make_objective(config, Prepared(("a", "b"), (), "", 0, rows, {"": rows}))
    assert objective.make_batch(rows, np.asarray([0, 1])).inputs["input_ids"].shape == (2, width)
