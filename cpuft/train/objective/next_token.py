"""Next-token prediction, as decoders are trained: on all tokens of texts, or on the assistant's in conversations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, describe_error
from cpuft.train.data.archive import EMPTY, UNTAGGED, Tokens
from cpuft.train.data.order import Indices
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.lora import has_adapters
from cpuft.train.model import get_model_name, load_model
from cpuft.train.objective.base import Batch, Objective, Predictions, pad
from cpuft.train.objective.chunked_loss import HeadForm, compute_token_losses, predict_tokens
from cpuft.train.objective.masked_lm import compute_perplexity

_PROBE_TOKENS = 3
"""Tokens of the input on which the head is compared with the model's own."""


@dataclass(frozen=True)
class TokenLosses:
    """What a decoder's forward pass returns for an input with `places`."""

    losses: torch.Tensor
    """Cross entropy of each target, fp32, shape (targets,)."""
    is_right: torch.Tensor | None
    """Whether each target is the most likely token, bool; None where gradients are computed."""


class NextTokenPrediction(Objective):
    """Predict each token from those before it, by cross entropy: what all objectives of decoders have in common.

    The loss of an update is the mean over the targets of all its examples. The model runs to the last hidden state, and
    the head is computed only for positions that have a target, in chunks (`chunked_loss`).
    """

    model_class, label_type = "AutoModelForCausalLM", torch.int64

    def load_model(self, config: TrainConfig) -> Any:
        """Load the decoder with its head on the CPU, in fp32 but for --base-precision, with adapters if --lora-rank
        asks, and with the forward pass of `compute_losses_in_model`. Raises CpuftError: it cannot be read, or its
        logits are not those of a linear head.
        """
        # Labels tell what is padding, so a trained model keeps its own padding token, also if it has none.
        pad_id = self.pad_id if config.from_config else -1
        model = load_model(config, self.model_class, {}, self.vocab_size, pad_id, attention="auto")
        compute_losses_in_model(model.get_base_model() if has_adapters(model) else model, get_model_name(config))
        return model

    def make_batch(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> Batch:
        """Return the batch of these examples; labels have each token to predict at its own place, elsewhere UNTAGGED.

        The input `targets` has these tokens, and `places` the indices from which they are predicted, among all
        positions of the batch, row by row. A batch without padding has no attention_mask.
        """
        batch = super().make_batch(replace(tokens, types=EMPTY), examples)
        ids, labels = batch.inputs["input_ids"], batch.labels
        labels[labels != UNTAGGED] = ids[labels != UNTAGGED]
        example, place = (labels[:, 1:] != UNTAGGED).nonzero(as_tuple=True)
        batch.inputs["places"] = example * labels.shape[1] + place
        batch.inputs["targets"] = labels[example, place + 1]
        if bool(batch.inputs["attention_mask"].all()):  # without a mask, attention is faster
            del batch.inputs["attention_mask"]
        return batch

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Run a forward pass; return the sum of the cross entropies of each example's targets, fp32, (examples,)."""
        losses: torch.Tensor = model(**batch.inputs).losses
        example = batch.inputs["places"] // batch.labels.shape[1]
        return losses.new_zeros(len(batch.labels)).index_add(0, example, losses)

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Return each example's sum of losses, number of right predictions and of targets; fp32, (examples, 3)."""
        found = model(**batch.inputs)
        columns = torch.stack([found.losses, found.is_right.float(), torch.ones_like(found.losses)], 1)
        example = batch.inputs["places"] // batch.labels.shape[1]
        sums: Predictions = columns.new_zeros(len(batch.labels), 3).index_add(0, example, columns).numpy()
        return sums

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return `perplexity` (e to the mean loss over targets) and `token_accuracy` (share of right predictions)."""
        return dict(zip(("perplexity", "token_accuracy"), compute_perplexity(predictions)))


class CausalLanguageModelling(NextTokenPrediction):
    """Predict all tokens of blocks of text but the first one of each."""

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return the number of tokens that are predicted in these examples: all but the first of each."""
        return float((tokens.lengths[examples] - 1).sum())

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return 0 where a token is predicted, elsewhere UNTAGGED; int64, with the shape of `mask`."""
        labels = np.where(mask, 0, UNTAGGED)
        labels[:, 0] = UNTAGGED
        return torch.from_numpy(labels)


@dataclass(frozen=True)
class Chat(NextTokenPrediction):
    """Predict the assistant's tokens in conversations, of which an example may have several (--pack)."""

    template: str = ""
    """The chat template of --chat-template, which is saved with the tokenizer; empty for the tokenizer's own."""

    def make_batch(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> Batch:
        """Return the batch of these examples; packed ones have no attention_mask, and position_ids from 0 on in each
        conversation.
        """
        batch = super().make_batch(tokens, examples, epoch)
        if len(tokens.types):
            lengths, places = tokens.lengths[examples][:, None], np.arange(batch.labels.shape[1])
            mask = places < lengths
            begins = pad(tokens.types[tokens.positions(examples)], mask).numpy() == 1
            begins |= places == lengths  # padding counts as one conversation
            starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            # Without a mask, transformers sees conversations in position_ids: no token attends to another one.
            batch.inputs.pop("attention_mask", None)
            batch.inputs["position_ids"] = torch.from_numpy(places - starts)
        return batch

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return the number of the assistant's tokens in these examples."""
        return float((tokens.labels[tokens.positions(examples)] == 1).sum())

    def make_labels(self, tokens: Tokens, examples: Indices, mask: NDArray[np.bool_]) -> torch.Tensor:
        """Return 0 where the assistant speaks, elsewhere UNTAGGED; int64, with the shape of `mask`."""
        return pad(np.where(tokens.labels[tokens.positions(examples)] == 1, 0, UNTAGGED), mask, UNTAGGED)

    def finish_folder(self, folder: Path, model: Any) -> None:
        """Save the template of --chat-template, if given, with the tokenizer in the folder of the saved model."""
        if self.template:
            tokenizer = load_tokenizer(str(folder))
            tokenizer.chat_template = self.template
            tokenizer.save_pretrained(folder)


def compute_losses_in_model(model: Any, name: str) -> None:
    """Let the forward pass of a decoder with a head return a TokenLosses if its inputs have `places`, in place.

    Then the head is computed only for the last hidden states at these places, with the cross entropies of the input
    `targets`. All of it is in the model's forward pass, where engines that wrap the model see its parameters. Raises
    CpuftError, which calls the model `name`: its logits are not those of a linear head.
    """
    form = _read_head_form(model)
    _check_head(model, form, name)

    def forward(self: Any, *args: Any, places: Any = None, targets: Any = None, **inputs: Any) -> Any:
        if places is None:
            return type(self).forward(self, *args, **inputs)
        given = {name: value for name, value in inputs.items() if value is not None}
        # With a cache, transformers would not look for packed conversations in position_ids.
        hidden = self.base_model(*args, **given, use_cache=False).last_hidden_state
        selected, head = hidden.flatten(0, 1).index_select(0, places), self.get_output_embeddings()
        if torch.is_grad_enabled():
            return TokenLosses(compute_token_losses(selected, head.weight, head.bias, targets, form), None)
        return TokenLosses(*predict_tokens(selected, head.weight, head.bias, targets, form))

    model.forward = MethodType(forward, model)  # of the instance, so that a copy of the model has its own


def _read_head_form(model: Any) -> HeadForm:
    """Return what a decoder does with the product of its head, by the settings of the families that do anything."""
    settings = model.config.get_text_config()
    factor = getattr(settings, "logit_scale", None) or 1.0  # Cohere
    factor /= getattr(settings, "logits_scaling", None) or 1.0  # Granite
    return HeadForm(float(factor), float(getattr(settings, "final_logit_softcapping", None) or 0.0))


@torch.no_grad()
def _check_head(model: Any, form: HeadForm, name: str) -> None:
    """Raise CpuftError if a decoder's logits are not those of its head and this form; tried on three tokens."""
    head, was_training = model.get_output_embeddings(), model.training
    problem = f"{type(model).__name__} of {name} makes predictions in a way that cpuft cannot train"
    next_step = "give the model of another family, such as Llama, Qwen3, SmolLM or Gemma 3"
    if not isinstance(head, torch.nn.Linear):
        raise CpuftError(f"{problem} (its head is no linear layer): {next_step}")
    ids = torch.arange(_PROBE_TOKENS)[None] % model.config.get_text_config().vocab_size
    model.eval()
    try:
        wanted = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    except Exception as error:  # models raise whatever their layers raise
        raise CpuftError(f"{problem} ({describe_error(error)}): {next_step}") from None
    finally:
        model.train(was_training)
    targets = wanted.argmax(-1)
    losses, _ = predict_tokens(hidden, head.weight, head.bias, targets, form)
    expected = torch.nn.functional.cross_entropy(wanted, targets, reduction="none")
    if not torch.allclose(losses, expected, rtol=1e-3, atol=1e-3):
        raise CpuftError(f"{problem} (its head is not all that makes logits): {next_step}")
