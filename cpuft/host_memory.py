"""Memory of the hosts of a run, as the launcher tells it to the preparation of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cpuft.serialization import load, parse_json

_MEMORY_FLAG = "--host-memory="


@dataclass(frozen=True)
class HostMemory:
    """Memory of one host of a run. Simulated hosts on one machine share that machine's memory."""

    host: str
    ranks: int
    free_bytes: int
    """Bytes of memory that the host has free; 0 if that is not known."""
    machine: str = ""
    """Boot id of the machine, which simulated hosts share; empty if that is not known."""
    machine_bytes: int = 0
    """Bytes of memory that the machine has free, whatever limits the host has; 0 if that is not known."""


@dataclass(frozen=True)
class RunMemory:
    """Memory of all hosts of a run, by which the preparation of the data checks whether the training fits."""

    hosts: tuple[HostMemory, ...]
    """The head host first."""
    precision: str
    independent: bool = False


def format_run_memory(memory: RunMemory) -> tuple[str, ...]:
    """Return ("--host-memory=JSON",), the argument with `memory` for a process; () if a host's memory is not known."""
    return (f"{_MEMORY_FLAG}{json.dumps(asdict(memory))}",) if all(host.free_bytes for host in memory.hosts) else ()


def split_run_memory(arguments: Sequence[str]) -> tuple[RunMemory | None, list[str]]:
    """Return the memory that an argument of `format_run_memory` has, None without one, and the other arguments in their
    order. Raises ValueError: the argument is broken.
    """
    found = [arg.removeprefix(_MEMORY_FLAG) for arg in arguments if arg.startswith(_MEMORY_FLAG)]
    others = [arg for arg in arguments if not arg.startswith(_MEMORY_FLAG)]
    return (load(RunMemory, parse_json(found[-1])) if found else None), others
