"""Which words were taken away? Masked language modelling, as BERT's (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config import TrainConfig
from cpuft.train.data.archive import UNTAGGED, Tokens
from cpuft.train.data.order import Order
from cpuft.train.data.texts import BEGINS, NEVER
from cpuft.train.lora import is_adapted
from cpuft.train.objective.base import Answers, Batch
from cpuft.train.objective.labels import Tagging


@dataclass(frozen=True, kw_only=True)
class Masking(Tagging):
    """Guess the words at some places, by cross entropy. Masks are drawn from the seed, the epoch and the row: they are
    the same for any number of ranks, and when a run goes on.

    The update's loss is the mean over the masked places of all its rows: of one batch on one rank it is the Hugging
    Face Trainer's.
    """

    model_class = "AutoModelForMaskedLM"
    kinds: NDArray[np.int8]
    """What each word is, by `sort_words`."""
    mask_id: int
    config: TrainConfig

    def head(self) -> dict[str, Any]:
        """As it is."""
        return {}

    def load_model(self, config: TrainConfig) -> Any:
        """The encoder with its head, fp32, on the CPU. Raises CpuftError when it cannot be had."""
        model = super().load_model(config)
        self.look_at_places(model.get_base_model() if is_adapted(model) else model)
        return model

    def look_at_places(self, model: Any) -> None:
        """Let a model's head compute for the batch's `places` only: it is the largest product of all."""
        places = _Places()
        model.register_forward_pre_hook(places.take, with_kwargs=True)
        model.base_model.register_forward_hook(places.pick)

    def make_batch(self, tokens: Tokens, rows: Order, epoch: int = -1) -> Batch:
        """The rows with masks; `places` are those to be guessed, counted over all rows."""
        ids, labels = zip(*(self.mask_row(tokens, int(row), epoch) for row in rows))
        offsets = np.cumsum([0, *map(len, ids)])
        drawn = Tokens(np.concatenate(ids), tokens.types, offsets, np.concatenate(labels))
        batch = super().make_batch(drawn, np.arange(len(rows)))
        batch.inputs["places"] = (batch.labels.view(-1) != UNTAGGED).nonzero()[:, 0]
        if bool(batch.inputs["attention_mask"].all()):  # attention has less to add
            del batch.inputs["attention_mask"]
        return batch

    def count_terms(self, tokens: Tokens, rows: Order, epoch: int = -1) -> float:
        """Places to be guessed."""
        return float(sum((self.mask_row(tokens, int(row), epoch)[1] != UNTAGGED).sum() for row in rows))

    def mask_row(self, tokens: Tokens, row: int, epoch: int) -> tuple[Order, Order]:
        """A row as it is seen in an epoch, and its labels, by `mask`."""
        ids = tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]].astype(np.int64)
        return self.mask(ids, np.random.default_rng((self.config.seed, epoch, row) if epoch >= 0 else (row,)))

    def mask(self, ids: Order, generator: np.random.Generator) -> tuple[Order, Order]:
        """A row's tokens with masks, and its labels: the tokens of places to be guessed, else UNTAGGED.

        So many places are drawn, not each by itself: as many of every full row. BERT's own data is made so, too.
        """
        kinds = self.kinds[ids]
        places = np.flatnonzero(kinds != NEVER)
        count = max(1, round(self.config.mlm_probability * len(places)))
        if self.config.whole_word_mask and len(places):
            words = np.cumsum(kinds[places] == BEGINS)  # their numbers, one after another
            order = generator.permutation(np.unique(words))
            fit = (np.cumsum(np.bincount(words)[order]) <= count).sum()
            chosen = places[np.isin(words, order[: max(1, fit)])]
        else:
            chosen = generator.permutation(places)[:count]
        masked, labels = ids.copy(), np.full_like(ids, UNTAGGED)
        labels[chosen] = ids[chosen]
        draw = generator.random(len(chosen))
        another = self.others[generator.integers(len(self.others), size=len(chosen))]
        masked[chosen] = np.where(draw < 0.8, self.mask_id, np.where(draw < 0.9, another, ids[chosen]))
        return masked, labels

    @cached_property
    def others(self) -> Order:
        """Words that may take another's place."""
        return np.flatnonzero(self.kinds != NEVER)

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The sum over the row's masked places."""
        logits, wanted, row = _guess(model, batch)
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return losses.new_zeros(len(batch.labels)).index_add(0, row, losses)

    def answers(self, model: torch.nn.Module, batch: Batch) -> Answers:
        """Of each row: the sum of its losses, how many guesses are right, and how many there are; shape (rows, 3)."""
        logits, wanted, row = _guess(model, batch)
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        found = torch.stack([losses, (logits.argmax(-1) == wanted).float(), torch.ones_like(losses)], 1)
        sums: Answers = losses.new_zeros(len(batch.labels), 3).index_add(0, row, found).numpy()
        return sums

    def measure(self, answers: Answers, tokens: Tokens) -> dict[str, float]:
        """Perplexity (e to the mean loss over masked places) and the share of right guesses."""
        sums = answers.sum(0, dtype=np.float64)
        loss, right = sums[:2] / max(1.0, sums[2])
        return {"perplexity": math.exp(min(loss, 700.0)), "masked_accuracy": float(right)}

    def name_tokens(self, tokens: Tokens, rows: Order) -> torch.Tensor:
        """All words: any of them may take another's place."""
        return torch.arange(len(self.kinds))


def _guess(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each masked place: logits of all words, the word that was there, and its row."""
    row, place = (batch.labels != UNTAGGED).nonzero(as_tuple=True)
    return model(**batch.inputs).logits[0].float(), batch.labels[row, place], row


class _Places:
    """Hooks by which a model's head sees some places of the encoder's output only: its input `places`."""

    places: torch.Tensor | None = None

    def take(self, model: torch.nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.places = inputs.get("places")
        return args, {name: value for name, value in inputs.items() if name != "places"}

    def pick(self, encoder: torch.nn.Module, args: Any, output: Any) -> Any:
        if self.places is not None:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, self.places)[None]
        return output
