"""Downloads what a training environment is installed from, by exact pins: `python -m cpuft.provision.fetch 3.11`."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpuft import execute
from cpuft.compiler import find_compiler
from cpuft.errors import CPU_INDEX, CpuftError
from cpuft.files import cache_folder
from cpuft.provision.kernels_wheel import write_kernels_wheel
from cpuft.provision.wheels import BUILT_HERE, HASHES, PINS, Hashed, downloads_folder, parse_hashes
from cpuft.words import own_module

_DOWNLOAD_SECONDS = 3600.0


def fetch_wheels(python: str, environ: Mapping[str, str]) -> None:
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
        fetch_wheels(sys.argv[1], os.environ)
    except CpuftError as failure:
        sys.exit(str(failure))
