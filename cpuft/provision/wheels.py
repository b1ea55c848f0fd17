"""The files that a training environment is installed from: this cpuft, its compiled kernels, and pinned wheels."""

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
from cpuft.compiler import PACKAGE, TARGETS, Target, compile_kernels, find_compiler, hash_sources, name_library
from cpuft.errors import CPU_INDEX, CpuftError
from cpuft.files import REMOVE, cache_folder, cache_path, check_private, hash_file, hash_text, written_beside
from cpuft.hosts.registry import refuse_untrusted
from cpuft.plan import Step
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
            command = (*own_module(sys.executable, "cpuft.provision.wheels"), "download", python)
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
    command = (*own_module(sys.executable, "cpuft.provision.wheels"), "own", str(folder))
    return Step("write this cpuft as a wheel", command)


def downloads_folder(python: str, environ: Mapping[str, str]) -> Path:
    """Where wheels for Python `python` are kept, by all that decides which they are."""
    # Of cpuft only the requirements and the kernels count here: its other code changes from day to day.
    needs = "\n".join(sorted(importlib.metadata.requires("cpuft") or []))
    hashes = HASHES.read_text(encoding="utf-8")
    kernels = hash_sources() if find_compiler(environ) else ""
    text = f"{python}\n{platform.machine()}\n{PINS.read_text(encoding='utf-8')}\n{hashes}\n{needs}\n{EXTRAS}\n{kernels}"
    return cache_path(environ) / "wheels" / f"{python}-{hash_text(text, 12)}"


_TIME = (1980, 1, 1, 0, 0, 0)
"""The same contents give the same file, and so the same checksum."""
_FIELDS = ("Requires-Python", "Provides-Extra", "Requires-Dist")


@cache
def make_own_wheel() -> tuple[str, bytes]:
    """The wheel's name and contents. Nothing of it depends on when or where it is made.

    Raises CpuftError: this cpuft is a bare checkout, whose requirements nothing tells.
    """
    root = Path(cpuft.__file__).parent
    info = f"cpuft-{cpuft.__version__}.dist-info"
    paths = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {f"cpuft/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}
    # oneCCL's shim is the only compiled file, and called by its C names: any Python 3 of this machine's kind loads it.
    compiled = any(name.endswith(".so") for name in files)
    tag = f"py3-none-{'linux_' + platform.machine() if compiled else 'any'}"
    files[f"{info}/METADATA"] = _format_metadata().encode()
    purity = "false" if compiled else "true"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: cpuft\nRoot-Is-Purelib: {purity}\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\ncpuft = cpuft.cli:main\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), content)
    return f"cpuft-{cpuft.__version__}-{tag}.whl", written.getvalue()


def write_own_wheel(folder: Path) -> Path:
    """Write the wheel into `folder`; its path."""
    name, content = make_own_wheel()
    with written_beside(folder / name) as beside:
        beside.write_bytes(content)
    return folder / name


def _format_metadata() -> str:
    """What the installed cpuft says of its requirements, extras among them: setup.cfg is their only source."""
    try:
        known = importlib.metadata.metadata("cpuft")
    except importlib.metadata.PackageNotFoundError:
        raise CpuftError("this cpuft is not installed, so its requirements are unknown: run scripts/install") from None
    fields = [f"{name}: {value}\n" for name in _FIELDS for value in known.get_all(name) or []]
    return f"Metadata-Version: 2.1\nName: cpuft\nVersion: {cpuft.__version__}\n" + "".join(fields)


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
        This machine is no x86-64, or the compiler could compile the kernels for none of the targets.
    """
    if platform.machine() != "x86_64":
        raise CpuftError(f"kernels are compiled in advance for x86-64 only, and this machine is {platform.machine()}")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=len(targets)) as pool:
        made = list(pool.map(lambda target: _compile_target(compiler, target, folder), targets))
    libraries = {name_library(target): found for target, found in zip(targets, made) if isinstance(found, bytes)}
    if not libraries:
        raise CpuftError(str(made[0]))
    info = f"{PACKAGE}-{cpuft.__version__}.dist-info"
    tag = "py3-none-linux_x86_64"
    files = {f"{PACKAGE}/{name}": content for name, content in libraries.items()}
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {cpuft.__version__}\n"
    files[f"{info}/METADATA"] = metadata.encode()
    wheel = f"Wheel-Version: 1.0\nGenerator: cpuft\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{info}/WHEEL"] = wheel.encode()
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), content)
    path = folder / f"{PACKAGE}-{cpuft.__version__}-{tag}.whl"
    with written_beside(path) as beside:
        beside.write_bytes(written.getvalue())
    return path


def _compile_target(compiler: str, target: Target, folder: Path) -> bytes | CpuftError:
    """Return the library for one target, or why the compiler could not make it."""
    library = folder / f".{name_library(target)}"
    try:
        compile_kernels(compiler, target.options, library)
        return library.read_bytes()
    except CpuftError as error:
        return error
    finally:
        library.unlink(missing_ok=True)


_DOWNLOAD_SECONDS = 3600.0


def download_wheels(python: str, environ: Mapping[str, str]) -> None:
    """Download all that hosts of Python `python` install, unless it is there. Raises CpuftError with what pip said."""
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
    words = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(beside), *target)
    _pip(*words, "--require-hashes", "-r", str(fetched))
    _pip(*words, *_find_torch())
    for path in (built, fetched):
        path.unlink()
    _add_kernels(beside, environ)
    beside.rename(folder)


def select_hashed(hashed: Sequence[Hashed], python: str) -> list[Hashed]:
    """Return what a host of this machine's kind with Python `python` ("3.11") installs."""
    try:
        markers: Any = importlib.import_module("packaging.markers")
    except ImportError:
        markers = importlib.import_module("pip._vendor.packaging.markers")
    there = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    return [one for one in hashed if not one.marker or markers.Marker(one.marker).evaluate(there)]


def format_requirements(hashed: Sequence[Hashed]) -> str:
    """Return the text of a requirements file for `pip --require-hashes`."""
    return "".join(" ".join((one.pin, *(f"--hash=sha256:{text}" for text in one.hashes))) + "\n" for one in hashed)


def _add_kernels(folder: Path, environ: Mapping[str, str]) -> None:
    """Write the wheel of compiled kernels, or say on standard error why hosts get none."""
    compiler = find_compiler(environ)
    try:
        if compiler is None:
            raise CpuftError("this machine has no C++ compiler (Debian: apt-get install g++)")
        write_kernels_wheel(compiler, folder)
    except CpuftError as error:
        slow = "hosts without a C++ compiler will train 2 to 3 times slower"
        print(f"no compiled kernels are sent to the hosts, because {error}; {slow}", file=sys.stderr)


def _find_torch() -> tuple[str, ...]:
    """Return pip's words for the torch that PINS names, without CUDA: on x86-64 from PyTorch's own index alone, unless
    the index that pip is configured for has such a build."""
    pin = next(line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    if platform.machine() != "x86_64":
        return (pin,)
    words = ("--ignore-installed", "--no-deps", "--quiet", "--report", "-", pin)
    report = _pip("install", "--dry-run", *words)
    found, _ = json.JSONDecoder().raw_decode(report[report.index("{") :])  # pip's warnings may follow
    if found["install"][0]["metadata"]["version"].endswith("+cpu"):
        return (pin,)
    return (f"{pin}+cpu", "--index-url", CPU_INDEX)


def _pip(*words: str) -> str:
    command = (*own_module(sys.executable, "pip"), "--disable-pip-version-check", *words)
    answer = execute.run_quietly(command, _DOWNLOAD_SECONDS)
    if answer.exit_code:
        said = " | ".join(answer.said.strip().splitlines()[-4:])
        raise CpuftError(f"pip {words[0]} failed ({said}): give --wheels, a folder that holds them")
    return answer.output


if __name__ == "__main__":
    try:
        if sys.argv[1] == "own":
            write_own_wheel(Path(sys.argv[2]))
        else:
            download_wheels(sys.argv[2], os.environ)
    except CpuftError as failure:
        sys.exit(str(failure))
