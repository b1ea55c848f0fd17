"""The optional C++ kernels: built with the host's compiler on first use, kept in the user's cache, loaded by ctypes.

A host without a compiler uses kernels that `cpuft provision` compiled elsewhere and installed (cpuft.compiler).
Without those, or with CPUFT_KERNELS=0, every caller runs its plain torch twin: the same results (the same
dropout masks too, within rounding), more slowly. `kernel_status` says which, for the record.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cpuft.compiler import compile_kernels, find_compiler, find_installed, hash_sources
from cpuft.errors import CpuftError
from cpuft.files import cache_folder
from cpuft.hardware import compiler_target, effective_flags, parse_cpuinfo

# p pointer (or an array of pointers), q int64, Q uint64, I uint32, f float, i int: in the order of the C++ functions.
_SIGNATURES = {
    "dropout": "ppqQIfi",
    "norm_forward": "pppppppppqqQIffi",
    "norm_backward": "ppppppppppqqQIfi",
    "attention_forward": "pppppppqqqqqqqqqqfQIfi",
    "attention_backward": "ppppppppppqqqqqqqqqqfQIfi",
    "gelu_forward": "ppppqqi",
    "gelu_backward": "ppppqqi",
    "column_sums": "ppqqi",
    "quantise_rows": "ppppqqi",
    "dequantise": "pppppqqi",
    "square_sum": "pppqi",
    "adamw": "ppppppppqffffffffi",
}
_C_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "I": ctypes.c_uint32,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_instead: tuple[Kernels | None, str] | None = None  # of the host's own kernels

Addresses = Any
"""A ctypes array of addresses or numbers, from `addresses` or `numbers`; None stands for no tensor."""


def addresses(tensors: Sequence[torch.Tensor | None]) -> Addresses:
    """Where these tensors' elements are, one after another, for a kernel that takes many."""
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def numbers(values: Sequence[int]) -> Addresses:
    """An array of int64."""
    return (ctypes.c_int64 * len(values))(*values)


class Kernels:
    """The loaded library. Tensors passed to `run` have to be on the CPU, alive until it returns, and contiguous
    where no strides are passed."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, letters in _SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                address = ctypes.c_void_p.in_dll(library, f"{name}_{suffix}").value
                assert address is not None
                kind = ctypes.CFUNCTYPE(None, *(_C_TYPES[letter] for letter in letters))
                self._functions[name, dtype] = kind(address)

    def run(self, name: str, dtype: torch.dtype, *arguments: torch.Tensor | Addresses | int | float | None) -> None:
        """Call kernel `name` for elements of `dtype`; a tensor becomes its address, the thread count is added."""
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        self._functions[name, dtype](*plain, torch.get_num_threads())


@functools.cache
def _load() -> tuple[Kernels | None, str]:
    if os.environ.get("CPUFT_KERNELS") == "0":
        return None, "off: CPUFT_KERNELS=0"
    found, said = _load_own()
    if found is None and (installed := find_installed(_usable_flags())) is not None:
        try:
            return Kernels(installed), "on"
        except (OSError, AttributeError) as error:
            return None, f"{said}; the installed {installed} cannot be loaded: {error}"
    return found, said


def _load_own() -> tuple[Kernels | None, str]:
    """Load kernels that this host's compiler builds for this very CPU."""
    compiler = find_compiler(os.environ)
    if compiler is None:
        return None, "off: no C++ compiler; install one (Debian: apt-get install g++)"
    try:
        return Kernels(build(compiler, compiler_target(os.environ.get("ONEDNN_MAX_CPU_ISA", "")))), "on"
    except CpuftError as error:
        return None, f"off: {error}"
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return None, f"off: {compiler} could not build the kernels: {str(said).strip().splitlines()[-1:]}"


def build(compiler: str, processor: str = "native") -> Path:
    """The library's path, built unless the cache has it. Ranks that race build twice and rename over each other.

    `processor` is what the compiler's -march takes. Raises CpuftError: the cache may be another user's work, who could
    run code as this one.
    """
    options = (f"-march={processor}",)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    home = cache_folder(os.environ)
    library = home / f"kernels-{hash_sources(*options, version, _processor())}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / "kernels.so"
            compile_kernels(compiler, options, made)
            made.replace(library)
    return library


def _usable_flags() -> tuple[str, ...]:
    """This CPU's flags, without those that ONEDNN_MAX_CPU_ISA hides."""
    try:
        cpu = parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.machine())
    except OSError:
        return ()
    return effective_flags(cpu.flags, os.environ.get("ONEDNN_MAX_CPU_ISA", ""))


def _processor() -> str:
    """What `-march=native` depends on: a cache on a shared disk serves hosts of several kinds."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.machine()


def kernels_for(*tensors: torch.Tensor) -> Kernels | None:
    """The kernels, if they are there and can take these tensors (CPU, bf16 or fp32, one dtype); else None."""
    first = tensors[0]
    if first.dtype not in _SUFFIXES or any(t.dtype != first.dtype or t.device.type != "cpu" for t in tensors):
        return None
    return (_instead or _load())[0]


def kernel_status() -> str:
    """`on`, or `off: ` with the reason."""
    return (_instead or _load())[1]


@contextlib.contextmanager
def use_kernels(kernels: Kernels | None) -> Iterator[None]:
    """Run these inside this block, those of another build; None: the plain torch twins."""
    global _instead
    before, _instead = _instead, (kernels, "on" if kernels else "off: switched off")
    try:
        yield
    finally:
        _instead = before


plain_torch = functools.partial(use_kernels, None)  # as on a host without a compiler
