"""A class for each word: what is learned, and seqeval's metrics by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cpuft.train.data.prepare import UNTAGGED, Tokens
from cpuft.train.evaluate import join
from cpuft.train.objective.labels import Tagging, compute_tag_metrics
from tests.train.objective.test_sequences import Answers, answered
from tests.train.tokens import make_tokens

NAMES = ("f1", "precision", "recall", "accuracy")
TAGS = ("B-LOC", "B-PER", "I-PER", "O")
TAGGING = Tagging(TAGS, NAMES, pad_id=9, width=0)
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
    losses = TAGGING.losses(Answers(), answered(logits.tolist(), labels))
    wanted = torch.nn.functional.cross_entropy(logits.float().reshape(-1, 4), labels.reshape(-1))
    assert (losses.shape, losses.dtype) == ((2,), torch.float32)
    assert float(losses.sum()) / TAGGING.count_terms(tokens, rows) == pytest.approx(float(wanted), rel=1e-6)
    assert [TAGGING.count_terms(tokens, np.asarray([row])) for row in (0, 1)] == [3, 1]


def test_answers_of_batches_of_different_lengths_are_measured() -> None:
    tokens = make_tagged()
    outputs = [torch.eye(4)[[1, 0, 3, 3]][None], torch.eye(4)[[0, 0]][None]]
    parts = [(np.asarray([row]), TAGGING.decide(output.numpy())) for row, output in enumerate(outputs)]
    answers = join(parts[::-1])
    assert answers.tolist() == [[1, 0, 3, 3], [0, 0, -1, -1]]
    # PER is cut short, LOC is right: one of two entities found, one of two right; three of four words.
    assert TAGGING.measure(answers, tokens) == dict(zip(NAMES, (0.5, 0.5, 0.5, 0.75)))


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
def test_metrics_by_hand(answers: list[str], tags: list[str], wanted: tuple[float, ...]) -> None:
    found = compute_tag_metrics(NAMES, [row.split() for row in answers], [row.split() for row in tags])
    assert found == pytest.approx(dict(zip(NAMES, wanted)))
