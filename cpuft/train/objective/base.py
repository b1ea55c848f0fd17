"""The contract of an objective: head, labels, loss, metrics, and how examples become a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config import TrainConfig
from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import Order
from cpuft.train.model import load_model

Answers = NDArray[np.float32]
"""What is known of each row after a forward pass, shape (rows, any, ...)."""


@dataclass(frozen=True)
class Batch:
    """Padded rows of one forward pass of one rank."""

    inputs: dict[str, torch.Tensor]
    """input_ids, attention_mask and, where the model takes them, token_type_ids; shape (rows, longest row)."""
    labels: torch.Tensor
    """What answers are compared with; shape (rows, ...)."""
    tokens: int
    """Without padding."""


@dataclass(frozen=True)
class Objective:
    """What a run learns from rows; its kinds say with what head, loss and metrics."""

    labels: tuple[str, ...]
    """Of classes, in the order of their numbers."""
    metrics: tuple[str, ...]
    pad_id: int
    width: int
    """Tokens that rows are padded to; 0 for those of the longest row of a batch."""
    words: int = 0
    """Of the tokenizer: so many does an untrained model embed."""
    model_class: ClassVar[str]
    """The class of transformers that loads any encoder with such a head."""
    label_type: ClassVar[torch.dtype]

    def head(self) -> dict[str, Any]:
        """The head's settings, by their names in a model's configuration."""
        raise NotImplementedError

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Loss of each row, fp32, shape (rows,): the sum of its terms'."""
        raise NotImplementedError

    def count_terms(self, tokens: Tokens, rows: Order, epoch: int = -1) -> float:
        """Of how many terms these rows' losses are the sum: the update's loss is the mean over those of all its rows.

        The same on any rank, and before the batches are made.
        """
        return float(len(rows))

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Metrics by name, of the answers to all rows of a split in their order."""
        raise NotImplementedError

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Answers:
        """The head's outputs, without gradients."""
        outputs: Answers = model(**batch.inputs).logits.float().numpy()
        return outputs

    def decide(self, outputs: Answers) -> Answers:
        """What the metrics need of the head's outputs."""
        return outputs

    def answers(self, model: torch.nn.Module, batch: Batch) -> Answers:
        """What the metrics need to know of each row."""
        return self.decide(self.outputs(model, batch))

    def load_model(self, config: TrainConfig) -> Any:
        """The encoder with a fresh head, fp32, on the CPU. Raises CpuftError when it cannot be had."""
        return load_model(config, self.model_class, self.head(), self.words, self.pad_id)

    def make_batch(self, tokens: Tokens, rows: Order, epoch: int = -1) -> Batch:
        """The rows of these numbers, as they are seen in an epoch of training; in -1 as in every evaluation."""
        lengths, places = tokens.lengths[rows], tokens.places(rows)
        mask = np.arange(self.width or int(lengths.max())) < lengths[:, None]
        ids = np.full(mask.shape, self.pad_id, np.int64)
        ids[mask] = tokens.ids[places]
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
        if len(tokens.types):
            types = np.zeros(mask.shape, np.int64)
            types[mask] = tokens.types[places]
            inputs["token_type_ids"] = torch.from_numpy(types)
        return Batch(inputs, self.make_labels(tokens, rows, mask), int(lengths.sum()))

    def make_labels(self, tokens: Tokens, rows: Order, mask: NDArray[np.bool_]) -> torch.Tensor:
        """What answers for the rows of these numbers are compared with.

        `mask` is true where their tokens stand in a batch, shape (rows, longest row).
        """
        return torch.from_numpy(tokens.labels[rows]).to(self.label_type)

    def name_tokens(self, tokens: Tokens, rows: Order) -> torch.Tensor:
        """All that batches of these rows look up, int64, with repetitions: their words, and the one that pads."""
        return torch.from_numpy(np.append(tokens.ids[tokens.places(rows)], self.pad_id).astype(np.int64))
