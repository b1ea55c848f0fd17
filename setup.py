"""Settings are in setup.cfg; the one thing it cannot say is the optional oneCCL shim."""

import os
import sys

from setuptools import Extension, setup

# cpuft installs without a compiler and without oneCCL's headers; `--backend ccl` then says what is missing.
shim = Extension(
    "cpuft.comm._ccl_shim",
    sources=["cpuft/comm/ccl_shim.cpp"],
    include_dirs=[os.path.join(root, "include") for root in (os.environ.get("CCL_ROOT"), sys.prefix) if root],
    extra_compile_args=["-std=c++17", "-O2"],
    optional=True,
)

setup(ext_modules=[shim])
