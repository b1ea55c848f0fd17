"""The optional C++ kernels, loaded by ctypes.

They come compiled in a wheel (cpuft.compiler), or are compiled on first use and stored in the user's cache folder.
Without a compiler, or with CPUFT_KERNELS=0, every caller runs the same computation in plain torch: the same results
within rounding, with the same dropout masks, more slowly. `kernel_status` tells which, for the record.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cpuft.compiler import (
    compile_kernels,
    find_compiler,
    find_installed,
    hash_sources,
    last_line_of,
    native_options,
    read_cpu_flags,
)
from cpuft.errors import CpuftError
from cpuft.files import cache_folder
from cpuft.hardware import compiler_target

_C_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "I": ctypes.c_uint32,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}
"""Type of a C++ parameter by the letter that kernels.cpp gives it; p is a pointer, or an array of pointers."""
KERNEL_TYPES = (torch.float32, torch.bfloat16)
"""The dtypes of elements that kernels process."""
_LOAD_ERRORS = (OSError, AttributeError, ValueError)
_override: tuple[Kernels | None, str] | None = None

CArray = Any
"""A ctypes array, from `address_array` or `int64_array`."""


def address_array(tensors: Sequence[torch.Tensor | None]) -> CArray:
    """Return a C array of the addresses of these tensors' data, null for None; the caller keeps the tensors alive."""
    return int64_array([0 if t is None else t.data_ptr() for t in tensors])


def int64_array(values: Sequence[int]) -> CArray:
    """Return a C array of int64 with these values. Raises OverflowError: one of them does not fit."""
    # Three times as fast as a ctypes array of the values: an optimizer's step passes a thousand.
    return (ctypes.c_int64 * len(values)).from_buffer(array("q", values))


class _Kernel(ctypes.Structure):
    """`Kernel` in kernels.cpp."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("letters", ctypes.c_char_p),
        ("fp32", ctypes.c_void_p),
        ("bf16", ctypes.c_void_p),
    )


class Kernels:
    """A loaded library of kernels. Raises OSError or ValueError: the file cannot be loaded, or has no kernels."""

    def __init__(self, path: Path) -> None:
        _share_openmp()
        library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        table = ctypes.pointer(_Kernel.in_dll(library, "cpuft_kernels"))
        for kernel in itertools.takewhile(lambda one: one.name, map(table.__getitem__, itertools.count())):
            name, letters = kernel.name.decode(), kernel.letters.decode()
            kind = ctypes.CFUNCTYPE(None, *(_C_TYPES[letter] for letter in letters))
            for dtype, address in zip(KERNEL_TYPES, (kernel.fp32, kernel.bf16), strict=True):
                self._functions[name, dtype] = kind(address)

    def run(self, name: str, dtype: torch.dtype, *arguments: torch.Tensor | CArray | int | float | None) -> None:
        """Run kernel `name`, such as "dropout", for elements of `dtype`, on as many threads as torch uses.

        Kernels return nothing: they write to the tensors that they are given.

        Parameters
        ----------
        dtype: bf16 or fp32. Raises KeyError: there is no such kernel, or none for this dtype.
        arguments: those of the C++ function in kernels.cpp, in its order, without the last one, the number of threads.
            A tensor is passed as its address, None as null: the tensor must be on the CPU, alive until this returns,
            and contiguous unless the kernel takes its strides. Sizes and dtypes are not checked: wrong ones crash.
        """
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        self._functions[name, dtype](*plain, torch.get_num_threads())


@functools.cache
def _share_openmp() -> None:
    """Let libraries that name no OpenMP library use torch's, whose file has another name in some builds of torch."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(found[0]) if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _load() -> tuple[Kernels | None, str]:
    setting = os.environ.get("CPUFT_KERNELS")
    if setting == "0":
        return None, "off: CPUFT_KERNELS=0"
    if sys.platform != "linux":
        return None, "off: cpuft has none for macOS"
    installed = None if setting == "compile" else find_installed(read_cpu_flags(os.environ))
    if installed is None:
        return _load_own()
    try:
        return Kernels(installed), "on"
    except _LOAD_ERRORS as error:
        found, status = _load_own()
        return found, status if found else f"{status}; the installed {installed} cannot be loaded: {error}"


def _load_own() -> tuple[Kernels | None, str]:
    """Build kernels for this CPU and load them."""
    compiler = find_compiler(os.environ)
    if compiler is None:
        return None, "off: no C++ compiler; install one (Debian: apt-get install g++)"
    try:
        target = compiler_target(os.environ.get("ONEDNN_MAX_CPU_ISA", ""), read_cpu_flags(os.environ))
        library = build(compiler, target)
    except CpuftError as error:
        return None, f"off: {error}"
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"off: {compiler} could not build the kernels: {last_line_of(error)}"
    try:
        return Kernels(library), "on"
    except _LOAD_ERRORS as error:
        return None, f"off: {library} cannot be loaded: {error}"


def build(compiler: str, processor: str = "native") -> Path:
    """Return the path of the library of kernels in the cache folder, after `compiler` has compiled it for the -march
    value `processor` if it was not there. Raises CpuftError, OSError or SubprocessError: this fails, or the folder is
    unusable.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    # `-march=native` depends on the CPU's flags, and a cache folder on a shared disk may serve different CPUs.
    name = hash_sources(*native_options(processor), version, *read_cpu_flags(os.environ))
    library = cache_folder(os.environ) / f"kernels-{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / "kernels.so"
            compile_kernels(compiler, native_options(processor), made)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # loading a library that a power failure has cut off would end the process
            made.replace(library)
    return library


def kernels_for(*tensors: torch.Tensor) -> Kernels | None:
    """Return the kernels if all tensors (one or more) are on the CPU and all bf16 or all fp32; else None: use plain
    torch. None, too, if there are no kernels (see `kernel_status`). The first call in a process builds them if
    necessary, which takes up to five minutes. `torch.empty(0)` asks for the kernels alone.
    """
    first = tensors[0]
    if first.dtype not in KERNEL_TYPES or any(t.dtype != first.dtype or t.device.type != "cpu" for t in tensors):
        return None
    return (_override or _load())[0]


def need_kernels(*tensors: torch.Tensor) -> Kernels:
    """Return the kernels where the caller knows that `kernels_for` finds them. AssertionError: it does not."""
    kernels = kernels_for(*tensors)
    assert kernels is not None
    return kernels


def kernel_status() -> str:
    """Return "on" if the kernels are used; else "off: " and the reason, such as "off: CPUFT_KERNELS=0". Like
    `kernels_for`, the first call in a process builds the kernels if necessary. It never raises for a failed build.
    """
    return (_override or _load())[1]


@contextlib.contextmanager
def use_kernels(kernels: Kernels | None) -> Iterator[None]:
    """Inside, let the whole process use the kernels of another build, or plain torch if `kernels` is None."""
    global _override
    before, _override = _override, (kernels, "on" if kernels else "off: switched off")
    try:
        yield
    finally:
        _override = before


plain_torch = functools.partial(use_kernels, None)
"""Context manager: inside, use plain torch, as a host without a compiler does."""
