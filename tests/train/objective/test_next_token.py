"""Next-token prediction: its targets, and losses and gradients as transformers has them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import EMPTY, UNTAGGED, Tokens
from cpuft.train.data.chat import Encoded, join_examples
from cpuft.train.model import choose_attention
from cpuft.train.objective.base import Batch
from cpuft.train.objective.next_token import CausalLanguageModelling, Chat, NextTokenPrediction, compute_losses_in_model
from tests.train.decoders import FAMILIES, make_decoder, save_decoder

PAD = 3
METRICS = ("perplexity", "token_accuracy")


def make_tokens(lengths: list[int], seed: int = 0) -> Tokens:
    ids = np.random.default_rng(seed).integers(4, 324, sum(lengths)).astype(np.int32)
    return Tokens(ids, EMPTY, np.cumsum([0, *lengths]).astype(np.int64), EMPTY)


def make_objective() -> CausalLanguageModelling:
    return CausalLanguageModelling((), METRICS, PAD)


def model_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """What transformers' own forward pass takes."""
    return {name: value for name, value in batch.inputs.items() if name not in ("places", "targets")}


def mean_and_gradients(objective: NextTokenPrediction, model: Any, tokens: Tokens) -> tuple[Any, list[torch.Tensor]]:
    """Of one batch of all examples."""
    examples = np.arange(len(tokens))
    model.zero_grad()
    losses = objective.losses(model, objective.make_batch(tokens, examples, 0))
    mean = losses.sum() / objective.count_terms(tokens, examples, 0)
    torch.autograd.backward(mean)
    return mean, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("lengths", [[12, 12, 5], [12, 12]], ids=["padded", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, lengths: list[int]) -> None:
    model, tokens, objective = make_decoder(family).train(), make_tokens(lengths), make_objective()
    batch = objective.make_batch(tokens, np.arange(len(tokens)))
    theirs = copy.deepcopy(model)
    theirs_loss = theirs(**model_inputs(batch), labels=batch.labels).loss
    torch.autograd.backward(theirs_loss)
    compute_losses_in_model(model, family)
    mean, found = mean_and_gradients(objective, model, tokens)
    torch.testing.assert_close(mean, theirs_loss)
    for gradient, parameter in zip(found, theirs.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    model, objective, tokens = make_decoder("llama").train(), make_objective(), make_tokens([8])
    compute_losses_in_model(model, "llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
        losses = [
            float(objective.losses(one, objective.make_batch(tokens, np.arange(1))).sum()) for one in (model, other)
        ]
    assert losses[1] == pytest.approx(7 * math.log(324))
    assert losses[0] != losses[1]


def test_every_token_but_the_first_is_predicted_from_the_one_before() -> None:
    tokens, objective = make_tokens([4, 2, 1]), make_objective()
    batch = objective.make_batch(tokens, np.arange(3))
    a, b, c, d, e, f, g = tokens.ids.tolist()
    assert batch.inputs["input_ids"].tolist() == [[a, b, c, d], [e, f, PAD, PAD], [g, PAD, PAD, PAD]]
    assert batch.labels.tolist() == [[UNTAGGED, b, c, d], [UNTAGGED, f, UNTAGGED, UNTAGGED], [UNTAGGED] * 4]
    assert batch.inputs["places"].tolist() == [0, 1, 2, 4]
    assert batch.inputs["targets"].tolist() == [b, c, d, f]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [4, 2, 1]
    assert objective.count_terms(tokens, np.arange(3)) == 4
    assert "attention_mask" not in objective.make_batch(tokens, np.asarray([0])).inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_has_the_same_loss_in_any_batch(family: str) -> None:
    model, tokens, objective = make_decoder(family), make_tokens([12, 5, 9]), make_objective()
    compute_losses_in_model(model.eval(), family)
    with torch.no_grad():
        together = objective.losses(model, objective.make_batch(tokens, np.arange(3)))
        alone = [objective.losses(model, objective.make_batch(tokens, np.asarray([one])))[0] for one in range(3)]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-5)


def test_predictions_add_up_to_perplexity_and_accuracy() -> None:
    model, tokens, objective = make_decoder("llama").eval(), make_tokens([12, 5]), make_objective()
    compute_losses_in_model(model, "llama")
    batch = objective.make_batch(tokens, np.arange(2))
    with torch.inference_mode():
        found = objective.predict(model, batch)
        logits = model(**model_inputs(batch)).logits.flatten(0, 1)[batch.inputs["places"]]
    loss = float(torch.nn.functional.cross_entropy(logits, batch.inputs["targets"]))
    right = float((logits.argmax(-1) == batch.inputs["targets"]).float().mean())
    assert found[:, 2].tolist() == [11, 4]
    wanted = {"perplexity": math.exp(loss), "token_accuracy": right}
    assert objective.compute_metrics(found, tokens) == pytest.approx(wanted, rel=1e-4)


def test_a_head_that_is_not_known_is_refused() -> None:
    model = make_decoder("gemma3_text")
    model.lm_head.register_forward_hook(lambda head, given, logits: logits * 2)
    with pytest.raises(
        CpuftError, match="Gemma3ForCausalLM of mine makes predictions in a way that cpuft cannot train"
    ):
        compute_losses_in_model(model, "mine")


def test_attention_scores_that_are_capped_need_the_eager_attention() -> None:
    from transformers import Gemma2Config, LlamaConfig

    assert (choose_attention(Gemma2Config()), choose_attention(LlamaConfig())) == ("eager", None)


def test_a_decoder_is_loaded_with_the_attention_of_torch(tmp_path: Path) -> None:
    model = make_objective().load_model(TrainConfig(task="text", causal=True, model=save_decoder(tmp_path / "tiny")))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(CpuftError, match="cannot be loaded"):
        make_objective().load_model(TrainConfig(task="text", causal=True, model=save_vision_model(tmp_path / "other")))


def save_vision_model(folder: Path) -> str:
    """A model that has no head for tokens."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(folder)
    return str(folder)


def make_conversations(lengths: list[int], room: int, seed: int = 0) -> tuple[Tokens, Tokens]:
    """Conversations of these lengths with two answers each: one by one, and packed."""
    generator = np.random.default_rng(seed)
    found = Encoded()
    for length in lengths:
        mask = np.zeros(length, np.int8)
        mask[length // 4 : length // 2] = mask[-length // 4 :] = 1
        found.ids.append(generator.integers(4, 324, length).astype(np.int32))
        found.masks.append(mask)
    return join_examples(found, room, False), join_examples(found, room, True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_conversations_have_the_losses_and_gradients_of_single_ones(family: str, attention: str) -> None:
    model, objective = make_decoder(family).train(), Chat((), METRICS, PAD)
    model.set_attn_implementation(attention)
    compute_losses_in_model(model, family)
    alone, packed = make_conversations([12, 20, 9, 16, 11], 40)
    assert (len(alone), len(packed)) == (5, 2)
    mean, gradients = mean_and_gradients(objective, model, packed)
    batch = objective.make_batch(packed, np.arange(2), 0)
    assert "attention_mask" not in batch.inputs
    wanted_mean, wanted = mean_and_gradients(objective, model, alone)
    assert float(mean.detach()) == pytest.approx(float(wanted_mean.detach()), abs=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # Without the positions, tokens would attend to other conversations.
    del batch.inputs["position_ids"]
    with torch.no_grad():
        assert (
            abs(float(objective.losses(model, batch).sum() - objective.count_terms(packed, np.arange(2)) * mean)) > 1e-3
        )


def test_positions_begin_anew_at_each_conversation_and_in_padding() -> None:
    _, packed = make_conversations([4, 5, 7], 9)
    batch = Chat((), METRICS, PAD).make_batch(packed, np.arange(2))
    positions = batch.inputs["position_ids"].tolist()
    assert positions == [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]]


def test_only_what_the_assistant_says_is_predicted() -> None:
    alone, packed = make_conversations([8, 12], 20)
    for tokens in (alone, packed):
        objective, examples = Chat((), METRICS, PAD), np.arange(len(tokens))
        batch = objective.make_batch(tokens, examples)
        assert objective.count_terms(tokens, examples) == len(batch.inputs["targets"]) == 4 + 6
        said = tokens.ids[tokens.labels == 1].tolist()
        assert batch.labels[batch.labels != UNTAGGED].tolist() == batch.inputs["targets"].tolist() == said
        ids = batch.inputs["input_ids"].flatten()
        assert ids[batch.inputs["places"] + 1].tolist() == said


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_loss_of_conversations_is_that_of_transformers(family: str) -> None:
    model, objective = make_decoder(family).train(), Chat((), METRICS, PAD)
    alone, _ = make_conversations([12, 20, 9], 40)
    batch = objective.make_batch(alone, np.arange(3))
    wanted = model(**model_inputs(batch), labels=batch.labels).loss
    compute_losses_in_model(model, family)
    mean, _ = mean_and_gradients(objective, model, alone)
    torch.testing.assert_close(mean, wanted)
