"""Files that a training environment is installed from: this cpuft, and wheels that are downloaded once or given."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cpuft
from cpuft.compiler import find_compiler, hash_sources
from cpuft.errors import CpuftError
from cpuft.files import REMOVE, cache_path, check_private, hash_file, hash_text
from cpuft.hosts.registry import refuse_untrusted
from cpuft.plan import Step
from cpuft.provision.own_wheel import make_own_wheel
from cpuft.words import own_module

EXTRAS = ("train", "mpi", "ccl", "demo")
"""Parts of cpuft that every host gets: a run may ask for each of them."""

INSTALL = REMOVE + Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")
"""The shell script, after `set -eu`, that makes the environment on a host, in an image or in a container."""
PINS = Path(cpuft.__file__).with_name("constraints.txt")
HASHES = Path(cpuft.__file__).with_name("constraints-hashes.txt")
BUILT_HERE = ("seqeval",)
"""Packages that the index has as source only: their wheels are built here, so no recorded hash is theirs."""


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


@dataclass(frozen=True)
class Hashed:
    """An exact version of HASHES."""

    pin: str
    """name==version."""
    marker: str
    """The environments that it is for, as PEP 508 has it; empty for all."""
    hashes: tuple[str, ...]
    """SHA-256 of each file that an index may send for it."""


def parse_hashes(text: str) -> tuple[Hashed, ...]:
    """Parse a requirements file of exact versions with hashes, as `pip --require-hashes` takes it."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [line.split("--hash=sha256:") for line in lines if line.strip() and not line.startswith("#")]
    parts = [(requirement.partition(";"), hashes) for requirement, *hashes in found]
    return tuple(
        Hashed(pin.strip(), marker.strip(), tuple(digest.strip() for digest in hashes))
        for (pin, _, marker), hashes in parts
    )


def parse_pins(text: str, path: str) -> tuple[str, ...]:
    """Parse the file of --pins: name==version on each line, and its hashes as `--hash=sha256:DIGEST` if it has any.

    Raises CpuftError: a version is not exact, or some versions have hashes and others have none.
    """
    joined = re.sub(r"\\\n", " ", text).split("\n")
    pins = tuple(" ".join(line.split("#")[0].split()) for line in joined if line.split("#")[0].strip())
    for pin in pins:
        if "==" not in pin or not pin[0].isalnum():
            raise CpuftError(f"--pins {path}: {pin!r} is not exact: write name==version")
        if "--hash=" not in pin and any("--hash=" in other for other in pins):
            raise CpuftError(
                f"--pins {path}: {pin!r} has no hash and others have one: pip takes hashes for all or none"
            )
    return pins


def add_own(pins: tuple[str, ...], own: Wheel) -> tuple[str, ...]:
    """Add this cpuft to the pins of a user, with its hash if they have hashes."""
    has_hashes = any("--hash=" in pin for pin in pins)
    return (*pins, f"{own.pin} --hash=sha256:{own.sha256}" if has_hashes else own.pin)


def _normalise(pin: str) -> str:
    """Return name==version with the name in the one spelling that PEP 503 has for it."""
    name, _, version = pin.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def refuse_unknown_files(folder: str, wheels: Sequence[Wheel], hashed: Sequence[Hashed]) -> None:
    """Raises CpuftError: a wheel in `folder` has a name and version of `hashed`, and is none of the files recorded."""
    known: dict[str, set[str]] = {}
    for one in hashed:
        known.setdefault(_normalise(one.pin), set()).update(one.hashes)
    for wheel in wheels:
        wanted = known.get(_normalise(wheel.pin))
        if wanted and wheel.sha256 not in wanted and wheel.pin.partition("==")[0] not in BUILT_HERE:
            raise CpuftError(
                f"--wheels {folder}: the SHA-256 of {wheel.name} is {wheel.sha256}, which is not recorded for "
                f"{wheel.pin} in {HASHES.name}: download it again, or leave --wheels out"
            )


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
    is_given = bool(folder)
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
        given = [_read_wheel(path, path.stat().st_mtime_ns) for path in sorted(found)]
        if is_given:
            for path in (Path(folder), *sorted(found)):
                refuse_untrusted(path, ("change what runs on all hosts", "give --wheels a folder of your own"))
            refuse_unknown_files(folder, given, parse_hashes(HASHES.read_text(encoding="utf-8")))
        wheels += given
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
    hashes = HASHES.read_text(encoding="utf-8")
    kernels = hash_sources() if find_compiler(environ) else ""
    text = f"{python}\n{platform.machine()}\n{PINS.read_text(encoding='utf-8')}\n{hashes}\n{needs}\n{EXTRAS}\n{kernels}"
    return cache_path(environ) / "wheels" / f"{python}-{hash_text(text, 12)}"
