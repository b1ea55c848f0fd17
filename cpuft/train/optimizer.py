"""AdamW for a model with the layers of the chosen engine, and the learning rate of each update."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import cache_folder
from cpuft.train.engines import ENGINES, optimize_with_engine
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.encoder import describe_layers


def make_optimizer(model: torch.nn.Module, config: TrainConfig, precision: str) -> torch.optim.Optimizer:
    """Return an AdamW for a model, and change the model in place as the options say.

    With --gradient-checkpointing, layers recompute activations; then the layers are replaced by those of --engine,
    compiled by --compile, or replaced by the fast path's, unless --no-fast-path is given. --compile sets the
    environment variable TORCHINDUCTOR_CACHE_DIR unless it is set.

    Parameters
    ----------
    precision: fp32, bf16 or int8.

    Raises CpuftError: --gradient-checkpointing finds no layers in the model that support it, or the cache folder of
    --compile cannot be made.
    """
    if config.gradient_checkpointing:
        checkpoint_gradients(model)
    if config.compile:
        # By default torch loads code from a folder in /tmp, which any user may create first. The variable is read when
        # the first optimizer is made.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(os.environ) / "inductor"))
    fused = config.engine == "torch" or ENGINES[config.engine].has_fused_adamw
    optimizer = torch.optim.AdamW(group_parameters(model, config.weight_decay), config.learning_rate, fused=fused)
    if config.engine != "torch":
        optimize_with_engine(config.engine, model, optimizer, precision)
    elif config.compile:
        # A graph cannot hold the kernels of fast layers, so there are none. Lengths of batches differ: dynamic shapes.
        model.compile(dynamic=True)
    elif config.fast_path:
        accelerate(model, optimizer, precision=precision, adapters=config.lora_rank > 0)
    return optimizer


def describe_fast_path(model: torch.nn.Module, config: TrainConfig) -> str:
    """Return how many layers of a model the fast path has replaced in `make_optimizer`, or why it has replaced none.

    For example `6 of 6 layers replaced`, or `not used, because of --no-fast-path`.
    """
    reasons = {
        "--no-fast-path": not config.fast_path,
        "--compile": config.compile,
        f"--engine {config.engine}": config.engine != "torch",
    }
    option = next((option for option, is_given in reasons.items() if is_given), "")
    return f"not used, because of {option}" if option else describe_layers(model)


def checkpoint_gradients(model: torch.nn.Module) -> None:
    """Let all layers of a model but the last recompute their activations in the backward pass, in place.

    The last layer is left out because the backward pass begins with it: nothing would be saved. torch's generator is
    restored for the recomputation, so dropout masks repeat and gradients are the same to the bit. The checkpoints are
    not re-entrant, as DistributedDataParallel requires. Fast layers that are made of these layers later recompute only
    what gradients need.

    Raises CpuftError if the model has no layers that support gradient checkpointing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        name = type(model).__name__
        raise CpuftError(f"--gradient-checkpointing finds no layers in {name} that can compute again: leave it out")
    for layer in layers[:-1]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def group_parameters(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups of the trainable parameters: those with two dimensions or more, then all others.

    Each is a dict of `params` and `weight_decay`: the given one for matrices, 0.0 for biases and norms (one dimension).
    A group may be empty.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def learning_rate_factor(update: int, updates: int, warmup_ratio: float) -> float:
    """Return the share of the peak learning rate for an update, from 0 to 1.

    It rises linearly from 0 during the warm-up, whose last update is followed by the peak, and then falls linearly, so
    that it would be 0 for update `updates`.

    Parameters
    ----------
    update: number of the update, counted from 0.
    updates: number of updates of the run.
    warmup_ratio: share of the updates that warm up, rounded up to whole ones.
    """
    warmup = math.ceil(updates * warmup_ratio)
    if update < warmup:
        return update / warmup
    return max(0.0, (updates - update) / max(1, updates - warmup))
