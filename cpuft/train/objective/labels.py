"""Objectives that predict labels: of an example (a class, several classes or a score), or of each of its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.judge.metrics import compute_label_metrics, compute_tag_metrics
from cpuft.judge.predictions import MOST_PROBABILITIES
from cpuft.train.data.archive import UNTAGGED, Tokens
from cpuft.train.data.order import Indices
from cpuft.train.objective.base import Batch, Objective, Predictions, pad


def _name_classes(labels: Sequence[str]) -> dict[str, Any]:
    names = dict(enumerate(labels))
    return {"num_labels": len(names), "id2label": names, "label2id": {name: number for number, name in names.items()}}


@dataclass(frozen=True)
class ClassObjective(Objective):
    """What objectives with one class for each term have in common: cross entropy, smoothed and weighted if asked."""

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    """Weight of each class in the loss, in the order of their numbers; empty if all count the same."""

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return each label's cross entropy, smoothed and times its class's weight if asked, fp32, in the shape of
        `labels` (int64), 0 for UNTAGGED. Classes are axis 1 of the logits.
        """
        weights = torch.tensor(self.class_weights) if self.class_weights else None
        return torch.nn.functional.cross_entropy(
            logits.float(),
            labels,
            weights,
            ignore_index=UNTAGGED,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def weigh(self, labels: NDArray[Any]) -> float:
        """Return the sum of these class numbers' weights, or without weights their number, to divide a mean loss by."""
        if not self.class_weights:
            return float(len(labels))
        return float(np.asarray(self.class_weights)[labels.astype(np.int64)].sum())


class Classification(ClassObjective):
    """One class for each example, by cross entropy."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.int64

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return the number of these examples; with class weights, the sum of their weights."""
        return self.weigh(tokens.labels[examples])

    def head_settings(self) -> dict[str, Any]:
        """Return "num_labels", "id2label" and "label2id" of the classes, and "problem_type" for a single class."""
        return {"problem_type": "single_label_classification", **_name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross entropy of each example, weighted and smoothed if asked, fp32, shape (examples,)."""
        return self.cross_entropy(model(**batch.inputs).logits, batch.labels)

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name, from logits of shape (examples, classes)."""
        return compute_label_metrics(self.metrics, predictions.argmax(-1), tokens.labels)

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return "label" and "prediction", names of classes, their probabilities "label_probability" and "confidence",
        and with at most MOST_PROBABILITIES classes "probabilities", (examples, classes).
        """
        from scipy.special import softmax

        names, labels, likeliest = np.asarray(self.labels, object), tokens.labels.astype(int), predictions.argmax(-1)
        probabilities, rows = softmax(predictions, axis=-1), np.arange(len(labels))
        columns = {"label": names[labels], "prediction": names[likeliest]}
        columns |= {"confidence": probabilities[rows, likeliest], "label_probability": probabilities[rows, labels]}
        if len(names) <= MOST_PROBABILITIES:
            columns["probabilities"] = probabilities
        return columns


class MultiLabelClassification(Objective):
    """Any number of classes for each example, by the binary cross entropy of each class."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head_settings(self) -> dict[str, Any]:
        """Return "num_labels", "id2label" and "label2id" of the classes, and "problem_type" for several classes."""
        return {"problem_type": "multi_label_classification", **_name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return each example's mean binary cross entropy over the classes, fp32, shape (examples,)."""
        logits = model(**batch.inputs).logits.float()
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return entropy.mean(-1)

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name. A logit above 0 predicts a class; accuracy needs all classes right."""
        return compute_label_metrics(self.metrics, (predictions > 0).astype(np.float32), tokens.labels)

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return "label" and "prediction" (logit above 0), lists of names for each example, and with at most
        MOST_PROBABILITIES classes "probabilities", (examples, classes).
        """
        from scipy.special import expit

        columns: dict[str, Any] = {
            name: [[self.labels[number] for number in np.flatnonzero(row > 0)] for row in rows]
            for name, rows in (("label", tokens.labels), ("prediction", predictions))
        }
        return columns | ({"probabilities": expit(predictions)} if len(self.labels) <= MOST_PROBABILITIES else {})


class Regression(Objective):
    """A score for each example, by the squared error."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head_settings(self) -> dict[str, Any]:
        """Return {"num_labels": 1, "problem_type": "regression"}."""
        return {"num_labels": 1, "problem_type": "regression"}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return the squared error of each example, fp32, shape (examples,)."""
        scores: torch.Tensor = model(**batch.inputs).logits[:, 0].float()
        return (scores - batch.labels) ** 2

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name, from the scores; `predictions` have the shape (examples, 1)."""
        return compute_label_metrics(self.metrics, predictions[:, 0], tokens.labels)

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return "label" and "prediction" of each example as numbers."""
        return list_scores(predictions, tokens)


class TokenClassification(ClassObjective):
    """A class (tag) for each word of an example, by the cross entropy of the output at the word's first token.

    The loss of an update is the mean over all its words, as CrossEntropyLoss defines it for a batch. So long examples
    count for more than short ones.
    """

    model_class, label_type = "AutoModelForTokenClassification", torch.int64

    def head_settings(self) -> dict[str, Any]:
        """Return "num_labels", "id2label" and "label2id" of the classes, and "architectures" for their head."""
        # Saved adapters do not name the class of their model, so the configuration has to.
        return {"architectures": [self.model_class], **_name_classes(self.labels)}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross entropies of each example's words, fp32, shape (examples,)."""
        return self.cross_entropy(model(**batch.inputs).logits.transpose(1, 2), batch.labels).sum(-1)

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return the number of these examples' words that have a tag; with class weights, the sum of their weights."""
        labels = tokens.labels[tokens.positions(examples)]
        return self.weigh(labels[labels != UNTAGGED])

    def reduce_outputs(self, outputs: Predictions) -> Predictions:
        """Return the number of the most likely class of each token, fp32, shape (examples, length)."""
        likeliest: Predictions = outputs.argmax(-1).astype(np.float32)
        return likeliest

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return class numbers at the first tokens of words, elsewhere UNTAGGED; int64, with the shape of `mask`."""
        return pad(tokens.labels[tokens.positions(examples)], mask, UNTAGGED)

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name, from class numbers of tokens, shape (examples, longest example)."""
        return compute_tag_metrics(self.metrics, *self._list_tags(predictions, tokens))

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return "label" and "prediction": lists of the tags of each example's words."""
        predicted, tags = self._list_tags(predictions, tokens)
        return {"label": tags, "prediction": predicted}

    def _list_tags(self, predictions: Predictions, tokens: Tokens) -> tuple[list[list[str]], list[list[str]]]:
        predicted, tags = [], []
        for example, (start, end) in enumerate(zip(tokens.offsets, tokens.offsets[1:])):
            wanted = tokens.labels[start:end]
            tagged = np.flatnonzero(wanted != UNTAGGED)
            predicted.append([self.labels[int(number)] for number in predictions[example, tagged]])
            tags.append([self.labels[number] for number in wanted[tagged]])
        return predicted, tags


def list_scores(predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
    """Return "label" and "prediction", fp64, (examples,), from predictions of shape (examples, 1)."""
    return {"label": tokens.labels.astype(np.float64), "prediction": predictions[:, 0].astype(np.float64)}
