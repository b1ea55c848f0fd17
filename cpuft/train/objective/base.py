"""The contract of an objective: head, labels, loss, metrics, and how examples become a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config import TrainConfig
from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import Indices
from cpuft.train.model import load_model

Predictions = NDArray[np.float32]
"""What a forward pass without gradients returns for each example; shape (examples, any, ...)."""


@dataclass(frozen=True)
class Batch:
    """The examples of one forward pass of one rank, padded to one length."""

    inputs: dict[str, torch.Tensor]
    """input_ids, attention_mask and, if the model takes them, token_type_ids; shape (examples, length)."""
    labels: torch.Tensor
    """What the model's outputs are compared with; shape (examples, ...)."""
    tokens: int
    """Number of tokens without padding."""


@dataclass(frozen=True)
class Objective:
    """What a run learns from its examples. The training loop knows this class only; the table OBJECTIVES has the rest.

    A subclass sets `model_class` and `label_type`, and implements `head_settings`, `losses` and `compute_metrics`. It
    overrides the other methods where a head has another form. All methods are pure: they may be called in any order, on
    any rank, and return the same for the same arguments. So an update is the same on any number of ranks.
    """

    labels: tuple[str, ...]
    """Names of the classes, in the order of their numbers."""
    metrics: tuple[str, ...]
    """Names of the metrics that `compute_metrics` returns."""
    pad_id: int
    padded_length: int
    """Length to which examples are padded; 0: the longest example of each batch."""
    vocab_size: int = 0
    """Vocabulary size of the tokenizer. An untrained model gets an embedding of this size."""
    model_class: ClassVar[str]
    """The auto class of transformers that loads an encoder with such a head."""
    label_type: ClassVar[torch.dtype]

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of the head, by their names in a model's configuration."""
        raise NotImplementedError

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return the loss of each example, fp32, shape (examples,).

        If an example has several terms (`count_terms`), its loss is their sum.
        """
        raise NotImplementedError

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return metrics by name, from the predictions for all examples of a split in their order."""
        raise NotImplementedError

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return of how many terms the losses of these examples are the sum, on any rank and before batches are made.

        The loss of an update is the mean over the terms of all its examples.
        """
        return float(len(examples))

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Return the outputs of the head. Called without gradients."""
        outputs: Predictions = model(**batch.inputs).logits.float().numpy()
        return outputs

    def reduce_outputs(self, outputs: Predictions) -> Predictions:
        """Return what `compute_metrics` needs of the head's outputs, to be gathered from all ranks."""
        return outputs

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Return what `compute_metrics` needs for each example of a batch. Called without gradients."""
        return self.reduce_outputs(self.outputs(model, batch))

    def load_model(self, config: TrainConfig) -> Any:
        """Load the encoder with a new head, fp32. Raises CpuftError if the model cannot be found or read."""
        return load_model(config, self.model_class, self.head_settings(), self.vocab_size, self.pad_id)

    def make_batch(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> Batch:
        """Return the batch of the examples with these numbers.

        Parameters
        ----------
        epoch: of the training, for objectives that change examples from epoch to epoch; -1 for evaluation.
        """
        lengths, places = tokens.lengths[examples], tokens.positions(examples)
        mask = np.arange(self.padded_length or int(lengths.max())) < lengths[:, None]
        ids = np.full(mask.shape, self.pad_id, np.int64)
        ids[mask] = tokens.ids[places]
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
        if len(tokens.types):
            types = np.zeros(mask.shape, np.int64)
            types[mask] = tokens.types[places]
            inputs["token_type_ids"] = torch.from_numpy(types)
        return Batch(inputs, self.make_labels(tokens, examples, mask), int(lengths.sum()))

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return the labels of the examples with these numbers.

        `mask` is true where a batch has their tokens and false where it has padding; shape (examples, length).
        """
        return torch.from_numpy(tokens.labels[examples]).to(self.label_type)

    def list_token_ids(self, tokens: Tokens, examples: Indices) -> torch.Tensor:
        """Return all token ids that batches of these examples look up in the embedding, int64, with repetitions."""
        return torch.from_numpy(np.append(tokens.ids[tokens.positions(examples)], self.pad_id).astype(np.int64))
