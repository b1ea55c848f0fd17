"""Files that a training environment is installed from: this cpuft, and wheels that are downloaded once or given."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cpuft
from cpuft.compiler import find_compiler, hash_sources
from cpuft.errors import CpuftError
from cpuft.files import REMOVE, cache_path, check_private, hash_file, hash_text
from cpuft.plan import Step
from cpuft.provision.own_wheel import make_own_wheel
from cpuft.words import own_module

EXTRAS = ("train", "mpi", "ccl", "demo")
"""Parts of cpuft that every host gets: a run may ask for each of them."""

INSTALL = REMOVE + Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")
"""The shell script, after `set -eu`, that makes the environment on a host, in an image or in a container."""
PINS = Path(cpuft.__file__).with_name("constraints.txt")


@dataclass(frozen=True)
class Wheel:
    """A file to be installed from."""

    path: str
    name: str
    sha256: str
    size: int = 0
    """Bytes."""

    @property
    def pin(self) -> str:
        """name==version, from the file name as PEP 427 has it."""
        return "==".join(self.name.split("-")[:2])


def make_stamp(pins: tuple[str, ...], wheels: tuple[Wheel, ...]) -> str:
    """A fingerprint of all that an environment is made from."""
    text = "\n".join([*sorted(pins), *sorted(wheel.sha256 for wheel in wheels)])
    return hash_text(text, 32)


def list_pins(wheels: tuple[Wheel, ...]) -> tuple[str, ...]:
    """name==version of every wheel; pip only installs the others."""
    return tuple(wheel.pin for wheel in wheels if not wheel.name.startswith("pip-"))


@dataclass(frozen=True)
class Supply:
    """What an environment is installed from, as far as it is here."""

    wheels: tuple[Wheel, ...]
    """This cpuft's own first."""
    missing: tuple[Step, ...] = ()
    """What must be made or downloaded here before."""
    complete: bool = True
    """Whether all wheels are known: those to be downloaded are not."""


def gather_supply(own: Path, folder: str, python: str, environ: Mapping[str, str]) -> Supply:
    """This cpuft, as a wheel in folder `own`, and the wheels of `folder`. Looks only. Raises CpuftError for none there.

    Without `folder` it is all that hosts of Python `python` ("3.11") install, downloaded; without both, nothing more.
    """
    name, content = make_own_wheel()
    digest = hashlib.sha256(content).hexdigest()
    wheels = [Wheel(str(own / name), name, digest, len(content))]
    missing = [] if (own / name).exists() and hash_file(own / name) == digest else [plan_own_wheel(own)]
    if python and not folder:
        folder = str(downloads_folder(python, environ))
        if not Path(folder).exists():
            command = (*own_module(sys.executable, "cpuft.provision.fetch"), python)
            missing.append(Step(f"download wheels for Python {python} into {folder}", command))
            return Supply(tuple(wheels), tuple(missing), complete=False)
        check_private(cache_path(environ))
    if folder:
        found = [path for path in Path(folder).glob("*.whl") if not path.name.startswith("cpuft-")]
        if not found:
            raise CpuftError(f"--wheels {folder} holds no wheels: leave it out, and they are downloaded")
        wheels += (_read_wheel(path, path.stat().st_mtime_ns) for path in sorted(found))
    return Supply(tuple(wheels), tuple(missing))


@cache
def _read_wheel(path: Path, time: int) -> Wheel:
    """Hashed once, as long as it is not changed."""
    return Wheel(str(path), path.name, hash_file(path), path.stat().st_size)


def plan_own_wheel(folder: Path) -> Step:
    """Write this cpuft as a wheel."""
    return Step("write this cpuft as a wheel", (*own_module(sys.executable, "cpuft.provision.own_wheel"), str(folder)))


def downloads_folder(python: str, environ: Mapping[str, str]) -> Path:
    """Where wheels for Python `python` are kept, by all that decides which they are."""
    # Of cpuft only the requirements and the kernels count here: its other code changes from day to day.
    needs = "\n".join(sorted(importlib.metadata.requires("cpuft") or []))
    kernels = hash_sources() if find_compiler(environ) else ""
    text = f"{python}\n{platform.machine()}\n{PINS.read_text(encoding='utf-8')}\n{needs}\n{EXTRAS}\n{kernels}"
    return cache_path(environ) / "wheels" / f"{python}-{hash_text(text, 12)}"
