"""Downloads what a training environment is installed from, by exact pins: `python -m cpuft.provision.fetch 3.11`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from cpuft import execute
from cpuft.compiler import find_compiler
from cpuft.errors import CPU_INDEX, CpuftError
from cpuft.files import cache_folder
from cpuft.provision.kernels_wheel import write_kernels_wheel
from cpuft.provision.own_wheel import write_own_wheel
from cpuft.provision.wheels import EXTRAS, PINS, downloads_folder
from cpuft.words import own_module

_DOWNLOAD_SECONDS = 3600.0
_WITHOUT_WHEEL = ("seqeval",)
"""Requirements that the index has as source only, of pure Python: their wheels are built here, for any host."""


def fetch_wheels(python: str, environ: Mapping[str, str]) -> None:
    """Download all that hosts of Python `python` install, unless it is there. Raises CpuftError with what pip said."""
    cache_folder(environ)
    folder = downloads_folder(python, environ)
    if folder.exists():
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    shutil.rmtree(beside, ignore_errors=True)
    own = write_own_wheel(beside / "own")
    target = () if python == ".".join(platform.python_version_tuple()[:2]) else ("--python-version", python)
    constraints = _find_constraints(beside)
    _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(beside), *constraints, *_WITHOUT_WHEEL)
    words = [*target, "--only-binary", ":all:", *constraints, "pip", f"{own}[{','.join(EXTRAS)}]"]
    _pip("download", "--quiet", "--dest", str(beside), "--find-links", str(beside), *words)
    (beside / own.name).unlink(missing_ok=True)
    _add_kernels(beside, environ)
    shutil.rmtree(own.parent)
    beside.rename(folder)


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


def _find_constraints(folder: Path) -> tuple[str, ...]:
    """The pins; on x86-64, where pip sees no CPU build of torch, PyTorch's own index too: others bring CUDA."""
    words = ("--ignore-installed", "--no-deps", "--quiet", "--report", "-", "-c", str(PINS), "torch")
    report = _pip("install", "--dry-run", *words)
    found, _ = json.JSONDecoder().raw_decode(report[report.index("{") :])  # pip's warnings may follow
    version = found["install"][0]["metadata"]["version"]
    if platform.machine() != "x86_64" or version.endswith("+cpu"):
        return ("-c", str(PINS))
    pins = folder / "constraints.txt"
    lines = PINS.read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(f"{line}+cpu" if line.startswith("torch==") else line for line in lines) + "\n")
    return ("-c", str(pins), "--extra-index-url", CPU_INDEX)


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
