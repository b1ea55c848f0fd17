"""Compile the optional oneCCL shim, and the kernels of a release. All other settings are in setup.cfg.

With CPUFT_RELEASE=1, as scripts/release sets it, the wheel contains the kernels for every class of CPUs. All compiled
files have plain C functions, so one wheel is for every Python 3 and every torch. CPUFT_MACHINE=aarch64, with a compiler
for Arm in CXX, makes the wheel for Arm on x86-64. Without CPUFT_RELEASE, also for an editable install, the kernels are
compiled on each host when they are first used.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

IS_RELEASE = os.environ.get("CPUFT_RELEASE") == "1"
MACHINE = os.environ.get("CPUFT_MACHINE", platform.machine())


class CompiledDistribution(Distribution):
    """A release, which has compiled files also where all of them are kernels."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel is for one architecture."""
        return IS_RELEASE or bool(super().has_ext_modules())


class BuildExtension(build_ext):
    """Give the shim of a release a name that does not mention the Python that has built it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the compiled module `fullname`, relative to the folder of the package."""
        return f"{fullname.replace('.', os.sep)}.so" if IS_RELEASE else str(super().get_ext_filename(fullname))


class BuildPackage(build_py):
    """Add the kernels to the package of a release."""

    def run(self) -> None:
        """Copy the package into the folder of the build, and compile the kernels there."""
        super().run()
        if IS_RELEASE and not self.editable_mode:
            compile_kernels(Path(self.build_lib, "cpuft", "train", "fast", "compiled"))


def compile_kernels(folder: Path) -> None:
    """Write the kernels for every class of CPUs into `folder`."""
    # Build tools need not have the folder of setup.py in their path.
    sys.path.insert(0, str(Path(__file__).parent.absolute()))
    from cpuft.compiler import EMULATED_SECONDS, MACHINES, compile_targets, find_compiler

    compiler = find_compiler(os.environ)
    if compiler is None:
        sys.exit("a release needs a C++ compiler: install g++ (Debian: apt-get install g++)")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in compile_targets(compiler, MACHINES[MACHINE], EMULATED_SECONDS).items():
        if not isinstance(content, bytes):
            sys.exit(f"a release needs all kernels, and {name} is missing: {content}")
        (folder / name).write_bytes(content)


commands: dict[str, type] = {"build_ext": BuildExtension, "build_py": BuildPackage}
if IS_RELEASE:
    from setuptools.command.bdist_wheel import bdist_wheel

    class BuildWheel(bdist_wheel):
        """Name the wheel of a release for every Python 3, on one architecture."""

        def get_tag(self) -> tuple[str, str, str]:
            """Return the Python, the ABI and the platform of the wheel."""
            return "py3", "none", f"linux_{MACHINE}"

    commands["bdist_wheel"] = BuildWheel

roots = [root for root in (os.environ.get("CCL_ROOT"), sys.prefix) if root]
# cpuft installs without a compiler and without oneCCL's headers; `--backend ccl` then says what is missing.
shim = Extension(
    "cpuft.comm.backends._ccl_shim",
    sources=["cpuft/comm/backends/ccl_shim.cpp"],
    include_dirs=[os.path.join(root, "include") for root in roots],
    # Needed by name only: cpuft.comm.backends.ccl finds libccl itself, wherever the shim ends up.
    library_dirs=[os.path.join(root, "lib") for root in roots],
    libraries=["ccl"],
    extra_compile_args=["-std=c++17", "-O2"],
    optional=not IS_RELEASE,
)

# oneCCL is for x86-64 only.
setup(ext_modules=[shim] if MACHINE == "x86_64" else [], cmdclass=commands, distclass=CompiledDistribution)
