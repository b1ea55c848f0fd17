"""Any of the classes for each row, or none: several labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cpuft.train.data.prepare import Tokens
from cpuft.train.objective import Answers, Batch, Objective
from cpuft.train.objective.metrics import compute_metrics
from cpuft.train.objective.sequences import name_classes


class SeveralLabels(Objective):
    """Which classes? By binary cross entropy of each."""

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
