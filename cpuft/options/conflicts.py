"""Options of a training that cannot go together."""

from __future__ import annotations

from cpuft.errors import CpuftError
from cpuft.options.fields import SHARDED, TrainConfig

_LAYERS = "it trains with layers of its own"
_WEIGHTS = "it keeps the fp32 weights to itself"
_SENDS = "it sends gradients in its own way"
_SHARES = "it shares the optimizer out itself"
_UNTRIED = "nobody has tried both"
_OWN_LAYERS = {"plain": _LAYERS, "compile": _LAYERS, "lora": _LAYERS, "recompute": _UNTRIED}
EXCLUDED = {
    "ipex": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "shard": _WEIGHTS},
    "deepspeed": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "grad_compression": _SENDS, "shard": _SHARES},
    "ort": {**_OWN_LAYERS, "shard": _UNTRIED},
}
"""Engine -> options that it excludes, and why."""


def refuse_engine(engine: str, notice: bool, apart: bool) -> None:
    """Raises CpuftError: an engine cannot do what a launch wants, which says `--notice`, or trains ranks `apart`."""
    if notice and engine != "torch":
        raise CpuftError(f"--notice wants a checkpoint, and --engine {engine} makes none: leave one of them out")
    if apart and engine == "deepspeed":
        raise CpuftError("--ideal trains ranks apart, and --engine deepspeed together only: leave one of them out")


def refuse_conflicts(config: TrainConfig) -> None:
    """Raises CpuftError: two options exclude each other; which, why, and the next move."""
    default = TrainConfig()
    for name, why in EXCLUDED.get(config.engine, {}).items():
        if getattr(config, name) != getattr(default, name):
            flags = f"--engine {config.engine} excludes --{name.replace('_', '-')}"
            raise CpuftError(f"{flags}, because {why}: leave one of them out")
    if config.engine == "ort" and (config.precision, config.backend) != ("fp32", "gloo"):
        # Under torch 2.3, DistributedDataParallel waits for process groups written in Python with the GIL in its hand.
        raise CpuftError("--engine ort trains in fp32 and over gloo only: add --precision fp32 --backend gloo")
    if config.engine == "ort" and config.task == "text":
        raise CpuftError("--engine ort takes the first batch's masked places for all: train --task text without it")
    if config.label_type != "auto" and config.task != "files":
        given = f"--label-type {config.label_type}"
        raise CpuftError(f"{given} is for --task files; the labels of --task {config.task} are known: leave it out")
    if config.precision == "int8":
        for name in ("engine", "plain", "compile", "lora"):
            if getattr(config, name) != getattr(default, name):
                raise CpuftError(f"--precision int8 is the fast path's own, and --{name} goes without: leave one out")
    if config.shard != "none" and config.sync_every > 1:
        raise CpuftError("--sync-every has each rank make all updates itself, --shard a part of each: leave one out")
    if config.shard != "none" and config.grad_compression not in ("auto", *SHARDED):
        asked = f"--grad-compression {config.grad_compression}"
        raise CpuftError(f"--shard sends gradients as {', '.join(SHARDED)} only: leave {asked} out, or --shard")
    if config.lora and config.from_config:
        raise CpuftError("--lora adapts a model that has learned, and --from-config makes one: leave one of them out")
    if config.lora_merge and not config.lora:
        raise CpuftError("--lora-merge says how adapters are kept, and there are none: add --lora 16, or leave it out")
