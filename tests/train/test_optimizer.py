"""What updates the weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    plan_averages,
)
from tests.train.architectures import SIZES
from tests.train.decoders import ENCODERS, make_decoder
from tests.train.fast.encoders import make_model

CODE = """
import os, torch
from cpuft.config.train import TrainConfig
from cpuft.train.optimizer import make_optimizer
make_optimizer(torch.nn.Linear(2, 2), TrainConfig(compile=True), "fp32")
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


def test_what_torch_compiles_is_loaded_from_where_only_this_user_writes(tmp_path: Path) -> None:
    environ = dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path)}
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == f"{tmp_path}/cpuft/inductor\n"


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


@pytest.mark.parametrize(
    "options, averages",
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ({"sync_every": 5}, [5, 10]),
        # The rate falls by a twelfth after each update: 2, 2 / (10/12)^2 = 2.9, 2 / (8/12)^2 = 4.5, 2 / (4/12)^2 = 18.
        ({"sync_every": 2, "sync_schedule": "quadratic"}, [2, 4, 8]),
        # In the warm-up of six updates the rate is low, but the period is the shortest. 2 / (2/6)^2 = 18.
        ({"sync_every": 2, "sync_schedule": "quadratic", "warmup_steps": 6}, [2, 4, 6, 8, 12]),
        ({"sync_every": 5, "sync_schedule": "quadratic", "lr_schedule": "constant"}, [5, 10]),
        ({"sync_every": 5, "sync_schedule": "quadratic", "warmup_steps": 12}, [5, 10]),
    ],
)
def test_parameters_are_averaged_less_often_when_the_rate_is_low(options: dict[str, Any], averages: list[int]) -> None:
    assert sorted(plan_averages(TrainConfig(**options), 12)) == averages


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
