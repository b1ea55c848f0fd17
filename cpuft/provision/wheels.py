"""Files that a training environment is installed from: downloaded once by exact pins, or given by the user."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import cpuft
from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.files import REMOVE, cache_folder, hash_file
from cpuft.provision.own_wheel import write_own_wheel
from cpuft.words import own_module

EXTRAS = ("train", "mpi", "ccl", "demo")
"""Parts of cpuft that every host gets: a run may ask for each of them."""

INSTALL = REMOVE + Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")
"""The shell script, after `set -eu`, that makes the environment on a host, in an image or in a container."""
_PINS = Path(cpuft.__file__).with_name("constraints.txt")
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_DOWNLOAD_SECONDS = 3600.0


@dataclass(frozen=True)
class Wheel:
    """A file to be installed from."""

    path: str
    name: str
    sha256: str

    @property
    def pin(self) -> str:
        """name==version, from the file name as PEP 427 has it."""
        return "==".join(self.name.split("-")[:2])


def make_stamp(pins: tuple[str, ...], wheels: tuple[Wheel, ...]) -> str:
    """A fingerprint of all that an environment is made from."""
    text = "\n".join([*sorted(pins), *sorted(wheel.sha256 for wheel in wheels)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def list_pins(wheels: tuple[Wheel, ...]) -> tuple[str, ...]:
    """name==version of every wheel; pip only installs the others."""
    return tuple(wheel.pin for wheel in wheels if not wheel.name.startswith("pip-"))


def read_wheels(own_folder: Path, folder: Path | None) -> tuple[Wheel, ...]:
    """This cpuft, written into `own_folder`, then all wheels of `folder`.

    Raises
    ------
    CpuftError: `folder` holds none.
    """
    found = sorted(path for path in folder.glob("*.whl") if not path.name.startswith("cpuft-")) if folder else []
    if folder and not found:
        raise CpuftError(f"--wheels {folder} holds no wheels: leave it out, and they are downloaded")
    return tuple(Wheel(str(path), path.name, hash_file(path)) for path in [write_own_wheel(own_folder), *found])


def fetch_wheels(python: str, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Folder with the wheels of all that hosts of Python `python` ("3.11") install; downloaded unless it is there.

    Raises
    ------
    CpuftError: pip could not download them, with what it said.
    """
    own = write_own_wheel(own_folder(environ))
    # Of cpuft only the requirements count here: its code changes from day to day, what it needs does not.
    needs = "\n".join(sorted(_requirements()))
    text = f"{python}\n{platform.machine()}\n{_PINS.read_text(encoding='utf-8')}\n{needs}\n{EXTRAS}"
    folder = own_folder(environ).parent / f"{python}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    say(f"download wheels for Python {python} into {folder}")
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    shutil.rmtree(beside, ignore_errors=True)
    target = () if python == _own_python() else ("--python-version", python)
    words = [*target, "--only-binary", ":all:", *_find_constraints(beside), "pip", f"{own}[{','.join(EXTRAS)}]"]
    _pip("download", "--quiet", "--dest", str(beside), *words)
    (beside / own.name).unlink(missing_ok=True)
    beside.rename(folder)
    return folder


def own_folder(environ: Mapping[str, str]) -> Path:
    """Where this cpuft's own wheel is kept."""
    return cache_folder(environ) / "wheels" / "own"


def _own_python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _requirements() -> list[str]:
    import importlib.metadata

    return importlib.metadata.requires("cpuft") or []


def _find_constraints(folder: Path) -> tuple[str, ...]:
    """The pins; on x86-64, where pip sees no CPU build of torch, PyTorch's own index too: others bring CUDA."""
    folder.mkdir(parents=True)
    words = ("--ignore-installed", "--no-deps", "--quiet", "--report", "-", "-c", str(_PINS), "torch")
    report = _pip("install", "--dry-run", *words)
    found, _ = json.JSONDecoder().raw_decode(report[report.index("{") :])  # pip's warnings may follow
    version = found["install"][0]["metadata"]["version"]
    if platform.machine() != "x86_64" or version.endswith("+cpu"):
        return ("-c", str(_PINS))
    pins = folder / "constraints.txt"
    lines = _PINS.read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(f"{line}+cpu" if line.startswith("torch==") else line for line in lines) + "\n")
    return ("-c", str(pins), "--extra-index-url", _CPU_INDEX)


def _pip(*words: str) -> str:
    command = (*own_module(sys.executable, "pip"), "--disable-pip-version-check", *words)
    answer = execute.run_quietly(command, _DOWNLOAD_SECONDS)
    if answer.exit_code:
        said = " | ".join(answer.said.strip().splitlines()[-4:])
        raise CpuftError(f"pip {words[0]} failed ({said}): give --wheels, a folder that holds them")
    return answer.output
