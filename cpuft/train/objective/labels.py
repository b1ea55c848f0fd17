"""Objectives that predict labels: of an example (a class, several classes or a score), or of each of its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.train.data.archive import UNTAGGED, Tokens
from cpuft.train.data.order import Indices
from cpuft.train.objective.base import Batch, Objective, Predictions


def name_classes(labels: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a model's configuration that number and name the classes."""
    names = dict(enumerate(labels))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: number for number, name in names.items()}}


class Classification(Objective):
    """One class for each example, by cross entropy."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.int64

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of a head with one output for each class."""
        return {"problem_type": "single_label_classification", **name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross entropy of each example."""
        logits = model(**batch.inputs).logits
        return torch.nn.functional.cross_entropy(logits.float(), batch.labels, reduction="none")

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return metrics of the most likely classes."""
        return compute_label_metrics(self.metrics, predictions.argmax(-1), tokens.labels)


class MultiLabelClassification(Objective):
    """Any number of classes for each example, by the binary cross entropy of each class."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of a head with one independent output for each class."""
        return {"problem_type": "multi_label_classification", **name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the binary cross entropy of each example: the mean over the classes."""
        logits = model(**batch.inputs).logits.float()
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return entropy.mean(-1)

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return metrics of the classes above a probability of 0.5; accuracy counts examples with all classes right."""
        return compute_label_metrics(self.metrics, (predictions > 0).astype(np.float32), tokens.labels)


class Regression(Objective):
    """A score for each example, by the squared error."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of a head with one output."""
        return {"num_labels": 1, "problem_type": "regression"}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the squared error of each example."""
        scores: torch.Tensor = model(**batch.inputs).logits[:, 0].float()
        return (scores - batch.labels) ** 2

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return metrics of the scores."""
        return compute_label_metrics(self.metrics, predictions[:, 0], tokens.labels)


class TokenClassification(Objective):
    """A class (tag) for each word of an example, by the cross entropy of the output at the word's first token.

    The loss of an update is the mean over all its words, as CrossEntropyLoss defines it for a batch. So long examples
    count for more than short ones.
    """

    model_class, label_type = "AutoModelForTokenClassification", torch.int64

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of a head with an output of each token for each class.

        Saved adapters do not name the class of their model, so the configuration has to.
        """
        return {"architectures": [self.model_class], **name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of each example: the sum over its words."""
        logits = model(**batch.inputs).logits.float().transpose(1, 2)
        entropy = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none", ignore_index=UNTAGGED)
        return entropy.sum(-1)

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return the number of words that have a tag."""
        return float(np.count_nonzero(tokens.labels[tokens.positions(examples)] != UNTAGGED))

    def reduce_outputs(self, outputs: Predictions) -> Predictions:
        """Return the number of the most likely class of each token."""
        likeliest: Predictions = outputs.argmax(-1).astype(np.float32)
        return likeliest

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return class numbers at the first tokens of words, elsewhere UNTAGGED; shape (examples, longest example)."""
        labels = np.full(mask.shape, UNTAGGED, np.int64)
        labels[mask] = tokens.labels[tokens.positions(examples)]
        return torch.from_numpy(labels)

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return metrics of entities, and the accuracy of words."""
        predicted, tags = [], []
        for example, (start, end) in enumerate(zip(tokens.offsets, tokens.offsets[1:])):
            wanted = tokens.labels[start:end]
            tagged = np.flatnonzero(wanted != UNTAGGED)
            predicted.append([self.labels[int(number)] for number in predictions[example, tagged]])
            tags.append([self.labels[number] for number in wanted[tagged]])
        return compute_tag_metrics(self.metrics, predicted, tags)


def compute_label_metrics(
    names: tuple[str, ...], predictions: NDArray[Any], labels: NDArray[np.float32]
) -> dict[str, float]:
    """Return GLUE's metrics and related ones by name, computed by scikit-learn and SciPy.

    Parameters
    ----------
    predictions, labels: class numbers or scores, both of shape (examples,); or 0 and 1, both of shape
        (examples, classes). The correlation with a constant is 0, as scikit-learn defines it for Matthews'.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    constant = bool(np.ptp(predictions) == 0 or np.ptp(labels) == 0)

    def correlate(function: Any) -> float:
        return 0.0 if constant else float(function(predictions, labels).statistic)

    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(labels, predictions),
        "f1": lambda: f1_score(labels, predictions, zero_division=0.0),
        "f1_micro": lambda: f1_score(labels, predictions, average="micro", zero_division=0.0),
        "f1_macro": lambda: f1_score(labels, predictions, average="macro", zero_division=0.0),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predictions),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}


def compute_tag_metrics(
    names: tuple[str, ...], predicted: Sequence[list[str]], tags: Sequence[list[str]]
) -> dict[str, float]:
    """Return metrics by name from the tags of all examples, as conlleval defines them.

    f1, precision and recall are of whole entities; accuracy is of words.
    """
    from seqeval import metrics

    compute: dict[str, Callable[[], Any]] = {
        "f1": lambda: metrics.f1_score(tags, predicted, zero_division=0),
        "precision": lambda: metrics.precision_score(tags, predicted, zero_division=0),
        "recall": lambda: metrics.recall_score(tags, predicted, zero_division=0),
        "accuracy": lambda: metrics.accuracy_score(tags, predicted),
    }
    return {name: float(compute[name]()) for name in names}
