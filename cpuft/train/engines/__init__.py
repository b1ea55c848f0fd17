"""`--engine`: training systems of others in the place of cpuft's fast path: IPEX, DeepSpeed and ONNX Runtime.

Nothing of an engine is imported before its versions were checked: IPEX fails with an AttributeError on any version of
torch but its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError

IPEX = "intel_extension_for_pytorch"
ORT = "onnxruntime-training-cpu"


@dataclass(frozen=True)
class Engine:
    """What an engine needs."""

    versions: Mapping[str, str]
    """Package name to the major and minor version that it must have, such as `2.8`; the engine's own package first."""
    machine: str = ""
    """The machine type that it runs on, as `uname -m` prints it; empty for any."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the engine reads at its import, perhaps by transformers; the user's values win."""
    compiled_files: str = ""
    """Pattern of files beside its package, of which one exists if it was compiled for the installed torch; or empty."""
    has_fused_adamw: bool = True
    """Whether its torch has a fused AdamW for CPUs."""


ENGINES = {
    "ipex": Engine({IPEX: "2.8", "torch": "2.8"}, "x86_64"),
    "deepspeed": Engine({"deepspeed": "0.19"}, settings={"DS_ACCELERATOR": "cpu"}),
    # Without this setting it only warns when it fails, and trains with torch.
    "ort": Engine(
        {ORT: "1.19", "torch": "2.3"},
        "x86_64",
        {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"},
        "onnxruntime/training/ortmodule/torch_cpp_extensions/aten_op_executor*.so",
        has_fused_adamw=False,
    ),
}
"""Engines by the value of --engine, without `torch`, which is cpuft's own."""


def check_engine(config: TrainConfig) -> None:
    """Raise CpuftError if --engine cannot run here; else set its variables of the environment unless they are set."""
    engine = ENGINES.get(config.engine)
    if engine is None:
        return
    versions = {name: _installed_version(name) for name in engine.versions}
    problem = find_problem(config.engine, versions, platform.machine())
    if not problem and engine.compiled_files:
        beside = importlib.metadata.distribution(next(iter(engine.versions))).locate_file("")
        if not any(Path(str(beside)).glob(engine.compiled_files)):
            problem = f"--engine {config.engine} has not been compiled for its torch: {_advise(config.engine)}"
    if problem:
        raise CpuftError(problem)
    for name, value in engine.settings.items():
        os.environ.setdefault(name, value)


def name_packages(engine: str) -> tuple[str, ...]:
    """Return the packages whose versions matter for an engine, its own first; none for `torch`."""
    return tuple(ENGINES[engine].versions) if engine in ENGINES else ()


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_problem(engine: str, versions: Mapping[str, str], machine: str) -> str:
    """Return why an engine cannot train with these versions of its packages ("": missing) on this type of machine (as
    of `uname -m`), and what to do, as one line; "" if it can. Raises KeyError for `torch`.
    """
    needs = ENGINES[engine]
    if needs.machine not in ("", machine):
        return f"--engine {engine} runs on {needs.machine} only, and this host is {machine}: leave --engine out"
    for name, wanted in needs.versions.items():
        if not versions[name].startswith(f"{wanted}."):
            here = f"and here is {versions[name] or 'none'}"
            return f"--engine {engine} needs {name} {wanted}, {here}: {_advise(engine)}"
    return ""


def _advise(engine: str) -> str:
    return f"use the environment that scripts/check-{engine} makes, or leave --engine out"
