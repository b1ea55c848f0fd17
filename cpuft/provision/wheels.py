"""The files from which a training environment is installed: this cpuft, its compiled kernels, and pinned wheels.

`python -m cpuft.provision.wheels own FOLDER` writes this cpuft as a wheel, and `... download 3.11` downloads the rest.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cpuft
from cpuft import execute
from cpuft.argv import module_command
from cpuft.compiler import PACKAGE, TARGETS, Target, compile_kernels, find_compiler, hash_sources, name_library
from cpuft.errors import CPU_INDEX, CpuftError
from cpuft.files import REMOVE, cache_folder, cache_path, check_private_folder, hash_file, hash_text, write_atomically
from cpuft.hosts.registry import refuse_untrusted
from cpuft.plan import Step

EXTRAS = ("train", "mpi", "ccl", "demo")
"""Extras of cpuft that every host gets, because a run may need each of them."""
INSTALL = REMOVE + Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")
"""Shell script that installs the environment on a host, in an image or in a container. `set -eu` must precede it."""
PINS = Path(cpuft.__file__).with_name("constraints.txt")
"""Exact versions of all packages."""
HASHES = Path(cpuft.__file__).with_name("constraints-hashes.txt")
"""The same versions with the hashes of their files, apart from torch."""
BUILT_HERE = ("seqeval",)
"""Packages that the index has only as source. Their wheels are built on this machine, so they have no recorded hash."""
_DOWNLOAD_SECONDS = 3600.0
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""A fixed time, so that wheels with the same contents have the same hash."""
_METADATA_FIELDS = ("Requires-Python", "Provides-Extra", "Requires-Dist")


@dataclass(frozen=True)
class Wheel:
    """A wheel on this machine."""

    path: str
    name: str
    sha256: str
    size: int = 0
    """Bytes."""

    @property
    def pin(self) -> str:
        """name==version, from the file name (PEP 427)."""
        return "==".join(self.name.split("-")[:2])


@dataclass(frozen=True)
class HashedPin:
    """An exact version in `HASHES`."""

    pin: str
    """name==version."""
    marker: str
    """The environments to which it applies (PEP 508). Empty for all."""
    hashes: tuple[str, ...]
    """SHA-256 of each file that an index may have for it."""


@dataclass(frozen=True)
class Supply:
    """What an environment is installed from, as far as it is on this machine."""

    wheels: tuple[Wheel, ...]
    """This cpuft's own wheel comes first."""
    missing: tuple[Step, ...] = ()
    """Steps on this machine that make or download what is missing."""
    complete: bool = True
    """Whether `wheels` has all wheels. Wheels that must be downloaded first are not known."""


def parse_hashes(text: str) -> tuple[HashedPin, ...]:
    """Parse a requirements file of exact versions with hashes, as `pip --require-hashes` reads it."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [line.split("--hash=sha256:") for line in lines if line.strip() and not line.startswith("#")]
    parts = [(requirement.partition(";"), hashes) for requirement, *hashes in found]
    return tuple(
        HashedPin(pin.strip(), marker.strip(), tuple(digest.strip() for digest in hashes))
        for (pin, _, marker), hashes in parts
    )


def parse_pins(text: str, path: str) -> tuple[str, ...]:
    """Parse the file of --pins: one name==version per line, optionally with `--hash=sha256:DIGEST`.

    Raises
    ------
    CpuftError
        A version is not exact, or some versions have hashes and others have none.
    """
    lines = re.sub(r"\\\n", " ", text).split("\n")
    pins = tuple(" ".join(line.split("#")[0].split()) for line in lines if line.split("#")[0].strip())
    for pin in pins:
        if "==" not in pin or not pin[0].isalnum():
            raise CpuftError(f"--pins {path}: {pin!r} is not exact: write name==version")
        if "--hash=" not in pin and any("--hash=" in other for other in pins):
            raise CpuftError(
                f"--pins {path}: {pin!r} has no hash and others have one: pip takes hashes for all or none"
            )
    return pins


def add_own(pins: tuple[str, ...], own: Wheel) -> tuple[str, ...]:
    """Add this cpuft's wheel to the pins of a user, with its hash if the pins have hashes."""
    has_hashes = any("--hash=" in pin for pin in pins)
    return (*pins, f"{own.pin} --hash=sha256:{own.sha256}" if has_hashes else own.pin)


def list_pins(wheels: tuple[Wheel, ...]) -> tuple[str, ...]:
    """Return name==version of every wheel but pip, which only installs the others."""
    return tuple(wheel.pin for wheel in wheels if not wheel.name.startswith("pip-"))


def make_stamp(pins: tuple[str, ...], wheels: tuple[Wheel, ...]) -> str:
    """Return a hash of everything from which an environment is installed. The order of the arguments has no effect."""
    text = "\n".join([*sorted(pins), *sorted(wheel.sha256 for wheel in wheels)])
    return hash_text(text, 32)


def gather_supply(own: Path, folder: str, python: str, environ: Mapping[str, str]) -> Supply:
    """Find out which wheels are on this machine. This changes nothing.

    Parameters
    ----------
    own
        Folder for the wheel of this cpuft.
    folder
        Folder of all other wheels, given by the user. Empty for the wheels that cpuft downloads.
    python
        Version of Python on the hosts ("3.11"). If this and `folder` are empty, only this cpuft's wheel is supplied.

    Raises
    ------
    CpuftError
        `folder` holds no wheels, other users may write to it, or a wheel differs from the recorded file.
    """
    name, content = make_own_wheel()
    digest = hashlib.sha256(content).hexdigest()
    wheels = [Wheel(str(own / name), name, digest, len(content))]
    missing = [] if (own / name).exists() and hash_file(own / name) == digest else [plan_own_wheel(own)]
    is_given = bool(folder)
    if python and not folder:
        folder = str(downloads_folder(python, environ))
        if not Path(folder).exists():
            command = (*module_command(sys.executable, "cpuft.provision.wheels"), "download", python)
            missing.append(Step(f"download wheels for Python {python} into {folder}", command))
            return Supply(tuple(wheels), tuple(missing), complete=False)
        check_private_folder(cache_path(environ))
    if folder:
        found = [path for path in Path(folder).glob("*.whl") if not path.name.startswith("cpuft-")]
        if not found:
            raise CpuftError(f"--wheels {folder} holds no wheels: leave it out, and they are downloaded")
        others = [_read_wheel(path, path.stat().st_mtime_ns) for path in sorted(found)]
        if is_given:
            for path in (Path(folder), *sorted(found)):
                refuse_untrusted(path, ("change what runs on all hosts", "give --wheels a folder of your own"))
            refuse_unknown_files(folder, others, parse_hashes(HASHES.read_text(encoding="utf-8")))
        wheels += others
    return Supply(tuple(wheels), tuple(missing))


@cache
def _read_wheel(path: Path, modified: int) -> Wheel:
    """Read and hash a wheel. `modified` is its time of change: the cached result of an older file is not used."""
    return Wheel(str(path), path.name, hash_file(path), path.stat().st_size)


def refuse_unknown_files(folder: str, wheels: Sequence[Wheel], hashed: Sequence[HashedPin]) -> None:
    """Raise CpuftError if a wheel has a name and version of `hashed`, but is none of the files recorded there."""

    def normalise(pin: str) -> str:
        name, _, version = pin.partition("==")
        return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"  # PEP 503

    known: dict[str, set[str]] = {}
    for one in hashed:
        known.setdefault(normalise(one.pin), set()).update(one.hashes)
    for wheel in wheels:
        wanted = known.get(normalise(wheel.pin))
        if wanted and wheel.sha256 not in wanted and wheel.pin.partition("==")[0] not in BUILT_HERE:
            raise CpuftError(
                f"--wheels {folder}: the SHA-256 of {wheel.name} is {wheel.sha256}, which is not recorded for "
                f"{wheel.pin} in {HASHES.name}: download it again, or leave --wheels out"
            )


def downloads_folder(python: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of downloaded wheels for a version of Python. Its name has a hash of what decides on them."""
    # Of cpuft itself only the requirements and the kernels count here, because its other code changes often.
    requirements = "\n".join(sorted(importlib.metadata.requires("cpuft") or []))
    pins, hashes = PINS.read_text(encoding="utf-8"), HASHES.read_text(encoding="utf-8")
    kernels = hash_sources() if find_compiler(environ) else ""
    text = f"{python}\n{platform.machine()}\n{pins}\n{hashes}\n{requirements}\n{EXTRAS}\n{kernels}"
    return cache_path(environ) / "wheels" / f"{python}-{hash_text(text, 12)}"


def download_wheels(python: str, environ: Mapping[str, str]) -> None:
    """Download all wheels for hosts with this version of Python, unless they are here.

    Raises
    ------
    CpuftError
        pip failed. The message has its last lines.
    """
    cache_folder(environ)
    folder = downloads_folder(python, environ)
    if folder.exists():
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    target = () if python == ".".join(platform.python_version_tuple()[:2]) else ("--python-version", python)
    hashed = select_hashed(parse_hashes(HASHES.read_text(encoding="utf-8")), python)
    sources = [one for one in hashed if one.pin.partition("==")[0] in BUILT_HERE]
    built, fetched = beside / "built.txt", beside / "fetched.txt"
    built.write_text(format_requirements(sources), encoding="utf-8")
    fetched.write_text(format_requirements([one for one in hashed if one not in sources]), encoding="utf-8")
    _pip("wheel", "--quiet", "--no-deps", "--require-hashes", "--wheel-dir", str(beside), "-r", str(built))
    download = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(beside), *target)
    _pip(*download, "--require-hashes", "-r", str(fetched))
    _pip(*download, *_choose_torch())
    for path in (built, fetched):
        path.unlink()
    _add_kernels(beside, environ)
    beside.rename(folder)


def select_hashed(hashed: Sequence[HashedPin], python: str) -> list[HashedPin]:
    """Return the versions that a host with this machine's CPU architecture and Python `python` ("3.11") installs."""
    try:
        markers: Any = importlib.import_module("packaging.markers")
    except ImportError:
        markers = importlib.import_module("pip._vendor.packaging.markers")
    values = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    return [one for one in hashed if not one.marker or markers.Marker(one.marker).evaluate(values)]


def format_requirements(hashed: Sequence[HashedPin]) -> str:
    """Return the text of a requirements file for `pip --require-hashes`."""
    return "".join(" ".join((one.pin, *(f"--hash=sha256:{text}" for text in one.hashes))) + "\n" for one in hashed)


def _choose_torch() -> tuple[str, ...]:
    """Return pip's arguments for the torch in `PINS` without CUDA.

    On x86-64 it comes from PyTorch's own index alone, unless the index that pip is configured for has such a build.
    """
    pin = next(line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    if platform.machine() != "x86_64":
        return (pin,)
    report = _pip("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", pin)
    found, _ = json.JSONDecoder().raw_decode(report[report.index("{") :])  # pip's warnings may follow
    if found["install"][0]["metadata"]["version"].endswith("+cpu"):
        return (pin,)
    return (f"{pin}+cpu", "--index-url", CPU_INDEX)


def _pip(*argv: str) -> str:
    """Run pip and return its output. Raise CpuftError if it fails."""
    command = (*module_command(sys.executable, "pip"), "--disable-pip-version-check", *argv)
    answer = execute.run_command(command, _DOWNLOAD_SECONDS)
    if answer.exit_code:
        last_lines = " | ".join(answer.text.strip().splitlines()[-4:])
        raise CpuftError(f"pip {argv[0]} failed ({last_lines}): give --wheels a folder that holds the wheels")
    return answer.output


def _add_kernels(folder: Path, environ: Mapping[str, str]) -> None:
    """Write the wheel of compiled kernels, or print on standard error why the hosts get none."""
    compiler = find_compiler(environ)
    try:
        if compiler is None:
            raise CpuftError("this machine has no C++ compiler (Debian: apt-get install g++)")
        write_kernels_wheel(compiler, folder)
    except CpuftError as error:
        slow = "hosts without a C++ compiler will train 2 to 3 times slower"
        print(f"no compiled kernels are sent to the hosts, because {error}; {slow}", file=sys.stderr)


def write_kernels_wheel(compiler: str, folder: Path, targets: Sequence[Target] = TARGETS) -> Path:
    """Compile the kernels for several kinds of CPU, and write them as one wheel.

    A target whose options this compiler does not know is left out.

    Parameters
    ----------
    compiler
        Path of a C++ compiler on this machine.
    folder
        Where the wheel is written; it is made if it does not exist.

    Returns
    -------
    Path
        The wheel: `cpuft_kernels-VERSION-py3-none-linux_x86_64.whl`.

    Raises
    ------
    CpuftError
        This machine is not x86-64, or the compiler could compile the kernels for none of the targets.
    """
    if platform.machine() != "x86_64":
        raise CpuftError(f"kernels are compiled in advance for x86-64 only, and this machine is {platform.machine()}")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=len(targets)) as pool:
        made = list(pool.map(lambda target: _compile(compiler, target, folder), targets))
    libraries = {name_library(target): found for target, found in zip(targets, made) if isinstance(found, bytes)}
    if not libraries:
        raise CpuftError(str(made[0]))
    files = {f"{PACKAGE}/{name}": content for name, content in libraries.items()}
    name, content = _make_wheel(PACKAGE, "py3-none-linux_x86_64", files)
    with write_atomically(folder / name) as beside:
        beside.write_bytes(content)
    return folder / name


def _compile(compiler: str, target: Target, folder: Path) -> bytes | CpuftError:
    """Return the library for one target, or why the compiler could not make it."""
    library = folder / f".{name_library(target)}"
    try:
        compile_kernels(compiler, target.options, library)
        return library.read_bytes()
    except CpuftError as error:
        return error
    finally:
        library.unlink(missing_ok=True)


@cache
def make_own_wheel() -> tuple[str, bytes]:
    """Return the name and the contents of a wheel of this cpuft, so that hosts get the version that provisions them.

    The contents do not depend on when or where the wheel is made.

    Raises
    ------
    CpuftError
        This cpuft is a checkout that is not installed, so its requirements are not known.
    """
    root = Path(cpuft.__file__).parent
    paths = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {f"cpuft/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}
    # oneCCL's shim is the only compiled file, and is called by C names: any Python 3 of this architecture loads it.
    has_library = any(name.endswith(".so") for name in files)
    tag = f"py3-none-{'linux_' + platform.machine() if has_library else 'any'}"
    entry_points = {"entry_points.txt": "[console_scripts]\ncpuft = cpuft.cli:main\n"}
    return _make_wheel("cpuft", tag, files, _read_requirements(), entry_points)


def write_own_wheel(folder: Path) -> Path:
    """Write this cpuft as a wheel into `folder`; return its path."""
    name, content = make_own_wheel()
    with write_atomically(folder / name) as beside:
        beside.write_bytes(content)
    return folder / name


def plan_own_wheel(folder: Path) -> Step:
    """Return the step that writes this cpuft as a wheel into `folder`."""
    command = (*module_command(sys.executable, "cpuft.provision.wheels"), "own", str(folder))
    return Step("write this cpuft as a wheel", command)


def _read_requirements() -> str:
    """Return the metadata lines with the requirements and extras of the installed cpuft; setup.cfg is their source."""
    try:
        known = importlib.metadata.metadata("cpuft")
    except importlib.metadata.PackageNotFoundError:
        raise CpuftError("this cpuft is not installed, so its requirements are unknown: run scripts/install") from None
    return "".join(f"{name}: {value}\n" for name in _METADATA_FIELDS for value in known.get_all(name) or [])


def _make_wheel(
    package: str, tag: str, files: dict[str, bytes], metadata: str = "", more_info: Mapping[str, str] = {}
) -> tuple[str, bytes]:
    """Return the name and contents of a wheel (PEP 427) in the version of this cpuft.

    Parameters
    ----------
    metadata
        Lines for METADATA besides name and version.
    more_info
        Texts of further files in its .dist-info folder, by name.
    """
    info = f"{package}-{cpuft.__version__}.dist-info"
    is_pure = "true" if tag.endswith("-any") else "false"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {cpuft.__version__}\n{metadata}",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: cpuft\nRoot-Is-Purelib: {is_pure}\nTag: {tag}\n",
        **more_info,
    }
    contents = files | {f"{info}/{name}": text.encode() for name, text in texts.items()}
    contents[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*contents, f"{info}/RECORD"]).encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), content)
    return f"{package}-{cpuft.__version__}-{tag}.whl", written.getvalue()


if __name__ == "__main__":
    try:
        if sys.argv[1] == "own":
            write_own_wheel(Path(sys.argv[2]))
        else:
            download_wheels(sys.argv[2], os.environ)
    except CpuftError as failure:
        sys.exit(str(failure))
