"""A class for each word of a row: tags."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.train.data.order import Order
from cpuft.train.data.prepare import UNTAGGED, Tokens
from cpuft.train.objective import Answers, Batch, Objective
from cpuft.train.objective.metrics import compute_tag_metrics
from cpuft.train.objective.sequences import name_classes


class Tagging(Objective):
    """Which class is each word of? By cross entropy, of the outputs at words' first tokens.

    The update's loss is the mean over all its words, as CrossEntropyLoss has it of a batch: long rows count for more.
    """

    model_class, label_type = "AutoModelForTokenClassification", torch.int64

    def head(self) -> dict[str, Any]:
        """An output of each token for each class. Adapters are kept without their model's class: its kind is said."""
        return {"architectures": [self.model_class], **name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The sum over the row's words."""
        logits = model(**batch.inputs).logits.float().transpose(1, 2)
        entropy = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none", ignore_index=UNTAGGED)
        return entropy.sum(-1)

    def count_terms(self, tokens: Tokens, rows: Order, epoch: int = -1) -> float:
        """Words that have tags."""
        return float(np.count_nonzero(tokens.labels[tokens.places(rows)] != UNTAGGED))

    def decide(self, outputs: Answers) -> Answers:
        """The likeliest class of each token."""
        likeliest: Answers = outputs.argmax(-1).astype(np.float32)
        return likeliest

    def make_labels(self, tokens: Tokens, rows: Order, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Class numbers of words' first tokens, else UNTAGGED; shape (rows, longest row)."""
        labels = np.full(mask.shape, UNTAGGED, np.int64)
        labels[mask] = tokens.labels[tokens.places(rows)]
        return torch.from_numpy(labels)

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Metrics of entities, or of words."""
        answered, tags = [], []
        for row, (start, end) in enumerate(zip(tokens.offsets, tokens.offsets[1:])):
            wanted = tokens.labels[start:end]
            tagged = np.flatnonzero(wanted != UNTAGGED)
            answered.append([self.labels[int(number)] for number in answers[row, tagged]])
            tags.append([self.labels[number] for number in wanted[tagged]])
        return compute_tag_metrics(self.metrics, answered, tags)
