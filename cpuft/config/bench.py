"""The options of `cpuft bench comm`, and the measurements that they stand for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from cpuft.config.fields import communication_option, data_option, describe_unknown_value
from cpuft.config.train import BACKENDS
from cpuft.errors import CpuftError
from cpuft.serialization import is_count

_TYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
"""Bytes of one element of the types that --dtypes accepts."""
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
BenchCase = tuple[str, str, str, int]
"""One measurement: backend (or auto), operation, data type, and bytes of the message."""


@dataclass(frozen=True)
class BenchConfig:
    """What `cpuft bench comm` measures; the lists are separated by commas."""

    backends: str = data_option(
        "gloo,mpi,ccl",
        "Backends to measure, separated by commas: gloo, mpi, ccl; auto adds the one that cpuft launch would choose",
        takes="LIST",
    )
    operations: str = data_option(
        "all_reduce",
        "Collectives to measure, separated by commas: all_reduce, all_gather, reduce_scatter, broadcast",
        takes="LIST",
    )
    dtypes: str = data_option(
        "float32,bfloat16",
        "Data types to send, separated by commas: float32, float64, bfloat16, float16, int32, int64",
        takes="LIST",
    )
    sizes: str = data_option(
        "1024,32768,1048576,26214400,115343360",
        "Message sizes in bytes, separated by commas; 26214400 is the size of a DDP bucket",
        takes="LIST",
    )
    rounds: int = data_option(1, "How many times all backends are measured, in turn", least=1)
    comm_timeout: float = communication_option(
        60.0, "Seconds that a collective may take before the measurement ends with an error", least=1.0
    )


def list_bench_cases(config: BenchConfig) -> list[BenchCase]:
    """Return tuples (backend, operation, type, bytes); bytes vary fastest, rounds slowest. CpuftError: a bad value."""
    lists = {name: getattr(config, name).split(",") for name in ("backends", "operations", "dtypes", "sizes")}
    known = {"backends": BACKENDS, "operations": _OPERATIONS, "dtypes": tuple(_TYPE_BYTES)}
    for option_name, names in known.items():
        for name in lists[option_name]:
            if name not in names:
                raise CpuftError(describe_unknown_value(f"--{option_name}", name, names))
    if not all(map(is_count, lists["sizes"])):
        raise CpuftError(f"--sizes {config.sizes[:60]} is not a list of bytes: write for example 1024,26214400")
    for size, dtype in itertools.product(lists["sizes"], lists["dtypes"]):
        if int(size) % _TYPE_BYTES[dtype]:
            raise CpuftError(
                f"--sizes: {size} bytes are no whole {dtype} elements: give a multiple of {_TYPE_BYTES[dtype]}"
            )
    cases = itertools.product(range(config.rounds), *(lists[name] for name in lists))
    return [(backend, operation, dtype, int(size)) for _, backend, operation, dtype, size in cases]
