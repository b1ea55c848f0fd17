"""The files from which a training environment is installed: this cpuft, its compiled kernels, and pinned wheels.

`python -m cpuft.provision.wheels own FOLDER x86_64` writes this cpuft as a wheel for hosts of this architecture, and
`... download 3.11 x86_64` downloads the rest.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import io
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cpuft
from cpuft import execute
from cpuft.argv import module_command
from cpuft.compiler import MACHINES, PACKAGE, compile_targets, find_compiler, has_compiled_kernels, hash_sources
from cpuft.errors import CPU_INDEX, CpuftError, refuse_other_systems
from cpuft.files import (
    REMOVE,
    cache_folder,
    cache_path,
    check_private_folder,
    hash_file,
    hash_text,
    write_atomically,
    write_folder_atomically,
)
from cpuft.hosts.registry import refuse_untrusted
from cpuft.plans import Step
from cpuft.transfer import lock_file

EXTRAS = ("train", "mpi", "ccl", "demo", "sweep")
"""Extras of cpuft that every host gets, because a run may need each of them."""
INSTALL = REMOVE + Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")
"""Installs the environment on a host, in an image or in a container. `set -eu` must precede it."""
PINS = Path(cpuft.__file__).with_name("constraints.txt")
"""Requirements file with the exact version (name==version) of every package, torch included."""
HASHES = Path(cpuft.__file__).with_name("constraints-hashes.txt")
"""Requirements file with the same versions and the SHA-256 of their files, apart from torch."""
BUILT_HERE = ("seqeval",)
"""Packages that the index has only as source: their wheels are built here, so they have no recorded hash. They are pure
Python, and so fit every architecture."""
_NEWEST_GLIBC, _OLDEST_GLIBC = 28, 5
"""Minor versions of glibc 2 for which wheels are downloaded when this machine cannot stand for the hosts: torch needs
2.28, and the oldest wheels name 2.5."""
_DOWNLOAD_SECONDS = 3600.0
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""A fixed time, so that wheels with the same contents have the same hash."""
_METADATA_FIELDS = ("Requires-Python", "Provides-Extra", "Requires-Dist")


@dataclass(frozen=True)
class Wheel:
    """A wheel on this machine."""

    path: str
    name: str
    """File name, such as "numpy-2.1.0-cp311-cp311-linux_x86_64.whl"."""
    sha256: str
    """64 hexadecimal digits."""
    size: int = 0
    """In bytes."""

    @property
    def pin(self) -> str:
        """name==version as the file name spells them (PEP 427): `huggingface_hub==0.24.0`, `torch==2.4.0+cpu`."""
        return "==".join(self.name.split("-")[:2])


@dataclass(frozen=True)
class HashedPin:
    """One requirement of `HASHES`."""

    pin: str
    """name==version."""
    marker: str
    """The environments to which it applies (PEP 508), such as `python_version < "3.11"`; empty for all."""
    hashes: tuple[str, ...]
    """SHA-256 of each file that an index may have for it."""


@dataclass(frozen=True)
class Supply:
    """The wheels from which an environment is installed, as far as they are known."""

    wheels: tuple[Wheel, ...]
    """This cpuft's own wheel comes first, even when `missing` has the step that writes its file."""
    missing: tuple[Step, ...] = ()
    """Steps on this machine that make or download what is missing."""
    complete: bool = True
    """False while wheels must be downloaded: until then they are not known."""


def parse_hashes(text: str) -> tuple[HashedPin, ...]:
    """Parse the text of a requirements file of exact versions, perhaps with hashes; no error of a line is noticed."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [line.split("--hash=sha256:") for line in lines if line.strip() and not line.startswith("#")]
    parts = [(requirement.partition(";"), hashes) for requirement, *hashes in found]
    return tuple(
        HashedPin(pin.strip(), marker.strip(), tuple(digest.strip() for digest in hashes))
        for (pin, _, marker), hashes in parts
    )


def parse_pins(text: str, path: str) -> tuple[str, ...]:
    """Return the requirements, without comments, in the text of the --pins file `path`, such as "a==1 --hash=sha256:0".
    CpuftError: one is not exact, or only some have a hash.
    """
    lines = re.sub(r"\\\n", " ", text).split("\n")
    pins = tuple(" ".join(line.split("#")[0].split()) for line in lines if line.split("#")[0].strip())
    for pin in pins:
        if "==" not in pin or not pin[0].isalnum():
            raise CpuftError(f"--pins {path}: {pin!r} is not exact: write name==version")
        if "--hash=" not in pin and any("--hash=" in other for other in pins):
            raise CpuftError(f"--pins {path}: {pin!r} has no hash and others have one: give all a hash, or none")
    return pins


def add_own(pins: tuple[str, ...], own: Wheel) -> tuple[str, ...]:
    """Return the pins of a user and, as the last one, `cpuft==VERSION`, with its hash if any of the pins has a hash."""
    has_hashes = any("--hash=" in pin for pin in pins)
    return (*pins, f"{own.pin} --hash=sha256:{own.sha256}" if has_hashes else own.pin)


def list_pins(wheels: tuple[Wheel, ...]) -> tuple[str, ...]:
    """Return name==version of every wheel but pip, which only installs the others; in the order of the wheels."""
    return tuple(wheel.pin for wheel in wheels if not wheel.name.startswith("pip-"))


def make_stamp(pins: tuple[str, ...], wheels: tuple[Wheel, ...]) -> str:
    """Return 32 hexadecimal digits of a SHA-256 of all pins and of all wheels' hashes. Their order has no effect."""
    text = "\n".join([*sorted(pins), *sorted(wheel.sha256 for wheel in wheels)])
    return hash_text(text, 32)


def gather_supply(own: Path, folder: str, python: str, environ: Mapping[str, str], machine: str = "") -> Supply:
    """Find out which wheels are on this machine, and which steps make the missing ones. Changes nothing.

    The first wheel is this cpuft's own, in the folder `own`. The others are those in `folder`, which the user gave, or
    without it those that are downloaded for the version `python` ("3.11"); none if both are "". `machine` is the hosts'
    architecture as in uname -m; empty: that of this machine, or x86_64 if this machine has another system than Linux.
    Raises CpuftError when other users could have written the wheels or cpuft's cache folder, `folder` has no wheel, or
    a wheel is for another architecture, or has another hash than cpuft's constraints-hashes.txt for this version.
    """
    machine = machine or (platform.machine() if sys.platform == "linux" else "x86_64")
    name, content = make_own_wheel(machine)
    digest = hashlib.sha256(content).hexdigest()
    wheels = [Wheel(str(own / name), name, digest, len(content))]
    missing = [] if (own / name).exists() and hash_file(own / name) == digest else [plan_own_wheel(own, machine)]
    is_given = bool(folder)
    if python and not folder:
        folder = str(downloads_folder(python, machine, environ))
        if not Path(folder).exists():
            command = (*module_command(sys.executable, "cpuft.provision.wheels"), "download", python, machine)
            why = f"download wheels for Python {python} on {machine} into {folder}"
            if _needs_kernels(machine):
                try:
                    _require_compiler(machine, environ)
                except CpuftError as error:
                    why += f"; {_explain_missing_kernels(error)}"
            missing.append(Step(why, command))
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
            _refuse_other_machines(folder, others, machine)
            _refuse_unknown_files(folder, others, parse_hashes(HASHES.read_text(encoding="utf-8")))
        wheels += others
    return Supply(tuple(wheels), tuple(missing))


@cache
def _read_wheel(path: Path, modified: int) -> Wheel:
    """Read and hash a wheel. `modified` keeps the cached result of an older file from being used."""
    return Wheel(str(path), path.name, hash_file(path), path.stat().st_size)


def _refuse_other_machines(folder: str, wheels: Sequence[Wheel], machine: str) -> None:
    """Raise CpuftError if a wheel has compiled files, and these are not for Linux with glibc on this architecture."""
    for wheel in wheels:
        *_, tags = wheel.name.removesuffix(".whl").split("-")
        names = [tag for tag in tags.split(".") if tag == "any" or re.fullmatch(f"(many)?linux.*_{machine}", tag)]
        if not names:
            raise CpuftError(
                f"--wheels {folder}: {wheel.name} is for {tags}, and the hosts are {machine} with Linux and glibc: "
                "download it for these hosts, or leave --wheels out"
            )


def _refuse_unknown_files(folder: str, wheels: Sequence[Wheel], hashed: Sequence[HashedPin]) -> None:
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


def downloads_folder(python: str, machine: str, environ: Mapping[str, str]) -> Path:
    """Return the folder in cpuft's cache for wheels of hosts with this Python and architecture; it need not exist.

    The path ends in wheels/PYTHON-HASH, such as wheels/3.11-0123456789ab, with a hash of what decides on the wheels.
    """
    # Of cpuft itself only the requirements and the kernels count here, because its other code changes often.
    requirements = "\n".join(sorted(importlib.metadata.requires("cpuft") or []))
    pins, hashes = PINS.read_text(encoding="utf-8"), HASHES.read_text(encoding="utf-8")
    kernels = hash_sources() if _needs_kernels(machine) and _find_compiler_for(machine, environ) else ""
    text = f"{python}\n{machine}\n{pins}\n{hashes}\n{requirements}\n{EXTRAS}\n{kernels}"
    return cache_path(environ) / "wheels" / f"{python}-{hash_text(text, 12)}"


def download_wheels(python: str, machine: str, environ: Mapping[str, str]) -> None:
    """Download all wheels for hosts with this Python and architecture into `downloads_folder`, unless it exists.

    Another process that downloads the same wheels is waited for. Raises CpuftError: pip or the cache folder fails.
    """
    cache_folder(environ)
    folder = downloads_folder(python, machine, environ)
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        with suppress(OSError):  # not every shared file system has locks
            lock_file(lock, waits=True)
            for unfinished in folder.parent.glob(f"{folder.name}.*.new"):  # of a process that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
        if folder.exists():
            return
        with write_folder_atomically(folder) as beside:
            _fill_folder(beside, python, machine, environ)


def _fill_folder(folder: Path, python: str, machine: str, environ: Mapping[str, str]) -> None:
    target = _choose_target(python, machine)
    hashed = select_hashed(parse_hashes(HASHES.read_text(encoding="utf-8")), python, machine)
    sources = [one for one in hashed if one.pin.partition("==")[0] in BUILT_HERE]
    others = [one for one in hashed if one not in sources]
    wheel = ("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder))
    download = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *target)
    for words, chosen in ((wheel, sources), (download, others)):
        with tempfile.TemporaryDirectory(prefix="cpuft-") as place:
            path = Path(place, "requirements.txt")
            path.write_text(_format_requirements(chosen), encoding="utf-8")
            _pip(*words, "--require-hashes", "-r", str(path))
    _download_torch(download, python, machine)
    if _needs_kernels(machine):
        _add_kernels(folder, machine, environ)


def _is_like_here(machine: str) -> bool:
    """Return whether what pip chooses for this machine fits Linux hosts of the architecture `machine`."""
    return sys.platform == "linux" and machine == platform.machine()


def _needs_kernels(machine: str) -> bool:
    """Return whether hosts of an architecture need a wheel with kernels, because this cpuft's own has none for them."""
    return not (_is_like_here(machine) and has_compiled_kernels())


def _choose_target(python: str, machine: str) -> tuple[str, ...]:
    """Return the options with which pip chooses wheels for these hosts; () where it does so without options."""
    is_own_python = python == ".".join(platform.python_version_tuple()[:2])
    if _is_like_here(machine):
        return () if is_own_python else ("--python-version", python)
    glibcs = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    platforms = [*glibcs, f"manylinux2014_{machine}", f"linux_{machine}"]
    return ("--python-version", python, *(word for name in platforms for word in ("--platform", name)))


def select_hashed(hashed: Sequence[HashedPin], python: str, machine: str) -> list[HashedPin]:
    """Return the pins that apply to a Linux host with Python `python` ("3.11") and the architecture `machine`."""
    markers: Any = importlib.import_module("pip._vendor.packaging.markers")  # cpuft itself requires pip
    values = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    values |= {"platform_machine": machine, "platform_system": "Linux", "os_name": "posix"}
    return [one for one in hashed if not one.marker or markers.Marker(one.marker).evaluate(values)]


def _format_requirements(hashed: Sequence[HashedPin]) -> str:
    return "".join(" ".join((one.pin, *(f"--hash=sha256:{text}" for text in one.hashes))) + "\n" for one in hashed)


def _download_torch(download: Sequence[str], python: str, machine: str) -> None:
    """Download the torch in `PINS` without CUDA: for x86-64 from PyTorch's index unless pip's has such a build."""
    pins = select_hashed(parse_hashes(PINS.read_text(encoding="utf-8")), python, machine)
    (pin,) = (one.pin for one in pins if one.pin.startswith("torch=="))
    if machine != "x86_64":
        _pip(*download, pin)
        return
    try:
        _pip(*download, f"{pin}+cpu")
    except CpuftError:
        _pip(*download, f"{pin}+cpu", "--index-url", CPU_INDEX)


def _pip(*argv: str) -> None:
    command = (*module_command(sys.executable, "pip"), "--disable-pip-version-check", *argv)
    answer = execute.run_command(command, _DOWNLOAD_SECONDS)
    if answer.exit_code:
        last_lines = " | ".join(answer.text.strip().splitlines()[-4:])
        raise CpuftError(f"pip {argv[0]} failed ({last_lines}): give --wheels a folder that holds the wheels")


def _find_compiler_for(machine: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler for an architecture: another one's is a cross compiler; None without one."""
    if _is_like_here(machine):
        return find_compiler(environ)
    return shutil.which(f"{machine}-linux-gnu-g++", path=environ.get("PATH"))


def _require_compiler(machine: str, environ: Mapping[str, str]) -> str:
    """Return the path of the C++ compiler for an architecture. CpuftError: there is none, or this is not Linux."""
    refuse_other_systems("compiling them", "install g++ on the hosts, or make the cluster from a Linux machine")
    if compiler := _find_compiler_for(machine, environ):
        return compiler
    package = "g++" if _is_like_here(machine) else f"g++-{machine.replace('_', '-')}-linux-gnu"
    raise CpuftError(f"this machine has no C++ compiler for {machine} (Debian: apt-get install {package})")


def _explain_missing_kernels(error: CpuftError) -> str:
    slow = "hosts without a C++ compiler (Debian: apt-get install g++) will train more slowly, on x86-64 2 to 3 times"
    return f"no compiled kernels are sent to the hosts, because {error}; {slow}"


def _add_kernels(folder: Path, machine: str, environ: Mapping[str, str]) -> None:
    try:
        write_kernels_wheel(_require_compiler(machine, environ), folder, machine)
    except CpuftError as error:
        print(_explain_missing_kernels(error), file=sys.stderr)


def write_kernels_wheel(compiler: str, folder: Path, machine: str) -> Path:
    """Compile the kernels for all classes of CPUs of an architecture into one wheel; return the path of the wheel.

    Targets that fail are left out. Raises CpuftError: all fail, or there are none.
    """
    targets = MACHINES.get(machine, ())
    if not targets:
        raise CpuftError(f"no kernels are compiled in advance for {machine}")
    folder.mkdir(parents=True, exist_ok=True)
    made = compile_targets(compiler, targets)
    files = {f"{PACKAGE}/{name}": found for name, found in made.items() if isinstance(found, bytes)}
    if not files:
        raise CpuftError(str(next(iter(made.values()))))
    return _write_wheel(folder, *_make_wheel(PACKAGE, f"py3-none-linux_{machine}", files))


@cache
def make_own_wheel(machine: str) -> tuple[str, bytes]:
    """Return (file name, contents) of a reproducible wheel of this cpuft, with its compiled files if `machine`
    is the architecture of this Linux machine. Raises CpuftError: cpuft is not installed.
    """
    root = Path(cpuft.__file__).parent
    paths = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    paths = [path for path in paths if path.suffix != ".so" or _is_like_here(machine)]
    files = {f"cpuft/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}
    requirements = _read_requirements()
    # Compiled files are called by C names: any Python 3 of this architecture loads them.
    has_library = any(name.endswith(".so") for name in files)
    tag = f"py3-none-{'linux_' + machine if has_library else 'any'}"
    entry_points = {"entry_points.txt": "[console_scripts]\ncpuft = cpuft.cli:main\n"}
    return _make_wheel("cpuft", tag, files, requirements, entry_points)


def write_own_wheel(folder: Path, machine: str) -> Path:
    """Write this cpuft's wheel into `folder`, made if needed; return its path. CpuftError: cpuft is not installed."""
    return _write_wheel(folder, *make_own_wheel(machine))


def _write_wheel(folder: Path, name: str, content: bytes) -> Path:
    with write_atomically(folder / name) as beside:
        beside.write_bytes(content)
    return folder / name


def plan_own_wheel(folder: Path, machine: str) -> Step:
    """Return the step that writes this cpuft as a wheel for hosts of an architecture into `folder` of this machine. It
    fails if cpuft is not installed.
    """
    command = (*module_command(sys.executable, "cpuft.provision.wheels"), "own", str(folder), machine)
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
    """Return the name and contents of a wheel (PEP 427) in the version of this cpuft."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an unfinished download is removed
    try:
        if sys.argv[1] == "own":
            write_own_wheel(Path(sys.argv[2]), sys.argv[3])
        else:
            download_wheels(sys.argv[2], sys.argv[3], os.environ)
    except CpuftError as failure:
        sys.exit(str(failure))
