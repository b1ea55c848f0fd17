"""Options of a training that cannot go together."""

from __future__ import annotations

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig

_LAYERS = "it trains with layers of its own"
_WEIGHTS = "it keeps the fp32 weights to itself"
_SENDS = "it sends gradients in its own way"
_OWN_LAYERS = {"plain": _LAYERS, "compile": _LAYERS, "lora": _LAYERS}
EXCLUDED = {
    "ipex": {**_OWN_LAYERS, "sync_every": _WEIGHTS},
    "deepspeed": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "grad_compression": _SENDS},
    "ort": _OWN_LAYERS,
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
    if config.engine == "ort" and config.precision != "fp32":
        raise CpuftError("--engine ort trains in fp32 only: add --precision fp32")
    if config.lora_merge and not config.lora:
        raise CpuftError("--lora-merge says how adapters are kept, and there are none: add --lora 16, or leave it out")
