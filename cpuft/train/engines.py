"""`--engine`: what others train with in place of our fast path, each where it is installed in the version that fits.

Versions decide, and nothing is imported where they do not fit: IPEX's import dies with an AttributeError, and not an
ImportError, on any torch but its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig

IPEX = "intel_extension_for_pytorch"


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


ENGINES = {
    "ipex": Engine({IPEX: "2.8", "torch": "2.8"}, "use the environment that scripts/check-ipex makes", "x86_64"),
    "deepspeed": Engine(
        {"deepspeed": "0.19"}, "pip install --no-build-isolation 'cpuft[deepspeed]'", settings={"DS_ACCELERATOR": "cpu"}
    ),
}


def check_engine(config: TrainConfig) -> None:
    """Set what the engine asked for reads. Raises CpuftError when it cannot run in this environment."""
    versions = {name: _installed_version(name) for name in name_packages(config.engine)}
    if problem := find_problem(config.engine, versions, platform.machine()):
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


def find_problem(engine: str, versions: Mapping[str, str], machine: str) -> str:
    """Why an engine cannot train here, with the next move; empty when it can.

    Parameters
    ----------
    versions: installed version of what it needs, by package; empty for one that is absent.
    machine: as `uname -m` says it.
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
    return ""
