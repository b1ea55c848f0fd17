"""The objective of rerankers: how relevant a document is to a query, from both texts together (a cross-encoder)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.judge.metrics import LEAST_RELEVANT, measure_rankings
from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import Indices
from cpuft.train.embedding_form import read_settings
from cpuft.train.model import find_model, load_config
from cpuft.train.objective.base import Batch, Objective, Predictions, run_without_cache

ACTIVATIONS = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "identity": "torch.nn.modules.linear.Identity"}
"""Functions that make a score of the output of a reranker, by the names that sentence-transformers stores."""


def read_activation(config: TrainConfig) -> str:
    """Return the name in ACTIVATIONS of the function that is stored with the model, "sigmoid" if none is. Raises
    CpuftError: another function is stored, or the model's configuration cannot be read.
    """
    if config.from_config:
        return "sigmoid"
    settings = load_config(config, {})
    own = getattr(settings, "sentence_transformers", None)
    stored = (
        (read_settings(find_model(config.model)) or {}).get("activation_fn")
        or (own.get("activation_fn") if isinstance(own, dict) else None)
        or getattr(settings, "sbert_ce_default_activation_function", None)
        or ACTIVATIONS["sigmoid"]
    )
    for name in ACTIVATIONS:
        if str(stored).rpartition(".")[2].lower() == name:
            return name
    raise CpuftError(
        f"the reranker {config.model} makes scores by {stored!s:.80} (activation_fn), which cpuft does not compute: "
        f"set activation_fn there to {' or '.join(ACTIVATIONS.values())}"
    )


@dataclass(frozen=True)
class Relevance(Objective):
    """A score for each query and document, by the binary cross entropy of one output, as BinaryCrossEntropyLoss.

    Labels are from 0 to 1. Those of validation examples are pairs of a score and the number of the query.
    """

    activation: str = "sigmoid"
    """One of ACTIVATIONS, which makes a score of the output."""
    max_length: int = 0
    """Number of tokens at which the saved model cuts a query and a document; 0: what the tokenizer says."""

    model_class, label_type = "AutoModelForSequenceClassification", torch.float32

    def head_settings(self) -> dict[str, Any]:
        """Return {"num_labels": 1, "problem_type": None}."""
        return {"num_labels": 1, "problem_type": None}

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return the binary cross entropy of each example, fp32, shape (examples,)."""
        outputs = run_without_cache(model, batch).logits[:, 0].float()
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch.labels, reduction="none")

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return the scores of these examples, fp32, shape (examples,)."""
        return torch.from_numpy(tokens.labels.reshape(len(tokens), -1)[examples, 0]).to(self.label_type)

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Run a forward pass; return the scores, `activation` of the outputs, fp32, shape (examples, 1)."""
        outputs = run_without_cache(model, batch).logits.float()
        scores: Predictions = (outputs.sigmoid() if self.activation == "sigmoid" else outputs).numpy()
        return scores

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name, as `compute_reranking_metrics`, from scores of shape (examples, 1);
        documents with a label of 0.5 or more are relevant.
        """
        return compute_reranking_metrics(
            self.metrics, predictions[:, 0], tokens.labels[:, 0] >= LEAST_RELEVANT, tokens.labels[:, 1].astype(np.int64)
        )

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return of each example "query" (its number), "label" (relevance) and "prediction" (score)."""
        labels, queries = tokens.labels.astype(np.float64).T
        return {"query": queries.astype(np.int64), "label": labels, "prediction": predictions[:, 0].astype(np.float64)}

    def finish_folder(self, folder: Path, model: Any) -> None:
        """Write how scores are made to config.json of the folder, `max_length` (0: not) to tokenizer_config.json."""
        changes: dict[str, dict[str, Any]] = {
            "config.json": {"sentence_transformers": {"activation_fn": ACTIVATIONS[self.activation]}}
        }
        if self.max_length:
            changes["tokenizer_config.json"] = {"model_max_length": self.max_length}
        for name, values in changes.items():
            path = folder / name
            settings = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**settings, **values}, indent=2) + "\n", encoding="utf-8")


def compute_reranking_metrics(
    names: tuple[str, ...], scores: NDArray[np.float32], relevant: NDArray[np.bool_], queries: NDArray[np.int64]
) -> dict[str, float]:
    """Return the means of metrics (ndcg@K, mrr@K, map) over all queries, by name, from arrays of shape (examples,);
    `queries` are numbers, and a query without relevant documents counts as 0. ValueError: another name.
    """
    return {name: float(np.mean(measure_rankings(name, scores, relevant, queries))) for name in names}
