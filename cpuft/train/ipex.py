"""`--engine ipex`: Intel's extension for PyTorch (IPEX) in place of our fast path, in an environment of its own.

IPEX is archived; its last version runs with one torch only, and on any other its import dies with an AttributeError.
So it is looked for among the installed versions, and imported only where they fit.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig

if TYPE_CHECKING:
    import torch

PACKAGE = "intel_extension_for_pytorch"
VERSION = "2.8"
"""Major and minor version of the last IPEX, and of the torch that it runs with (its `__init__` compares them)."""
_ELSEWHERE = "use the environment that scripts/check-ipex makes, or leave --engine out"


def check_engine(config: TrainConfig) -> None:
    """Raises CpuftError when the engine asked for cannot run in this environment, or with these options."""
    if config.engine == "ipex":
        versions = {name: _installed_version(name) for name in (PACKAGE, "torch")}
        if problem := find_problem(config, versions, platform.machine()):
            raise CpuftError(problem)


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_problem(config: TrainConfig, versions: Mapping[str, str], machine: str) -> str:
    """Why IPEX cannot train here, with the next move; empty when it can.

    Parameters
    ----------
    versions: installed version of IPEX and of torch, by package; empty for one that is absent.
    machine: as `uname -m` says it.
    """
    if machine != "x86_64":
        return f"--engine ipex runs on x86_64 only, and this host is {machine}: leave --engine out"
    for name, version in versions.items():
        if not version.startswith(f"{VERSION}."):
            return f"--engine ipex needs {name} {VERSION}, and here is {version or 'none'}: {_ELSEWHERE}"
    if config.plain or config.compile:
        return "--engine ipex excludes --plain and --compile: leave either it or them out"
    if config.sync_every > 1:
        return "--sync-every cannot average the fp32 weights that IPEX keeps to itself: leave it or --engine out"
    return ""


def optimize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> None:
    """Put IPEX's layers into a model, and its fp32 master weights into the optimizer, in place.

    To be called before DistributedDataParallel counts the parameters. `state_dict` stays fp32, under the same names.
    """
    import intel_extension_for_pytorch as ipex
    import torch

    from cpuft.train.fast.allocator import keep_freed_memory

    # It warns of its own defaults, and torch of its layer norm, whose gradients are right nevertheless.
    logging.getLogger("IPEX").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "aten::layer_norm: an autograd kernel was not registered")
    # IPEX's own launcher preloads an allocator to the same end.
    keep_freed_memory()
    model.train()
    ipex.optimize(model, dtype=torch.bfloat16 if precision == "bf16" else None, optimizer=optimizer, inplace=True)
