"""Types of rented hosts with their cores, network and price."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError, suggest_names

_TABLE = Path(__file__).with_name("instances.csv")


@dataclass(frozen=True)
class InstanceType:
    """One kind of rented host."""

    name: str
    cores: int
    """Number of physical cores."""
    cpu: str
    """amx for x86-64 with AMX, x86 without, arm for aarch64."""
    gbits_per_second: float
    """Network rate in Gbit/s, as the seller states it."""
    dollars_per_hour: float
    """Approximate list price per hour on demand, in US dollars."""
    dated: str
    """The year in which the price was looked up."""


def read_instance_types() -> dict[str, InstanceType]:
    """Return the types in the table that comes with cpuft, by name."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return {
        name: InstanceType(name, int(cores), cpu, float(rate), float(price), dated)
        for name, cores, cpu, rate, price, dated in rows
    }


def find_instance(name: str) -> InstanceType:
    """Return the type of this name; CpuftError: there is no such type."""
    found = read_instance_types()
    if name not in found:
        raise CpuftError(f"--instance {name:.60} is not a known type of instance: {suggest_names(name, tuple(found))}")
    return found[name]
