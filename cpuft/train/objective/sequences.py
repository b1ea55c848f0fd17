"""Answers to each row: its class, any of several classes, or a score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cpuft.train.data.prepare import Tokens
from cpuft.train.objective import Answers, Batch, Objective
from cpuft.train.objective.metrics import compute_metrics


def name_classes(labels: Sequence[str]) -> dict[str, Any]:
    """Classes in a model's configuration."""
    names = dict(enumerate(labels))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: number for number, name in names.items()}}


class Classification(Objective):
    """Which class? By cross entropy."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.int64

    def head(self) -> dict[str, Any]:
        """An output for each class."""
        return {"problem_type": "single_label_classification", **name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy."""
        logits = model(**batch.inputs).logits
        return torch.nn.functional.cross_entropy(logits.float(), batch.labels, reduction="none")

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Metrics of the likeliest classes."""
        return compute_metrics(self.metrics, answers.argmax(-1), tokens.labels)


class SeveralLabels(Objective):
    """Which classes, if any? By binary cross entropy of each."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head(self) -> dict[str, Any]:
        """An output for each class, by itself."""
        return {"problem_type": "multi_label_classification", **name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over the classes."""
        logits = model(**batch.inputs).logits.float()
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return entropy.mean(-1)

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Metrics of the classes that are likelier than not; accuracy counts rows with all of them right."""
        return compute_metrics(self.metrics, (answers > 0).astype(np.float32), tokens.labels)


class Regression(Objective):
    """Which score? By the square of the error."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head(self) -> dict[str, Any]:
        """One output."""
        return {"num_labels": 1, "problem_type": "regression"}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Squares of errors."""
        scores: torch.Tensor = model(**batch.inputs).logits[:, 0].float()
        return (scores - batch.labels) ** 2

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Metrics of the scores."""
        return compute_metrics(self.metrics, answers[:, 0], tokens.labels)
