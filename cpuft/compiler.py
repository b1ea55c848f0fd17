"""Compile the C++ kernels, or find libraries that were compiled in advance and came in a wheel.

The kernels are plain C functions, so one library works with every version of torch and of Python. A released wheel of
cpuft contains libraries for several classes of CPUs; for an installation from a checkout, `cpuft provision` puts the
same ones into a wheel of their own. `setup.py` uses this module too, so it does not import torch.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cpuft
from cpuft.errors import CpuftError, last_line
from cpuft.hardware import effective_flags, parse_cpuinfo

_FOLDER = Path(cpuft.__file__).parent
SOURCES = (
    _FOLDER / "train/fast/kernels.cpp",
    *(path for folder in ("", "train/fast", "comm/compression") for path in sorted(Path(_FOLDER, folder).glob("*.h"))),
)
"""The main C++ file, which is compiled, and the headers that it includes."""

# -fno-math-errno and -fno-trapping-math let sqrt and floor become vector instructions. -ffast-math is not used, because
# linking with it makes all threads of the process flush denormals, also torch's.
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
"""Compiler options for every CPU; those for a class of CPUs come before them."""
_WIDE = ("-mprefer-vector-width=512",)  # GCC for Arm refuses this option
PACKAGE = "cpuft_kernels"
"""Name of the wheel that has only compiled kernels, and of its folder beside the package cpuft."""
IN_PACKAGE = _FOLDER / "train" / "fast" / "compiled"
"""Folder of the compiled kernels in a released wheel of cpuft. A checkout has no such folder."""
FOLDERS = (IN_PACKAGE, _FOLDER.parent / PACKAGE)
"""Where kernels that were compiled in advance are looked for. Who can write there can change cpuft itself."""
_COMPILE_SECONDS = 300.0
EMULATED_SECONDS = 3600.0
"""Limit for a compiler that an emulator may run, as when an image is built for another architecture."""


@dataclass(frozen=True)
class Target:
    """A class of CPUs for which kernels are compiled in advance."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]
    """Flags in /proc/cpuinfo without which a CPU cannot run the library."""


_AVX2 = frozenset(("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_NEON = frozenset(("asimd",))
_ARM8_2 = _NEON | {"atomics", "asimdrdm", "crc32"}
_AMX = ("-march=cooperlake", "-mamx-tile", "-mamx-int8", "-mamx-bf16", *_WIDE)
MACHINES = {
    "x86_64": (
        Target("amx", _AMX, _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}),
        Target("avx512_bf16", ("-march=cooperlake", *_WIDE), _BF16),
        Target("avx512", ("-march=skylake-avx512", *_WIDE), _AVX512),
        Target("avx2", ("-march=haswell", *_WIDE), _AVX2),
    ),
    "aarch64": (
        Target("bf16", ("-march=armv8.2-a+bf16+i8mm",), _ARM8_2 | {"bf16", "i8mm"}),
        Target("dotprod", ("-march=armv8.2-a+dotprod",), _ARM8_2 | {"asimddp"}),
        Target("neon", ("-march=armv8-a",), _NEON),
    ),
}
"""Architecture (as in uname -m) -> the classes of CPUs for which kernels are compiled in advance, the fastest first."""
TARGETS = MACHINES.get(platform.machine(), ())
"""Those of this machine's architecture."""


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Return the path of $CXX (g++ if unset), else of c++, or None. If $CXX is set and not found, g++ is not tried."""
    path = environ.get("PATH")
    return shutil.which(environ.get("CXX", "g++"), path=path) or shutil.which("c++", path=path)


def hash_sources(*more: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of all that the compiler gets: the sources, FLAGS and `more`."""
    texts = [*(source.read_text(encoding="utf-8") for source in SOURCES), *FLAGS, *more]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def native_options(processor: str) -> tuple[str, ...]:
    """Return ("-march=PROCESSOR",), on x86-64 with "-mprefer-vector-width=512" after it."""
    return (f"-march={processor}", *(_WIDE if platform.machine() == "x86_64" else ()))


def compile_kernels(compiler: str, options: Iterable[str], library: Path) -> None:
    """Compile the kernels into the file `library`; CpuftError: the compiler fails or takes more than 300 s."""
    _run(compiler, [*options, *FLAGS, str(SOURCES[0]), "-o", str(library)])


def _run(compiler: str, arguments: Sequence[str], seconds: float = _COMPILE_SECONDS) -> None:
    try:
        subprocess.run([compiler, *arguments], capture_output=True, text=True, check=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError) as error:
        raise CpuftError(f"{compiler} could not build the kernels: {last_line_of(error)}") from None


def last_line_of(error: Exception) -> str:
    """Return the last line that a failed process wrote to stderr, else that of the error's own text; "" without any."""
    return last_line(str(getattr(error, "stderr", None) or error), "")


def compile_target(compiler: str, target: Target, seconds: float = _COMPILE_SECONDS) -> bytes:
    """Compile the kernels for a class of CPUs and return the shared library, which runs on hosts without a compiler.

    The library names no OpenMP library, because a host without a compiler may have none but torch's own. Whoever loads
    it must have loaded torch's OpenMP library before, with its symbols for all (`cpuft.kernels.Kernels`). Raises
    CpuftError: the compiler fails, takes more than `seconds`, or is not GCC.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled, library = f"{folder}/kernels.o", f"{folder}/kernels.so"
        flags = [flag for flag in FLAGS if flag != "-shared"]
        _run(compiler, [*target.options, *flags, "-c", str(SOURCES[0]), "-o", compiled], seconds)
        _run(compiler, ["-shared", "-s", compiled, "-o", library])
        content = Path(library).read_bytes()
    if b"__kmpc_" in content:
        raise CpuftError(f"{compiler} is not GCC, so its OpenMP code does not run with torch's OpenMP library: use g++")
    return content


def compile_targets(
    compiler: str, targets: Sequence[Target] = TARGETS, seconds: float = _COMPILE_SECONDS
) -> dict[str, bytes | CpuftError]:
    """Return each target's library, or the CpuftError of its compilation (not raised), by the library's file name."""

    def attempt(target: Target) -> bytes | CpuftError:
        try:
            return compile_target(compiler, target, seconds)
        except CpuftError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        return dict(zip(map(name_library, targets), pool.map(attempt, targets)))


def name_library(target: Target) -> str:
    """Return the file name of kernels compiled in advance from exactly these sources: `kernels-HASH-avx512.so`."""
    return f"kernels-{hash_sources(*target.options)}-{target.name}.so"


def has_compiled_kernels() -> bool:
    """Return whether this cpuft contains kernels for all of TARGETS, as a released wheel does."""
    return all((IN_PACKAGE / name_library(target)).is_file() for target in TARGETS)


def read_cpu_flags(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this CPU's flags without those that ONEDNN_MAX_CPU_ISA forbids; () if /proc/cpuinfo cannot be read."""
    try:
        cpu = parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.machine())
    except OSError:
        return ()
    return effective_flags(cpu.flags, environ.get("ONEDNN_MAX_CPU_ISA", ""))


def choose_target(cpu_flags: Collection[str]) -> Target | None:
    """Return the fastest of TARGETS to which a CPU with these flags belongs; None if it belongs to none."""
    return next((target for target in TARGETS if target.needs <= set(cpu_flags)), None)


def find_installed(cpu_flags: Collection[str], folders: Sequence[Path] = FOLDERS) -> Path | None:
    """Return the path of the fastest library compiled in advance, from these sources, for these CPU flags, or None."""
    names = [name_library(target) for target in TARGETS if target.needs <= set(cpu_flags)]
    paths = (folder / name for name in names for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def describe_build(environ: Mapping[str, str], folders: Sequence[Path] = FOLDERS) -> str:
    """Return which build of the kernels is used here, such as "from the wheel, for AVX2"; nothing is built.

    Others are "compiled on this host by /usr/bin/g++, for AVX2" (with CPUFT_KERNELS=compile even if the wheel has
    them), "none: no C++ compiler" and "none: CPUFT_KERNELS=0".
    """
    setting, flags = environ.get("CPUFT_KERNELS"), read_cpu_flags(environ)
    if setting == "0":
        return "none: CPUFT_KERNELS=0"
    if setting != "compile" and (library := find_installed(flags, folders)) is not None:
        return f"from the wheel, for {library.stem.rpartition('-')[2].upper()}"
    if (compiler := find_compiler(environ)) is None:
        return "none: no C++ compiler"
    target = choose_target(flags)
    return f"compiled on this host by {compiler}, for {target.name.upper() if target else platform.machine()}"
