"""What a training step frees, the next one gets without page faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.launch.rank_variables import memory_settings

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert (int(done.stdout) < 100) == (mode == "keep")


PACKED = """
import ctypes, re, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from cpuft.train.fast.acceleration import patch_model
from cpuft.train.lora import add_adapters

def measure():
    return 1024 * int(re.search(r"Anonymous: *(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

torch.set_num_threads(1)
sizes = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, vocab_size=30000)
config = AutoConfig.for_model("qwen3", num_hidden_layers=6, **sizes)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("model")
ctypes.CDLL(None).malloc_trim(0)
before = measure()
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
patch_model(add_adapters(model, 16, "", ()), "fp32", adapters=True)
print(measure() - before, sum(parameter.nbytes for parameter in model.parameters()))
"""


def test_weights_that_are_converted_and_packed_leave_no_gaps(tmp_path: Path) -> None:
    settings = {setting.name: setting.value for setting in memory_settings({})}  # as ranks have them
    command = [sys.executable, "-c", PACKED]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env=os.environ | settings, cwd=tmp_path
    )
    taken, weights = map(int, done.stdout.split())
    assert weights > 300e6
    assert taken < 1.3 * weights
