"""Settings are in setup.cfg; the one thing it cannot say is the optional oneCCL shim."""

import os
import sys

from setuptools import Extension, setup

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
    optional=True,
)

setup(ext_modules=[shim])
