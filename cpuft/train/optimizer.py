"""What updates the weights, with the engine that is made for model and optimizer together; and its learning rate."""

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
from cpuft.train.engines import optimize_by_ipex, optimize_by_ort
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.encoder import describe_layers


def make_optimizer(model: torch.nn.Module, config: TrainConfig, precision: str) -> torch.optim.Optimizer:
    """AdamW for a model, which gets the layers of the engine asked for, in place."""
    if config.gradient_checkpointing:
        recompute_layers(model)
    if config.compile:
        # Else torch loads from a folder of /tmp that anybody may make first. The first optimizer settles it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(os.environ) / "inductor"))
    fused = config.engine != "ort"  # whose torch has no fused AdamW for CPUs
    optimizer = torch.optim.AdamW(group_parameters(model, config.weight_decay), config.learning_rate, fused=fused)
    if config.engine == "ipex":
        optimize_by_ipex(model, optimizer, precision)
    elif config.engine == "ort":
        optimize_by_ort(model)
    elif config.engine != "torch":
        return optimizer
    elif config.compile:
        # The fast layers call kernels of their own, which a graph cannot hold. Lengths differ from step to step.
        model.compile(dynamic=True)
    elif config.fast_path:
        accelerate(model, optimizer, precision=precision, adapters=config.lora_rank > 0)
    return optimizer


def describe_fast_path(model: torch.nn.Module, config: TrainConfig) -> str:
    """How many layers of a model the fast path has replaced in `make_optimizer`, or why it has not."""
    off = {
        "--no-fast-path": not config.fast_path,
        "--compile": config.compile,
        f"--engine {config.engine}": config.engine != "torch",
    }
    given = next((option for option, is_given in off.items() if is_given), "")
    return f"not used, because of {given}" if given else describe_layers(model)


def recompute_layers(model: torch.nn.Module) -> None:
    """Let all layers of a model but the last forget what they keep for backward, and compute it again then, in place.

    Backward begins with the last one: to forget it would save nothing. Dropout masks repeat, because torch's generator
    is put back meanwhile: gradients are the same to the bit. Not re-entrant, as DistributedDataParallel needs it. Fast
    layers, made of these later, leave out what no gradient needs.

    Raises CpuftError: the model has no layers that can.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise CpuftError(
            f"--gradient-checkpointing finds no layers in {type(model).__name__} that can compute again: leave it out"
        )
    for layer in layers[:-1]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def group_parameters(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: decay for matrices, none for biases and norms (one-dimensional)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def learning_rate_factor(update: int, updates: int, warmup_ratio: float) -> float:
    """Share of the peak rate: linear from 0 over the warm-up, then linear down to 0 at the end."""
    warmup = math.ceil(updates * warmup_ratio)
    if update < warmup:
        return update / warmup
    return max(0.0, (updates - update) / max(1, updates - warmup))
