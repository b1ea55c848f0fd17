"""Compiled kernels as a wheel, for hosts without a C++ compiler."""

from __future__ import annotations

import io
import platform
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cpuft
from cpuft.compiler import PACKAGE, TARGETS, Target, compile_kernels, name_library
from cpuft.errors import CpuftError
from cpuft.files import written_beside

_TIME = (1980, 1, 1, 0, 0, 0)
"""The same contents give the same file, and so the same checksum."""


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
        made = list(pool.map(lambda target: _compile(compiler, target, folder), targets))
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
