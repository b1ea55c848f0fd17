"""Types of rented hosts with their cores, network and price."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError, suggest_names
from cpuft.files import read_given_text

TABLE = Path(__file__).with_name("instances.csv")


@dataclass(frozen=True)
class InstanceType:
    """One kind of rented host."""

    name: str
    cores: int
    """Number of physical cores."""
    cpu: str
    """One of CPUS."""
    gbits_per_second: float
    """Network rate in Gbit/s, as the seller states it."""
    dollars_per_hour: float
    """Approximate list price per hour on demand, in US dollars."""
    dated: str


INSTANCE_COLUMNS = ("name", "cores", "cpu", "gbits_per_second", "dollars_per_hour", "dated")
"""The head line of a table of instances."""
CPUS = ("amx", "x86", "arm")
"""Kinds of CPUs in such a table: x86-64 with AMX, x86-64 without, and aarch64."""


def parse_instance_types(text: str, path: str) -> dict[str, InstanceType]:
    """Return a CSV table's types by name, the last of equal names; CpuftError: a line has a wrong form or number."""
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        if tuple(next(lines, ())) != INSTANCE_COLUMNS:
            raise ValueError(f"its head is not {','.join(INSTANCE_COLUMNS)}")
        return {words[0]: _parse_words(words) for words in lines if words}
    except (ValueError, csv.Error) as error:
        raise CpuftError(f"{path}, line {lines.line_num}: {error}: make it like {TABLE}") from None


def _parse_words(words: list[str]) -> InstanceType:
    if len(words) != len(INSTANCE_COLUMNS):
        raise ValueError(f"{len(words)} columns, not {len(INSTANCE_COLUMNS)}")
    name, cores, cpu, rate, price, dated = words
    made = InstanceType(name, int(cores), cpu, float(rate), float(price), dated)
    if cpu not in CPUS:
        raise ValueError(f"cpu is {cpu:.20}, not one of {', '.join(CPUS)}")
    if not (0 < made.cores < 10**6 and 0 < made.gbits_per_second < 10**6 and 0 <= made.dollars_per_hour < 10**6):
        raise ValueError("cores, rate and price must be positive numbers")
    return made


def find_instance(name: str, path: str = "") -> InstanceType:
    """Return the type of this name from the CSV table at `path`, or from TABLE; CpuftError: no such type or table."""
    table = path or str(TABLE)
    found = parse_instance_types(read_given_text(table, "--instances", f"give a CSV file like {TABLE}"), table)
    if name not in found:
        raise CpuftError(f"--instance {name:.60} is not a known type of instance: {suggest_names(name, tuple(found))}")
    return found[name]
