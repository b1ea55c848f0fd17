"""What a training step frees, the next one gets without page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

# glibc gives the top of its heap back beyond a threshold; more than 2 GiB, because an int is what mallopt takes.
FAULTS = """
import ctypes, resource, sys
from cpuft.train.fast.acceleration import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
for step in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(48 << 20) for _ in range(48)]
    for block in blocks:
        libc.memset(block, 1, 48 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("mode", ["keep", pytest.param("as it is", marks=pytest.mark.proof)])
def test_a_second_step_takes_no_page_faults(mode: str) -> None:
    command = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (int(done.stdout) < 100) == (mode == "keep")
