"""Classes and scores of rows: head, labels, loss and metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpuft.config.train import TrainConfig
from cpuft.judge.metrics import compute_label_metrics, compute_tag_metrics
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens
from cpuft.train.evaluate import join_batches
from cpuft.train.model import load_model
from cpuft.train.objective.base import Batch
from cpuft.train.objective.labels import (
    Classification,
    MultiLabelClassification,
    Regression,
    TokenClassification,
)
from cpuft.train.objective.table import make_objective
from tests.train.tokens import make_tokens

BINARY = (("no", "yes"), ("accuracy", "f1", "matthews_correlation"))
SCORES = ((), ("pearson", "spearman"))
CLASSES = Classification(*BINARY, pad_id=9)
NUMBERS = Regression(*SCORES, pad_id=9)


class Predictions(torch.nn.Module):
    """A model that gives the numbers that it gets."""

    def forward(self, outputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=outputs)


def answered(outputs: list[list[float]], labels: torch.Tensor) -> Batch:
    return Batch({"outputs": torch.tensor(outputs, dtype=torch.bfloat16)}, labels, 0)


def test_a_batch_is_padded_to_its_longest_row() -> None:
    batch = Classification(*BINARY, pad_id=9).make_batch(make_tokens([2, 5, 3]), np.asarray([0, 2]))
    assert batch.inputs["input_ids"].tolist() == [[1, 1, 9], [3, 3, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.inputs["token_type_ids"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert (batch.labels.dtype, batch.tokens, len(batch.labels)) == (torch.int64, 5, 2)
    plain = NUMBERS.make_batch(make_tokens([2, 5], types=False), np.asarray([0, 1]))
    assert ("token_type_ids" in plain.inputs, plain.labels.dtype) == (False, torch.float32)


def test_the_words_of_rows_are_theirs_and_the_one_that_pads() -> None:
    assert CLASSES.list_token_ids(make_tokens([2, 5, 1]), np.asarray([2, 0])).tolist() == [3, 1, 1, 9]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [(), (0.5, 2.0)])
def test_a_weighted_loss_is_that_of_torch(smoothing: float, weights: tuple[float, ...]) -> None:
    objective = Classification(*BINARY, 9, label_smoothing=smoothing, class_weights=weights)
    tokens = replace(make_tokens([1, 2, 3]), labels=np.asarray([0, 1, 1], np.float32))
    logits = [[0.5, 0.25], [0.0, 2.0], [1.0, -1.0]]
    losses = objective.losses(Predictions(), answered(logits, torch.tensor([0, 1, 1])))
    mean = losses.sum() / objective.count_terms(tokens, np.arange(3))
    reference = torch.nn.CrossEntropyLoss(torch.tensor(weights) if weights else None, label_smoothing=smoothing)
    assert float(mean) == pytest.approx(float(reference(torch.tensor(logits), torch.tensor([0, 1, 1]))), rel=1e-6)


def test_words_without_a_tag_have_no_weight() -> None:
    objective = TokenClassification(("O", "B-PER"), ("f1",), 0, class_weights=(0.5, 3.0))
    labels = np.asarray([UNTAGGED, 1, 0, UNTAGGED, 0], np.int32)
    tokens = replace(make_tokens([3, 2]), labels=labels)
    assert objective.count_terms(tokens, np.asarray([0])) == 3.5
    assert objective.count_terms(tokens, np.asarray([0, 1])) == 4.0


def test_each_row_has_its_loss_in_fp32() -> None:
    losses = CLASSES.losses(Predictions(), answered([[0, 0], [0, 2]], torch.tensor([1, 0])))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.e**2)])
    squares = NUMBERS.losses(Predictions(), answered([[1], [4]], torch.tensor([0.5, 4.0])))
    assert squares.dtype == torch.float32
    assert squares.tolist() == pytest.approx([0.25, 0.0])


def test_answers_are_the_head_s_outputs_in_fp32() -> None:
    answers = CLASSES.predict(Predictions(), answered([[0, 1], [1, 0]], torch.tensor([1, 0])))
    assert answers.dtype == np.dtype(np.float32)
    assert answers.tolist() == [[0, 1], [1, 0]]


def test_the_likeliest_classes_are_measured() -> None:
    tokens = replace(make_tokens([1] * 4), labels=np.asarray([1, 0, 1, 0], np.float32))
    found = CLASSES.compute_metrics(np.asarray([[0, 1], [1, 0], [0, 1], [0, 1]], np.float32), tokens)
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.8, "matthews_correlation": 0.5774}, abs=1e-4)


def test_scores_are_measured() -> None:
    tokens = replace(make_tokens([1] * 3), labels=np.asarray([1, 2, 3], np.float32))
    found = NUMBERS.compute_metrics(np.asarray([[1], [2], [4]], np.float32), tokens)
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


@pytest.mark.parametrize("kind", ["xlm", "esm"])
def test_dropout_is_set_everywhere(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "emb_dim": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **sizes, "n_layers": 1, "n_heads": 4, "mask_token_id": 3}))
    config = TrainConfig(from_config=str(path), dropout=0.25)
    model = load_model(config, "AutoModelForSequenceClassification", {"num_labels": 2})
    assert {one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)} == {0.25}
    assert type(getattr(model.config, "token_dropout", False)) is bool  # of ESM: no rate


CLASS_NAMES = ("f1_micro", "f1_macro", "accuracy")
SEVERAL = MultiLabelClassification(("a", "b"), CLASS_NAMES, pad_id=9)
TOKENS = replace(make_tokens([1, 2, 3]), labels=np.asarray([[1, 0], [1, 1], [0, 0]], np.float32))


def test_a_row_s_loss_is_the_mean_over_classes() -> None:
    batch = SEVERAL.make_batch(TOKENS, np.asarray([2, 0]))
    assert batch.labels.tolist() == [[0, 0], [1, 0]]
    losses = SEVERAL.losses(Predictions(), answered([[0, 0], [2, 2]], batch.labels))
    assert losses.dtype == torch.float32
    surprises = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))]
    assert losses.tolist() == pytest.approx([math.log(2), sum(surprises) / 2])
    assert SEVERAL.count_terms(TOKENS, np.asarray([2, 0])) == 2


def test_multi_label_metrics_by_hand() -> None:
    """a: one of two found; b: one found, one too many. Of three rows one is right as a whole."""
    answers = np.asarray([[3, -1], [-2, 1], [-1, 1]], np.float32)
    wanted = {"f1_micro": 2 * 2 / (2 * 2 + 1 + 1), "f1_macro": (2 / 3 + 2 / 3) / 2, "accuracy": 1 / 3}
    assert SEVERAL.compute_metrics(answers, TOKENS) == pytest.approx(wanted)


NAMES = ("f1", "precision", "recall", "accuracy")
TAGS = ("B-LOC", "B-PER", "I-PER", "O")
TAGGING = TokenClassification(TAGS, NAMES, pad_id=9)
NONE = UNTAGGED


def make_tagged() -> Tokens:
    """Rows of four tokens, three words, and of two tokens, one word."""
    return replace(make_tokens([4, 2]), labels=np.asarray([1, NONE, 2, 3, NONE, 0], np.int32))


def test_a_word_s_tag_is_at_its_first_token_and_padding_has_none() -> None:
    batch = TAGGING.make_batch(make_tagged(), np.asarray([1, 0]))
    assert batch.labels.tolist() == [[NONE, 0, NONE, NONE], [1, NONE, 2, 3]]
    assert (batch.labels.dtype, batch.tokens) == (torch.int64, 6)


def test_losses_add_up_to_the_mean_over_words() -> None:
    """Rows of three words and of one: as CrossEntropyLoss has it of both, not the mean of the rows' means."""
    tokens, rows = make_tagged(), np.asarray([0, 1])
    logits = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = TAGGING.make_batch(tokens, rows).labels
    losses = TAGGING.losses(Predictions(), answered(logits.tolist(), labels))
    wanted = torch.nn.functional.cross_entropy(logits.float().reshape(-1, 4), labels.reshape(-1))
    assert (losses.shape, losses.dtype) == ((2,), torch.float32)
    assert float(losses.sum()) / TAGGING.count_terms(tokens, rows) == pytest.approx(float(wanted), rel=1e-6)
    assert [TAGGING.count_terms(tokens, np.asarray([row])) for row in (0, 1)] == [3, 1]


def test_answers_of_batches_of_different_lengths_are_measured() -> None:
    tokens = make_tagged()
    outputs = [torch.eye(4)[[1, 0, 3, 3]][None], torch.eye(4)[[0, 0]][None]]
    parts = [(np.asarray([row]), TAGGING.reduce_outputs(output.numpy())) for row, output in enumerate(outputs)]
    answers = join_batches(parts[::-1])
    assert answers.tolist() == [[1, 0, 3, 3], [0, 0, -1, -1]]
    # PER is cut short, LOC is right: one of two entities found, one of two right; three of four words.
    assert TAGGING.compute_metrics(answers, tokens) == dict(zip(NAMES, (0.5, 0.5, 0.5, 0.75)))


@pytest.mark.parametrize(
    "answers, tags, wanted",
    [
        # One entity of two is right, of three answered: 1/3, 1/2, and their harmonic mean.
        (["B-PER I-PER O B-LOC B-LOC"], ["B-PER I-PER O O B-PER"], (0.4, 1 / 3, 0.5, 0.6)),
        # An entity does not go on into the next row, and an I- after O begins one, as conlleval has it.
        (["O I-PER", "I-PER"], ["O B-PER", "B-PER"], (1.0, 1.0, 1.0, 1 / 3)),
        (["O O"], ["O O"], (0.0, 0.0, 0.0, 1.0)),
        (["O B-LOC"], ["B-LOC O"], (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_tag_metrics_by_hand(answers: list[str], tags: list[str], wanted: tuple[float, ...]) -> None:
    found = compute_tag_metrics(NAMES, [row.split() for row in answers], [row.split() for row in tags])
    assert found == pytest.approx(dict(zip(NAMES, wanted)))


ANSWERS = np.asarray([1, 0, 1, 1])


def test_classes() -> None:
    found = compute_label_metrics(
        ("accuracy", "f1", "matthews_correlation"), ANSWERS, np.asarray([1, 0, 1, 0], np.float32)
    )
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.8, "matthews_correlation": 0.5774}, abs=1e-4)


def test_scores() -> None:
    scores = np.asarray([1, 2, 4], np.float32)
    found = compute_label_metrics(("pearson", "spearman"), scores, np.asarray([1, 2, 3], np.float32))
    assert found == pytest.approx({"pearson": 0.9820, "spearman": 1.0}, abs=1e-4)


def test_a_constant_answer_correlates_with_nothing() -> None:
    assert compute_label_metrics(("pearson",), np.ones(3, np.float32), np.asarray([1, 2, 3], np.float32)) == {
        "pearson": 0.0
    }
