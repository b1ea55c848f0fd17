"""AdamW for a model with the layers of the chosen engine, and the learning rate of each update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.engines import ENGINES
from cpuft.train.engines.ipex import optimize_by_ipex
from cpuft.train.engines.ort import optimize_by_ort
from cpuft.train.fast.acceleration import accelerate, describe_layers
from cpuft.train.fast.stack import find_stacks


def make_optimizer(model: torch.nn.Module, config: TrainConfig, precision: str) -> torch.optim.Optimizer:
    """Return an AdamW for a model, whose groups' RATE_FACTOR the caller applies, and give the model gradient
    checkpointing and layers as the options say, in place, for `precision` fp32, bf16 or int8. Raises CpuftError: it
    lacks the layers that --gradient-checkpointing, --layerwise-lr-decay or int8 needs.
    """
    if config.gradient_checkpointing:
        checkpoint_gradients(model, config.uses_fast_path)
    fused = config.engine == "torch" or ENGINES[config.engine].has_fused_adamw
    optimizer = torch.optim.AdamW(
        group_parameters(model, config.weight_decay, config.layerwise_lr_decay),
        config.choose_lora(0).learning_rate,
        (config.adam_beta1, config.adam_beta2),
        config.adam_epsilon,
        fused=fused,
    )
    if config.engine == "ipex":
        optimize_by_ipex(model, optimizer, precision)
    elif config.engine == "ort":
        optimize_by_ort(model)
    elif config.uses_fast_path:
        accelerate(model, optimizer, precision=precision, adapters=config.lora_rank > 0)
    return optimizer


def describe_fast_path(model: torch.nn.Module, config: TrainConfig) -> str:
    """Return "6 of 6 layers replaced" or the like, why none is, or "not used, because of --no-fast-path"."""
    option = "--no-fast-path" if not config.fast_path else f"--engine {config.engine}"
    return describe_layers(model) if config.uses_fast_path else f"not used, because of {option}"


def checkpoint_gradients(model: torch.nn.Module, uses_fast_path: bool = False) -> None:
    """Let all layers of a model but the last, for which nothing would be saved, recompute activations in backward.

    Dropout masks repeat, and each parameter gets its gradient at once, as the checkpoints are not re-entrant. With
    `uses_fast_path`, layers that `accelerate` will replace need no gradient checkpointing of their own. Raises
    CpuftError: no layer can recompute.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers and uses_fast_path:
        layers = [layer for stack in find_stacks(model, adapters=True) for layer in stack.runs]
    if not layers:
        name = type(model).__name__
        raise CpuftError(f"--gradient-checkpointing finds no layers in {name} that can compute again: leave it out")
    for layer in layers[:-1]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


RATE_FACTOR = "rate_factor"
"""Key of a parameter group: the factor of the learning rate for its parameters."""


def group_parameters(model: torch.nn.Module, weight_decay: float, layerwise_decay: float = 1.0) -> list[dict[str, Any]]:
    """Return AdamW's groups ("params", "weight_decay", RATE_FACTOR) of the trainable parameters, none empty: for each
    learning rate, from the head down, the matrices, then biases and norms, without weight decay. Raises CpuftError:
    layerwise decay finds no stack of layers.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    factors = dict.fromkeys(parameters, 1.0)
    if layerwise_decay != 1:
        factors = find_rate_factors(model, parameters, layerwise_decay)
    groups = [
        {
            "params": [p for name, p in parameters.items() if factors[name] == factor and (p.ndim > 1) == is_matrix],
            "weight_decay": weight_decay if is_matrix else 0.0,
            RATE_FACTOR: factor,
        }
        for factor in sorted({*factors.values()}, reverse=True)
        for is_matrix in (True, False)
    ]
    return [group for group in groups if group["params"]]


def find_rate_factors(model: torch.nn.Module, names: Iterable[str], decay: float) -> dict[str, float]:
    """Return the factor of the learning rate for each parameter: `decay` to the power of its distance from the head.

    The distance is 0 for the head and whatever follows the layers, 1 for the top layer, and for embeddings, also if a
    head shares them, one more than for the lowest layer. Source: BEiT (Bao et al. 2021, arXiv:2106.08254). Raises
    CpuftError: the model has no stack of layers.
    """
    stacks = {name: len(module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    if not stacks:
        raise CpuftError(f"--layerwise-lr-decay finds no stack of layers in {type(model).__name__}: leave it out")
    stack = max(stacks, key=lambda name: stacks[name])
    layers = stacks[stack]
    # Names do not show all tables: GPT-2 has wte and wpe. But norms and projections of embeddings have only names.
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}

    def distance(name: str) -> int:
        if name.startswith(f"{stack}."):
            return layers - int(name.removeprefix(f"{stack}.").partition(".")[0])
        return layers + 1 if "embed" in name or name in tables else 0

    return {name: decay ** distance(name) for name in names}


def count_warm_up_updates(updates: int, warmup_ratio: float, warmup_steps: int) -> int:
    """Return the number of updates that warm up: `warmup_steps` unless it is 0, else that ratio of all, rounded up."""
    return warmup_steps or math.ceil(updates * warmup_ratio)


def learning_rate_factor(update: int, updates: int, warmup: int, schedule: str = "linear") -> float:
    """Return the share of the peak learning rate for an update, which is counted from 0, as transformers does.

    The share rises from 0 during the `warmup` updates, whose last is followed by the peak. Then linear and cosine (half
    a wave) fall to 0 at update `updates`, inverse-sqrt falls as sqrt(w / (w + updates since the peak)) with w =
    `warmup` or 10,000, and the constant ones stay at 1. KeyError after the warmup: another `schedule`.
    """
    if update < warmup:
        return update / warmup
    progress = min(1.0, (update - warmup) / max(1, updates - warmup))
    beginning = warmup or 10_000
    factors = {
        "linear": max(0.0, (updates - update) / max(1, updates - warmup)),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "inverse-sqrt": math.sqrt(beginning / (update - warmup + beginning)),
        "constant": 1.0,
        "constant-with-warmup": 1.0,
    }
    return factors[schedule]
