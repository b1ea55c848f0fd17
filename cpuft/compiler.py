"""Compile the C++ kernels of `cpuft/train/fast`, or find kernels that were compiled elsewhere and installed as a wheel.

This module does not import torch, because `cpuft provision` also compiles kernels for hosts without a compiler.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import cpuft
from cpuft.errors import CpuftError

SOURCES = tuple(
    Path(cpuft.__file__).parent / "train" / "fast" / name
    for name in ("kernels.cpp", "attention.h", "products.h", "vectors.h")
)
"""The main C++ file, which is compiled, and the headers that it includes."""

# -fno-math-errno and -fno-trapping-math let sqrt and floor become vector instructions. -ffast-math is not used, because
# linking with it makes all threads of the process flush denormals, also torch's.
FLAGS = (
    *("-O3", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=c++17", "-fopenmp", "-fPIC", "-shared"),
)
"""Compiler options for every target; `Target.options` come before them."""
PACKAGE = "cpuft_kernels"
"""Name of the wheel with compiled kernels, and of its folder beside the package cpuft."""
_COMPILE_SECONDS = 300.0


@dataclass(frozen=True)
class Target:
    """A class of CPUs for which kernels are compiled in advance."""

    name: str
    """Last part of the library's file name, such as avx512."""
    options: tuple[str, ...]
    """Options for the compiler, which choose the instructions, such as -march=haswell."""
    needs: frozenset[str]
    """Flags in /proc/cpuinfo that a CPU needs to run the result."""


_AVX2 = frozenset(("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AMX = ("-march=cooperlake", "-mamx-tile", "-mamx-int8", "-mamx-bf16")
TARGETS = (
    Target("amx", _AMX, _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}),
    Target("avx512_bf16", ("-march=cooperlake",), _BF16),
    Target("avx512", ("-march=skylake-avx512",), _AVX512),
    Target("avx2", ("-march=haswell",), _AVX2),
)
"""The classes of CPUs for which kernels are compiled in advance, the fastest first."""


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler, or None if there is none.

    It is $CXX (g++ if that is unset), else c++, each looked up in the PATH of `environ`. If $CXX is set and not found,
    g++ is not tried.
    """
    path = environ.get("PATH")
    return shutil.which(environ.get("CXX", "g++"), path=path) or shutil.which("c++", path=path)


def hash_sources(*more: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the texts of SOURCES, of FLAGS and of `more`, in this order."""
    texts = [*(source.read_text(encoding="utf-8") for source in SOURCES), *FLAGS, *more]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def compile_kernels(compiler: str, options: Iterable[str], library: Path) -> None:
    """Compile the kernels into the shared library `library`, whose folder must exist. An older file there is replaced.

    Parameters
    ----------
    compiler: its path or name.
    options: for the compiler in addition to FLAGS, for example -march=native.

    Raises
    ------
    CpuftError: the compiler cannot be started, takes longer than 300 s, or ends with an error, for example because it
        does not know an option or cannot write the file. The message has its last line of output.
    """
    command = [compiler, *options, *FLAGS, str(SOURCES[0]), "-o", str(library)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise CpuftError(f"{compiler} could not build the kernels: {str(output).strip().splitlines()[-1:]}") from None


def name_library(target: Target) -> str:
    """Return the file name of kernels compiled in advance from exactly these sources: `kernels-HASH-avx512.so`.

    HASH is that of `hash_sources` with the target's options; the last part is the target's name.
    """
    return f"kernels-{hash_sources(*target.options)}-{target.name}.so"


def find_installed(cpu_flags: Collection[str], folder: Path = Path(cpuft.__file__).parents[1] / PACKAGE) -> Path | None:
    """Return the path of the fastest installed library that a CPU with these flags can run.

    None if no library in `folder` is one of these, or if this machine is not x86_64. Only libraries made from exactly
    these sources are used, and by default only from the folder beside the package cpuft: who can write there can change
    cpuft itself.

    Parameters
    ----------
    cpu_flags: as in /proc/cpuinfo, for example avx2.
    """
    if platform.machine() != "x86_64":
        return None
    paths = (folder / name_library(target) for target in TARGETS if target.needs <= set(cpu_flags))
    return next((path for path in paths if path.is_file()), None)
