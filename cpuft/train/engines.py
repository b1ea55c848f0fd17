"""`--engine`: what others train with in place of our fast path, each where it is installed in the version that fits.

Versions decide, and nothing is imported where they do not fit: IPEX's import dies with an AttributeError, and not an
ImportError, on any torch but its own.
"""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError

if TYPE_CHECKING:
    import torch

IPEX = "intel_extension_for_pytorch"
ORT = "onnxruntime-training-cpu"


@dataclass(frozen=True)
class Engine:
    """What an engine needs."""

    versions: Mapping[str, str]
    """Package -> the major and minor version that it must have."""
    elsewhere: str
    """What to do where these are not."""
    machine: str = ""
    """As `uname -m` says it; empty for any."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables that it reads when it is imported, which transformers does, too."""
    compiled: str = ""
    """Pattern of files beside its first package, of which one is there once it was compiled for that torch."""


ENGINES = {
    "ipex": Engine({IPEX: "2.8", "torch": "2.8"}, "use the environment that scripts/check-ipex makes", "x86_64"),
    "deepspeed": Engine(
        {"deepspeed": "0.19"},
        "use the environment that scripts/check-deepspeed makes",
        settings={"DS_ACCELERATOR": "cpu"},
    ),
    # Else it trains with torch wherever it fails, and only warns.
    "ort": Engine(
        {ORT: "1.19", "torch": "2.3"},
        "use the environment that scripts/check-ort makes",
        "x86_64",
        {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"},
        "onnxruntime/training/ortmodule/torch_cpp_extensions/aten_op_executor*.so",
    ),
}


def check_engine(config: TrainConfig) -> None:
    """Set what the engine asked for reads. Raises CpuftError when it cannot run in this environment."""
    versions = {name: _installed_version(name) for name in name_packages(config.engine)}
    if problem := find_problem(config.engine, versions, platform.machine(), _is_compiled(config.engine)):
        raise CpuftError(problem)
    for name, value in ENGINES[config.engine].settings.items() if config.engine in ENGINES else ():
        os.environ.setdefault(name, value)


def name_packages(engine: str) -> tuple[str, ...]:
    """What an engine is made of."""
    return tuple(ENGINES[engine].versions) if engine in ENGINES else ()


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_compiled(engine: str) -> bool:
    if engine not in ENGINES or not ENGINES[engine].compiled:
        return True
    try:
        beside = importlib.metadata.distribution(name_packages(engine)[0]).locate_file("")
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(Path(str(beside)).glob(ENGINES[engine].compiled))


def find_problem(engine: str, versions: Mapping[str, str], machine: str, compiled: bool = True) -> str:
    """Why an engine cannot train here, with the next move; empty when it can.

    Parameters
    ----------
    versions: installed version of what it needs, by package; empty for one that is absent.
    machine: as `uname -m` says it.
    compiled: whether there is what it compiles for its torch, if it does.
    """
    if engine not in ENGINES:
        return ""
    needs = ENGINES[engine]
    if needs.machine not in ("", machine):
        return f"--engine {engine} runs on {needs.machine} only, and this host is {machine}: leave --engine out"
    for name, wanted in needs.versions.items():
        if not versions[name].startswith(f"{wanted}."):
            here = f"and here is {versions[name] or 'none'}"
            return f"--engine {engine} needs {name} {wanted}, {here}: {needs.elsewhere}, or leave --engine out"
    if not compiled:
        return f"--engine {engine} has not been compiled for its torch: {needs.elsewhere}, or leave --engine out"
    return ""


def optimize_by_ipex(model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> None:
    """Put the layers of IPEX, Intel's archived extension for PyTorch, into a model, and its fp32 master weights into
    the optimizer, in place.

    To be called before DistributedDataParallel counts the parameters. `state_dict` stays fp32, under the same names.
    """
    import intel_extension_for_pytorch as ipex
    import torch

    from cpuft.train.fast.acceleration import keep_freed_memory

    # It warns of its own defaults, and torch of its layer norm, whose gradients are right nevertheless.
    logging.getLogger("IPEX").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "aten::layer_norm: an autograd kernel was not registered")
    # IPEX's own launcher preloads an allocator to the same end.
    keep_freed_memory()
    model.train()
    ipex.optimize(model, dtype=torch.bfloat16 if precision == "bf16" else None, optimizer=optimizer, inplace=True)


def optimize_by_ort(model: Any) -> None:
    """Make a model's passes graphs of ONNX Runtime (ORTModule, last of 2024), in fp32 and in place: exported in the
    first pass of training and of evaluation.

    Parameters and what is kept of the model stay its own. To be called before DistributedDataParallel gets it.
    """
    import onnxruntime
    import torch
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        """Of a graph, with as many threads as torch has here: by default each rank's are pinned to all of its host."""

        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = torch.get_num_threads()

    # ORTModule makes its own, and has no argument for them.
    onnxruntime.SessionOptions = Options
    graphs = ORTModule(copy.copy(model.train()), DebugOptions(log_level=LogLevel.ERROR))
    model.forward = graphs.forward
