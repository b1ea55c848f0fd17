"""Several labels a row: loss and metrics by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cpuft.train.objective.labels import SeveralLabels
from tests.train.objective.test_sequences import Answers, answered
from tests.train.tokens import make_tokens

NAMES = ("f1_micro", "f1_macro", "accuracy")
SEVERAL = SeveralLabels(("a", "b"), NAMES, pad_id=9, width=0)
TOKENS = replace(make_tokens([1, 2, 3]), labels=np.asarray([[1, 0], [1, 1], [0, 0]], np.float32))


def test_a_row_s_loss_is_the_mean_over_classes() -> None:
    batch = SEVERAL.make_batch(TOKENS, np.asarray([2, 0]))
    assert batch.labels.tolist() == [[0, 0], [1, 0]]
    losses = SEVERAL.losses(Answers(), answered([[0, 0], [2, 2]], batch.labels))
    assert losses.dtype == torch.float32
    surprises = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))]
    assert losses.tolist() == pytest.approx([math.log(2), sum(surprises) / 2])
    assert SEVERAL.count_terms(TOKENS, np.asarray([2, 0])) == 2


def test_metrics_by_hand() -> None:
    """a: one of two found; b: one found, one too many. Of three rows one is right as a whole."""
    answers = np.asarray([[3, -1], [-2, 1], [-1, 1]], np.float32)
    wanted = {"f1_micro": 2 * 2 / (2 * 2 + 1 + 1), "f1_macro": (2 / 3 + 2 / 3) / 2, "accuracy": 1 / 3}
    assert SEVERAL.measure(answers, TOKENS) == pytest.approx(wanted)
