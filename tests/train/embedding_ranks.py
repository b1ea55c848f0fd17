"""Run by mpirun: a rank of `cpuft predict` on several hosts. Its arguments are those of embed_on_hosts.

Only rank 0 is told which file it is. The rank that FAILING_RANK names fails with its second window. With SLOW_RANK, all
have an Arm CPU, on which this rank measures that bf16 is slow.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from cpuft.hardware import Cpu
from cpuft.train import embed_on_hosts, embedder, precision

own, calls = embedder.Embedder.embed_encoded, list[Any]()


def fail(*words: Any) -> Any:
    calls.append(words)
    if len(calls) == 2:
        raise MemoryError("a rank without memory")
    return own(*words)


if os.environ["PMI_RANK"] == os.environ.get("FAILING_RANK"):
    setattr(embedder.Embedder, "embed_encoded", fail)  # noqa: B010
if "SLOW_RANK" in os.environ:
    patch, is_slow = pytest.MonkeyPatch(), os.environ["PMI_RANK"] == os.environ["SLOW_RANK"]
    patch.setattr(precision, "read_cpu", lambda: Cpu("Arm", ("asimd", "bf16")))
    patch.setattr(precision, "_measure_once", lambda _: {"teraflops": 0.02 if is_slow else 2, "fp32_teraflops": 0.2})
if os.environ["PMI_RANK"] != "0":
    sys.argv.append("--file=none")
embed_on_hosts.main()
