"""What updates the weights."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, get_scheduler

from cpuft.config.train import LR_SCHEDULES, TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.optimizer import (
    count_warm_up_updates,
    find_rate_factors,
    group_parameters,
    learning_rate_factor,
    make_optimizer,
)
from tests.train.architectures import SIZES
from tests.train.decoders import ENCODERS, make_decoder
from tests.train.fast.encoders import make_model


@pytest.mark.parametrize(
    "updates, warmup, factors",
    [(4, 0, [1.0, 0.75, 0.5, 0.25, 0.0]), (4, 2, [0.0, 0.5, 1.0, 0.5, 0.0]), (1, 1, [0.0, 0.0])],
)
def test_the_learning_rate_rises_and_falls_to_zero(updates: int, warmup: int, factors: list[float]) -> None:
    assert [learning_rate_factor(update, updates, warmup) for update in range(updates + 1)] == factors


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedules_are_those_of_transformers(schedule: str, warmup: int) -> None:
    if schedule == "constant":
        warmup = 0  # which is refused with a warm-up, and which transformers ignores
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    scheduler = get_scheduler(schedule.replace("-", "_"), optimizer, warmup, 40)
    for update in range(40):
        expected = scheduler.get_last_lr()[0]
        assert learning_rate_factor(update, 40, warmup, schedule) == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_warm_up_is_a_number_or_a_share_of_the_updates() -> None:
    assert [count_warm_up_updates(25, *given) for given in ((0.1, 0), (0.1, 7), (0.0, 0))] == [3, 7, 0]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "electra"])
def test_each_layer_learns_slower_than_the_one_above_it(kind: str) -> None:
    model = make_model(kind)
    groups = group_parameters(model, 0.01, 0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    factors = {names[p]: group["rate_factor"] for group in groups for p in group["params"]}
    assert factors.keys() == set(names.values())
    for name, factor in factors.items():
        layer = re.search(r"\.layer\.(\d+)\.", name)
        expected = 0.5 ** (2 - int(layer[1])) if layer else 0.125 if "embedding" in name else 1.0
        assert factor == expected, name
    decays = {group["weight_decay"] for group in groups if group["params"][0].ndim > 1}
    assert (decays, len(groups)) == ({0.01}, 8)


@pytest.mark.parametrize("family", ["eurobert", "llama", "gpt2"])
def test_embeddings_learn_slowest_whatever_they_are_called(family: str) -> None:
    sizes = {**SIZES, **ENCODERS}[family]
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, vocab_size=400, **sizes))
    factors = find_rate_factors(model, [name for name, _ in model.named_parameters()], 0.5)
    slowest = {name.split(".")[-2] for name, factor in factors.items() if factor == 0.125}
    assert slowest == ({"wte", "wpe"} if family == "gpt2" else {"embed_tokens"})


def test_a_head_that_is_the_word_embedding_learns_as_slowly() -> None:
    shared, own = [
        find_rate_factors(model, [name for name, _ in model.named_parameters()], 0.5)
        for model in (make_decoder("qwen3"), make_decoder("llama"))
    ]
    assert shared["model.embed_tokens.weight"] == own["model.embed_tokens.weight"] == 0.125
    assert own["lm_head.weight"] == 1.0
    assert "lm_head.weight" not in shared


def test_a_model_without_a_stack_of_layers_has_no_layerwise_rates() -> None:
    with pytest.raises(CpuftError, match="--layerwise-lr-decay finds no stack of layers in Linear: leave it out"):
        group_parameters(torch.nn.Linear(2, 2), 0.0, 0.9)


def test_adamw_gets_its_options() -> None:
    config = TrainConfig(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, fast_path=False)
    defaults = make_optimizer(torch.nn.Linear(2, 2), config, "fp32").defaults
    assert (defaults["betas"], defaults["eps"]) == ((0.8, 0.95), 1e-6)


def test_matrices_are_decayed_and_frozen_ones_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
    model[2].requires_grad_(False)
    groups = group_parameters(model, 0.01)
    assert [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups] == [
        (0.01, [(2, 3)]),
        (0.0, [(2,), (2,), (2,)]),
    ]
