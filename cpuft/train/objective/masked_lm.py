"""Masked language modelling as BERT's (Devlin et al. 2019, section 3.1): predict tokens that were masked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.train.data.archive import UNTAGGED, Tokens
from cpuft.train.data.order import Indices
from cpuft.train.data.texts import NEVER_MASKED, WORD_START
from cpuft.train.lora import has_adapters
from cpuft.train.objective.base import Batch, Predictions
from cpuft.train.objective.labels import TokenClassification


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelling(TokenClassification):
    """Predict the tokens at masked places, by cross entropy.

    Masks are drawn from the seed, the epoch and the number of the example. So they are the same on any number of ranks,
    and after a run was resumed. The loss of an update is the mean over the masked places of all its examples; for one
    batch on one rank this is the loss of the Hugging Face Trainer.
    """

    model_class = "AutoModelForMaskedLM"
    kinds: NDArray[np.int8]
    """Kind of each token id, shape (vocabulary,), as `classify_tokens` returns it."""
    mask_id: int
    config: TrainConfig
    """The options; --seed, --mlm-probability and --whole-word-mask decide on the masks."""

    def head_settings(self) -> dict[str, Any]:
        """Return {}: the head is that of the model."""
        return {}

    def load_model(self, config: TrainConfig) -> Any:
        """Load the encoder as `Objective.load_model` does, in fp32 on the CPU; its head computes masked places only."""
        model = super().load_model(config)
        self.predict_masked_places_only(model.get_base_model() if has_adapters(model) else model)
        return model

    def predict_masked_places_only(self, model: Any) -> None:
        """Change a model in place so that its head, which has the largest product of all, computes only for the input
        `places` of a batch, if it is there; logits then have the shape (1, places, vocabulary).
        """
        selection = _PlaceSelection()
        model.register_forward_pre_hook(selection.take_places, with_kwargs=True)
        model.base_model.register_forward_hook(selection.select)

    def make_batch(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> Batch:
        """Return the batch of these examples with the masks of this epoch (-1: evaluation, which has always the same).

        Labels are the true tokens at masked places, elsewhere UNTAGGED. The input `places` has the indices of the
        masked places among all positions of the batch, row by row. A batch without padding has no attention_mask.
        """
        ids, labels = zip(*(self.mask_example(tokens, int(example), epoch) for example in examples))
        offsets = np.cumsum([0, *map(len, ids)])
        masked = Tokens(np.concatenate(ids), tokens.types, offsets, np.concatenate(labels))
        batch = super().make_batch(masked, np.arange(len(examples)))
        batch.inputs["places"] = (batch.labels.view(-1) != UNTAGGED).nonzero()[:, 0]
        if bool(batch.inputs["attention_mask"].all()):  # without a mask, attention has one addition less
            del batch.inputs["attention_mask"]
        return batch

    def count_terms(self, tokens: Tokens, examples: Indices, epoch: int = -1) -> float:
        """Return the number of masked places of these examples in this epoch (-1: in evaluation)."""
        if self.counts_by_drawing:
            return float(sum((self.mask_example(tokens, int(one), epoch)[1] != UNTAGGED).sum() for one in examples))
        example = np.repeat(np.arange(len(examples)), tokens.lengths[examples])
        may_be_masked = self.kinds[tokens.ids[tokens.positions(examples)]] != NEVER_MASKED
        places = np.bincount(example, may_be_masked, len(examples))
        return float(np.minimum(self._count_masks(places), places).sum())

    def _count_masks(self, places: Any) -> Any:
        """Return how many of the places that may be masked are drawn, if there are any."""
        return np.maximum(1, np.rint(self.config.mlm_probability * places)).astype(np.int64)

    @property
    def counts_by_drawing(self) -> bool:
        """Whether the number of masked places depends on the words that are drawn (--whole-word-mask)."""
        return self.config.whole_word_mask

    def mask_example(self, tokens: Tokens, example: int, epoch: int) -> tuple[Indices, Indices]:
        """Return an example's tokens with masks, and its labels, as `mask` does, in this epoch (-1: in evaluation)."""
        ids = tokens.ids[tokens.offsets[example] : tokens.offsets[example + 1]].astype(np.int64)
        seed = (self.config.seed, epoch, example) if epoch >= 0 else (example,)
        return self.mask(ids, np.random.default_rng(seed))

    def mask(self, ids: Indices, generator: np.random.Generator) -> tuple[Indices, Indices]:
        """Return an example's tokens with masks, and its labels: the true tokens at masked places, elsewhere UNTAGGED.

        The share --mlm-probability of the places that may be masked is drawn, at least one if there is any; with
        --whole-word-mask, random words of together no more tokens, at least one word. Of the drawn places, 80 % on
        average get `mask_id`, 10 % a random token, and 10 % keep their own.
        """
        kinds = self.kinds[ids]
        places = np.flatnonzero(kinds != NEVER_MASKED)
        count = self._count_masks(len(places))
        if self.config.whole_word_mask and len(places):
            words = np.cumsum(kinds[places] == WORD_START)  # the number of the word at each place
            order = generator.permutation(np.unique(words))
            fitting = (np.cumsum(np.bincount(words)[order]) <= count).sum()
            chosen = places[np.isin(words, order[: max(1, fitting)])]
        else:
            chosen = generator.permutation(places)[:count]
        masked, labels = ids.copy(), np.full_like(ids, UNTAGGED)
        labels[chosen] = ids[chosen]
        draw = generator.random(len(chosen))
        replacement = self.replacements[generator.integers(len(self.replacements), size=len(chosen))]
        masked[chosen] = np.where(draw < 0.8, self.mask_id, np.where(draw < 0.9, replacement, ids[chosen]))
        return masked, labels

    @cached_property
    def replacements(self) -> Indices:
        """Ids of the tokens that may replace another one: all that may be masked."""
        return np.flatnonzero(self.kinds != NEVER_MASKED)

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross entropies at each example's masked places, fp32, shape (examples,)."""
        logits, wanted, example = _predict_masked(model, batch)
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return losses.new_zeros(len(batch.labels)).index_add(0, example, losses)

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        """Return each example's sum of losses, right predictions, and masked places; fp32, shape (examples, 3)."""
        logits, wanted, example = _predict_masked(model, batch)
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        found = torch.stack([losses, (logits.argmax(-1) == wanted).float(), torch.ones_like(losses)], 1)
        sums: Predictions = losses.new_zeros(len(batch.labels), 3).index_add(0, example, found).numpy()
        return sums

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        """Return `perplexity` (e to the mean loss over masked places) and `masked_accuracy` (share of right ones)."""
        return dict(zip(("perplexity", "masked_accuracy"), compute_perplexity(predictions)))

    def list_token_ids(self, tokens: Tokens, examples: Indices) -> torch.Tensor:
        """Return all token ids of the vocabulary, int64: any of them may replace another one."""
        return torch.arange(len(self.kinds))


def compute_perplexity(predictions: Predictions) -> tuple[float, float]:
    """Return e to the mean loss over all tokens to predict, at most e**700, and the share of right predictions; 1.0 and
    0.0 without tokens. `predictions`, (examples, 3), has each example's sum of losses, right predictions, and tokens.
    """
    sums = predictions.sum(0, dtype=np.float64)
    loss, right = sums[:2] / max(1.0, sums[2])
    return math.exp(min(loss, 700.0)), float(right)


def _predict_masked(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a forward pass; return for each masked place the logits of all tokens, the true token, and its example."""
    example, place = (batch.labels != UNTAGGED).nonzero(as_tuple=True)
    return model(**batch.inputs).logits[0].float(), batch.labels[example, place], example


class _PlaceSelection:
    """Hooks by which a model's head receives the encoder's output only at the places in its input `places`."""

    places: torch.Tensor | None = None

    def take_places(self, model: torch.nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.places = inputs.get("places")
        return args, {name: value for name, value in inputs.items() if name != "places"}

    def select(self, encoder: torch.nn.Module, args: Any, output: Any) -> None:
        if self.places is not None:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, self.places)[None]
