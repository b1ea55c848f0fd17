"""One answer to each row: its class, or a score."""

from __future__ import annotations

from typing import Any

import torch

from cpuft.options.fields import TrainConfig
from cpuft.train.data.prepare import Prepared, Tokens
from cpuft.train.objective import Answers, Batch, Objective
from cpuft.train.objective.metrics import compute_metrics


class Classification(Objective):
    """Which class? By cross entropy."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.int64

    def head(self) -> dict[str, Any]:
        """An output for each class."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        names = {"id2label": dict(enumerate(self.labels)), "label2id": numbers}
        return {"num_labels": len(self.labels), "problem_type": "single_label_classification", **names}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy."""
        logits = model(**batch.inputs).logits
        return torch.nn.functional.cross_entropy(logits.float(), batch.labels, reduction="none")

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Metrics of the likeliest classes."""
        return compute_metrics(self.metrics, answers.argmax(-1), tokens.labels)


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


def make_objective(config: TrainConfig, prepared: Prepared) -> Objective:
    """What the rows are to teach: their classes, or scores where they have none."""
    kind = Classification if prepared.labels else Regression
    width = config.max_length if config.padding == "max_length" else 0
    return kind(prepared.labels, prepared.metrics, prepared.pad_id, width)
