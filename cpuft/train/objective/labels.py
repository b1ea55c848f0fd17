"""Objectives that answer with labels: of an example (a class, several classes, a score), or of each of its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.train.data.archive import UNTAGGED, Tokens
from cpuft.train.data.order import Order
from cpuft.train.objective.base import Answers, Batch, Objective


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


def compute_metrics(names: tuple[str, ...], answers: NDArray[Any], labels: NDArray[np.float32]) -> dict[str, float]:
    """Metrics by name, of class numbers or scores, both of shape (rows,), or of 0 and 1, both of shape (rows, classes).

    A correlation with a constant is 0, as scikit-learn has it for Matthews'.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    constant = bool(np.ptp(answers) == 0 or np.ptp(labels) == 0)

    def correlate(function: Any) -> float:
        return 0.0 if constant else float(function(answers, labels).statistic)

    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(labels, answers),
        "f1": lambda: f1_score(labels, answers, zero_division=0.0),
        "f1_micro": lambda: f1_score(labels, answers, average="micro", zero_division=0.0),
        "f1_macro": lambda: f1_score(labels, answers, average="macro", zero_division=0.0),
        "matthews_correlation": lambda: matthews_corrcoef(labels, answers),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}


def compute_tag_metrics(
    names: tuple[str, ...], answers: Sequence[list[str]], tags: Sequence[list[str]]
) -> dict[str, float]:
    """Metrics by name, of rows' tags, as conlleval has them: of whole entities, but accuracy of words."""
    from seqeval import metrics

    compute: dict[str, Callable[[], Any]] = {
        "f1": lambda: metrics.f1_score(tags, answers, zero_division=0),
        "precision": lambda: metrics.precision_score(tags, answers, zero_division=0),
        "recall": lambda: metrics.recall_score(tags, answers, zero_division=0),
        "accuracy": lambda: metrics.accuracy_score(tags, answers),
    }
    return {name: float(compute[name]()) for name in names}
