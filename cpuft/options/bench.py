"""What `cpuft bench comm` measures: lists in options -> turns."""

from __future__ import annotations

import itertools

from cpuft.config import BACKENDS, BenchConfig, is_count
from cpuft.errors import CpuftError
from cpuft.options.foreign import describe_unknown_value

TYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
Turn = tuple[str, str, str, int]
"""Backend (or auto), operation, type and bytes of one measurement."""


def plan_turns(config: BenchConfig) -> list[Turn]:
    """Backend, operation, type and bytes of each measurement, in turn.

    Raises CpuftError: an unknown name, or a size that is no number, or no whole number of a type's elements.
    """
    lists = {name: getattr(config, name).split(",") for name in ("backends", "operations", "dtypes", "sizes")}
    known = {"backends": BACKENDS, "operations": OPERATIONS, "dtypes": tuple(TYPE_BYTES)}
    for kind, names in known.items():
        for name in lists[kind]:
            if name not in names:
                raise CpuftError(describe_unknown_value(f"--{kind}", name, names))
    if not all(map(is_count, lists["sizes"])):
        raise CpuftError(f"--sizes {config.sizes[:60]} is no list of bytes: write e.g. 1024,26214400")
    for size, dtype in itertools.product(lists["sizes"], lists["dtypes"]):
        if int(size) % TYPE_BYTES[dtype]:
            raise CpuftError(
                f"--sizes: {size} bytes hold no whole number of {dtype}: take a multiple of {TYPE_BYTES[dtype]}"
            )
    turns = itertools.product(range(config.rounds), *(lists[name] for name in lists))
    return [(backend, operation, dtype, int(size)) for _, backend, operation, dtype, size in turns]
