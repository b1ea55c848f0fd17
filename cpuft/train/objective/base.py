"""The contract of an objective: head, labels, loss, metrics, and how examples become a batch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import Indices, select_for_rank
from cpuft.train.lora import has_adapters
from cpuft.train.model import load_model
from cpuft.train.passes import Clock, Passes
from cpuft.train.precision import autocast

if TYPE_CHECKING:
    from cpuft.train.setup import TrainingSetup

Predictions = NDArray[np.float32]
"""What `Objective.predict` returns for each example, fp32; shape (examples, any, ...)."""


@dataclass(frozen=True)
class Batch:
    """The examples of one forward pass of one rank, padded to one length."""

    inputs: dict[str, torch.Tensor]
    """Keyword arguments of the model's forward pass: input_ids, attention_mask (1 for tokens, 0 for padding) and, if
    the model takes them, token_type_ids; int64, shape (examples, length). Objectives that predict tokens add
    `places`, and `targets` if the model computes the losses, and may leave out attention_mask."""
    labels: torch.Tensor
    """What the model's outputs are compared with, of the objective's `label_type`; shape (examples, ...)."""
    tokens: int
    """Number of tokens without padding."""


def pad(values: NDArray[Any], mask: NDArray[np.bool_], filler: int = 0) -> torch.Tensor:
    """Return int64 numbers in the mask's shape: `values`, row by row, at as many true places, elsewhere `filler`."""
    padded = np.full(mask.shape, filler, np.int64)
    padded[mask] = values
    return torch.from_numpy(padded)


def run_without_cache(model: torch.nn.Module, batch: Batch) -> Any:
    """Return the model's output for a batch without decoders' cache, which takes memory and stops fast evaluation."""
    whole: Any = model
    inner = whole.get_base_model() if has_adapters(model) else whole
    # Decoders' configurations ask for the cache, also in classifiers, where nobody reads it.
    asks = getattr(getattr(inner, "config", None), "use_cache", False)
    takes = asks and "use_cache" in inspect.signature(type(inner).forward).parameters
    return model(**batch.inputs, use_cache=False) if takes else model(**batch.inputs)


@dataclass(frozen=True)
class Objective:
    """What a run learns from its examples. The training loop knows this class only; the table OBJECTIVES has the rest.

    A subclass sets `model_class` and `label_type`, implements `losses` and `compute_metrics`, and overrides the other
    methods where a head has another form. All methods but the passes are pure: they may be called in any order, on any
    rank, and return the same for the same arguments. So an update is the same on any number of ranks.
    """

    labels: tuple[str, ...]
    """Names of the classes, in the order of their numbers; empty without classes."""
    metrics: tuple[str, ...]
    """Names of the metrics that `compute_metrics` returns."""
    pad_id: int
    vocab_size: int = 0
    """Vocabulary size of the tokenizer. An untrained model gets an embedding of this size."""
    model_class: ClassVar[str]
    """The auto class of transformers that loads an encoder with such a head."""
    label_type: ClassVar[torch.dtype]

    @property
    def counts_by_drawing(self) -> bool:
        """Whether `count_terms` draws random numbers, so slow that ranks count only their own examples; here False."""
        return False

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of the head, by their names in a model's configuration; here {}."""
        return {}

    def plan_passes(self, setup: TrainingSetup, examples: Indices, epoch: int) -> Passes:
        """Return the passes of this rank's share of an update's examples (at least one), in their order, each over a
        batch of at most `--batch-size`, and their number of tokens without padding.

        A rank without an example takes part with the first one, to which the loop gives weight 0. Masked language
        modelling draws its masks from `epoch`.
        """
        share, size = select_for_rank(examples, setup.world.rank, setup.world.size), setup.config.batch_size
        parts = [share[start : start + size] for start in range(0, len(share), size)]
        batches = [self.make_batch(setup.prepared.train, part, epoch) for part in parts]
        return Passes([partial(self._run_pass, setup, batch) for batch in batches], sum(one.tokens for one in batches))

    def _run_pass(self, setup: TrainingSetup, batch: Batch, factor: float, is_last: bool, clock: Clock) -> float:
        setup.exchange.begin_pass(is_last)
        with autocast(setup.precision):
            losses = self.losses(setup.exchange.forward_model, batch)
        clock.lap("forward")
        torch.autograd.backward(losses.sum() * factor)
        clock.lap("backward")
        return float(losses.detach().sum())

    def deal_to_ranks(self, setup: TrainingSetup, examples: Indices) -> list[Indices]:
        """Return for each rank those of an update's examples whose tokens it looks up; the first one if it has none."""
        return [select_for_rank(examples, rank, setup.world.size) for rank in range(setup.world.size)]

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return the loss of each example, fp32, shape (examples,).

        If an example has several terms (`count_terms`), its loss is their sum. Abstract: raises NotImplementedError.
        """
        raise NotImplementedError

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return each of `metrics` by name, from the predictions for all examples of a split in their order.

        `predictions` are what `predict` has returned, filled up with -1 where shapes differ; `tokens` has the labels.
        Abstract: raises NotImplementedError.
        """
        raise NotImplementedError

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        """Return the columns of the kind in `RunPredictions.table`, from what `compute_metrics` gets; here {}.

        A column is a list or an array of shape (examples,), or (examples, classes) for probabilities. All have the same
        length, which is that of `row` if it is there, else the number of examples.
        """
        return {}

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return of how many terms the losses of these examples are the sum, on any rank and before batches are made.

        Here each loss is one term. The loss of an update is the mean over the terms of all its examples. `epoch` is for
        objectives that change examples from epoch to epoch; -1 is evaluation.
        """
        return float(len(examples))

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Run a forward pass; return the outputs (logits) of the head, a NumPy array in fp32. Called without gradients.

        The shape is (examples, outputs), or (examples, length, classes) for a head that predicts tags of tokens.
        """
        outputs: Predictions = run_without_cache(model, batch).logits.float().numpy()
        return outputs

    def reduce_outputs(self, outputs: Predictions) -> Predictions:
        """Return what `compute_metrics` needs of the head's `outputs`, before ranks gather it; here all of them."""
        return outputs

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Return what `compute_metrics` needs for each example, from a forward pass. Called without gradients."""
        return self.reduce_outputs(self.outputs(model, batch))

    def load_model(self, config: TrainConfig) -> Any:
        """Load the encoder with a new head for this objective, in fp32 on the CPU; with --lora-rank, with adapters.

        Raises CpuftError: the model cannot be found or read, or its architecture has no such head.
        """
        return load_model(config, self.model_class, self.head_settings(), self.vocab_size, self.pad_id)

    def finish_folder(self, folder: Path, model: Any) -> None:
        """Write more files into the folder of the saved model, if programs need them to load it; here none."""

    def make_batch(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> Batch:
        """Return the batch of these examples (at least one), padded to its longest one.

        `epoch` is for objectives that change examples from epoch to epoch; -1 is evaluation.
        """
        lengths, places = tokens.lengths[examples], tokens.positions(examples)
        mask = np.arange(lengths.max()) < lengths[:, None]
        inputs = {
            "input_ids": pad(tokens.ids[places], mask, self.pad_id),
            "attention_mask": torch.from_numpy(mask).long(),
        }
        if len(tokens.types):
            inputs["token_type_ids"] = pad(tokens.types[places], mask)
        return Batch(inputs, self.make_labels(tokens, examples, mask), int(lengths.sum()))

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return the labels of these examples as `label_type`; here one entry of `tokens.labels` for each example.

        `mask` is true where a batch has their tokens and false where it has padding; shape (examples, length).
        """
        return torch.from_numpy(tokens.labels[examples]).to(self.label_type)

    def list_token_ids(self, tokens: Tokens, examples: Indices) -> torch.Tensor:
        """Return all token ids that these examples may look up, with repetitions, and the padding's; int64, (ids,)."""
        return torch.from_numpy(np.append(tokens.ids[tokens.positions(examples)], self.pad_id).astype(np.int64))
