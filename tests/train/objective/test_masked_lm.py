"""Masks, the head that looks at masked places only, and the Hugging Face Trainer's loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpuft.config.train import TrainConfig
from cpuft.kernels import plain_torch
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens
from cpuft.train.data.order import select_for_rank
from cpuft.train.data.texts import NEVER_MASKED, WORD_CONTINUATION, WORD_START
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.objective.base import Batch
from cpuft.train.objective.masked_lm import MaskedLanguageModelling
from cpuft.train.objective.table import make_objective

WORDS = 40
PAD, MASK, START, END = 0, 1, 2, 3
KINDS = np.asarray([NEVER_MASKED] * 4 + [WORD_START, WORD_START, WORD_CONTINUATION] * 12, np.int8)
"""Of 40 words; every third is a part that goes on."""


def make_rows(lengths: list[int], seed: int = 0) -> Tokens:
    """Rows of random words between their special tokens."""
    drawn = np.random.default_rng(seed)
    rows = [[START, *drawn.integers(4, WORDS, length - 2), END] for length in lengths]
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Tokens(np.concatenate(rows).astype(np.int32), np.zeros(0, np.int8), offsets, np.zeros(0, np.float32))


def make_masking(share: float = 0.15, whole: bool = False, seed: int = 42) -> MaskedLanguageModelling:
    config = TrainConfig(mlm_probability=share, whole_word_mask=whole, seed=seed)
    return MaskedLanguageModelling((), (), PAD, kinds=KINDS, mask_id=MASK, config=config)


@given(st.integers(3, 200), st.sampled_from([0.01, 0.15, 0.5, 0.9]), st.booleans(), st.integers(0, 10**6))
def test_a_share_of_the_words_is_to_be_guessed_and_nothing_else_changes(
    length: int, share: float, whole: bool, seed: int
) -> None:
    ids = make_rows([length], seed).ids.astype(np.int64)
    masked, labels = make_masking(share, whole).mask(ids, np.random.default_rng(seed))
    guessed = labels != UNTAGGED
    assert labels[guessed].tolist() == ids[guessed].tolist()
    assert masked[~guessed].tolist() == ids[~guessed].tolist()
    assert guessed[[0, -1]].tolist() == [False, False]
    assert all(word == MASK or KINDS[word] != NEVER_MASKED for word in masked[guessed])
    count = max(1, round(share * (length - 2)))
    # Of whole words the last may not fit; one longer than all is masked nevertheless.
    assert guessed.sum() == count if not whole else guessed.sum() >= 1


@given(st.integers(20, 200), st.integers(0, 10**6))
def test_words_are_masked_as_a_whole_or_not_at_all(length: int, seed: int) -> None:
    ids = make_rows([length], seed).ids.astype(np.int64)
    _, labels = make_masking(0.3, whole=True).mask(ids, np.random.default_rng(seed))
    guessed = (labels != UNTAGGED)[1:-1]
    inside = KINDS[ids[1:-1]] == WORD_CONTINUATION
    assert (guessed[1:] == guessed[:-1])[inside[1:]].all()
    assert guessed.sum() <= max(round(0.3 * (length - 2)), 1 + inside.sum())


def test_of_what_is_guessed_most_is_masked_and_some_is_another_word_or_its_own() -> None:
    rows = make_rows([128] * 400)
    batch = make_masking().make_batch(rows, np.arange(400), 0)
    guessed = batch.labels != UNTAGGED
    inputs, labels = batch.inputs["input_ids"][guessed], batch.labels[guessed]
    assert guessed.sum(1).tolist() == [19] * 400  # 15 % of 126
    assert float((inputs == MASK).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((inputs == labels).float().mean()) == pytest.approx(0.1 + 0.1 / 36, abs=0.02)
    others = inputs[(inputs != MASK) & (inputs != labels)]
    assert set(others.tolist()) == set(range(4, WORDS))


def test_masks_are_the_rows_own_whatever_ranks_there_are() -> None:
    rows, order = make_rows([32] * 11 + [9]), np.asarray([3, 11, 7, 0, 5, 2])
    masking = make_masking()
    whole = masking.make_batch(rows, order, 2)
    for size in (1, 2, 3, 6):
        for rank in range(size):
            part, places = masking.make_batch(rows, select_for_rank(order, rank, size), 2), np.arange(6)[rank::size]
            width = part.labels.shape[1]
            assert part.labels.tolist() == whole.labels[places, :width].tolist()
            assert part.inputs["input_ids"].tolist() == whole.inputs["input_ids"][places, :width].tolist()


def test_an_epoch_has_masks_of_its_own_and_evaluation_the_same_for_any_seed() -> None:
    rows, order = make_rows([64] * 4), np.arange(4)
    drawn = [make_masking(seed=seed).make_batch(rows, order, epoch).labels for seed in (1, 2) for epoch in (0, 1, -1)]
    again = make_masking(seed=1).make_batch(rows, order, 0).labels
    assert torch.equal(again, drawn[0])
    assert torch.equal(drawn[2], drawn[5])
    different = [drawn[0], drawn[1], drawn[2], drawn[3], drawn[4]]
    assert all(not torch.equal(a, b) for i, a in enumerate(different) for b in different[:i])


@given(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.booleans(), st.sampled_from([0.01, 0.15, 0.6]))
def test_what_is_to_be_guessed_is_counted_before_batches_are_made(
    lengths: list[int], whole: bool, share: float
) -> None:
    masking, rows, order = make_masking(share, whole), make_rows(lengths), np.arange(len(lengths))[::-1]
    labels = masking.make_batch(rows, order, 3).labels
    with pytest.MonkeyPatch.context() as patch:
        if not whole:  # every rank counts the examples of all ranks, so nothing may be drawn for it
            patch.delattr(MaskedLanguageModelling, "mask_example")
        assert masking.count_terms(rows, order, 3) == int((labels != UNTAGGED).sum())


def test_a_batch_says_where_it_is_to_be_guessed_and_what_pads() -> None:
    batch = make_masking(0.5).make_batch(make_rows([6, 9]), np.asarray([0, 1]), 0)
    assert batch.inputs["attention_mask"].sum(1).tolist() == [6, 9]
    assert batch.inputs["input_ids"][0, 6:].tolist() == [PAD] * 3
    assert batch.inputs["places"].tolist() == (batch.labels.view(-1) != UNTAGGED).nonzero()[:, 0].tolist()
    assert (batch.labels.shape, batch.tokens) == ((2, 9), 15)
    assert "attention_mask" not in make_masking().make_batch(make_rows([6, 6]), np.asarray([0, 1]), 0).inputs


def make_model(masking: MaskedLanguageModelling, kind: str = "bert", **others: Any) -> Any:
    """An untrained encoder of two layers with its head, of the 40 words, without dropout."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    places = {"vocab_size": WORDS, "max_position_embeddings": 80, **others}
    settings = AutoConfig.for_model(kind, **sizes, **places, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(settings, attn_implementation="eager")
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    masking.predict_masked_places_only(model)
    return model.train()


@pytest.mark.parametrize("kind, others", [("bert", {}), ("roberta", {}), ("electra", {"embedding_size": 16})])
def test_the_head_looks_at_masked_places_only(kind: str, others: dict[str, Any]) -> None:
    masking = make_masking()
    model, batch = make_model(masking, kind, **others), masking.make_batch(make_rows([16, 16, 9]), np.arange(3), 0)
    inputs = dict(batch.inputs)
    places = inputs.pop("places")
    everywhere = model(**inputs).logits
    logits = model(**batch.inputs).logits
    assert logits.shape == (1, len(places), WORDS)
    torch.testing.assert_close(logits[0], everywhere.reshape(-1, WORDS)[places])


@pytest.mark.parametrize("fast", [False, True])
def test_the_loss_is_the_mean_over_masked_places_as_transformers_has_it(fast: bool) -> None:
    masking = make_masking()
    tokens = make_rows([16, 16, 9])
    model, batch = make_model(masking), masking.make_batch(tokens, np.arange(3), 0)
    inputs = {name: value for name, value in batch.inputs.items() if name != "places"}
    theirs = model(**inputs, labels=batch.labels).loss
    torch.autograd.backward(theirs)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with plain_torch():
        for optimizer in [torch.optim.AdamW(model.parameters()) for _ in range(fast)]:
            accelerate(model, optimizer, precision="fp32")
        losses = masking.losses(model, batch)
        mean = losses.sum() / masking.count_terms(tokens, np.arange(3), 0)
        torch.autograd.backward(mean)
    assert losses.shape == (3,)
    torch.testing.assert_close(mean, theirs)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3)


def test_answers_add_up_to_perplexity_and_right_guesses() -> None:
    masking, rows = make_masking(), make_rows([16, 16, 9])
    model, batch = make_model(masking).eval(), masking.make_batch(rows, np.arange(3))
    with torch.inference_mode():
        answers = masking.predict(model, batch)
        wanted = batch.labels[batch.labels != UNTAGGED]
        logits = model(**batch.inputs).logits[0]
    found = masking.compute_metrics(answers, rows)
    loss = float(torch.nn.functional.cross_entropy(logits, wanted))
    right = float((logits.argmax(-1) == wanted).float().mean())
    assert answers[:, 2].tolist() == [2, 2, 1]
    assert found == pytest.approx({"perplexity": math.exp(loss), "masked_accuracy": right}, rel=1e-5)


def test_a_perplexity_that_no_number_holds_is_a_large_one() -> None:
    found = make_masking().compute_metrics(np.asarray([[1e6, 0, 1]], np.float32), make_rows([3]))
    assert 1e300 < found["perplexity"] < math.inf


class Nothing(torch.nn.Module):
    """A model whose head sees no place at all."""

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(1, 0, WORDS))


def test_rows_without_a_word_have_no_loss() -> None:
    masking = make_masking()
    tokens = Tokens(
        np.asarray([START, END], np.int32), np.zeros(0, np.int8), np.asarray([0, 2]), np.zeros(0, np.float32)
    )
    batch = masking.make_batch(tokens, np.asarray([0]), 0)
    assert isinstance(batch, Batch)
    assert masking.losses(Nothing(), batch).tolist() == [0.0]


def test_texts_are_masked_as_asked_for() -> None:
    rows = make_rows([8, 8])
    prepared = Prepared((), ("perplexity",), "", PAD, rows, {"": rows}, "masked", MASK, KINDS)
    found = make_objective(TrainConfig(task="text", mlm_probability=0.5, whole_word_mask=True, seed=7), prepared)
    assert isinstance(found, MaskedLanguageModelling)
    assert (found.config.mlm_probability, found.mask_id, found.kinds.tolist()) == (0.5, MASK, KINDS.tolist())
    assert found.list_token_ids(rows, np.asarray([0])).tolist() == list(range(WORDS))
