"""Kinds of hosts that can be rented: cores, link and price, from a table that the user can replace."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError, near_names

TABLE = Path(__file__).with_name("instances.csv")


@dataclass(frozen=True)
class Instance:
    """One kind of host."""

    name: str
    cores: int
    """Physical ones."""
    amx: bool
    gbits_per_second: float
    """Of its network, as the seller tells it."""
    dollars_per_hour: float
    """Approximate list price, on demand."""
    dated: str
    """When the price was looked up."""


COLUMNS = tuple(Instance.__dataclass_fields__)


def parse_instances(text: str, path: str) -> dict[str, Instance]:
    """A table with a head line, commas between. Raises CpuftError naming the line that is none."""
    lines = csv.reader(io.StringIO(text, newline=""))
    found: dict[str, Instance] = {}
    try:
        if tuple(next(lines, ())) != COLUMNS:
            raise ValueError(f"its head is not {','.join(COLUMNS)}")
        for words in lines:
            if words:
                found[words[0]] = _parse_words(words)
    except (ValueError, csv.Error) as error:
        raise CpuftError(f"{path}, line {lines.line_num}: {error}: make it like {TABLE}") from None
    return found


def _parse_words(words: list[str]) -> Instance:
    if len(words) != len(COLUMNS):
        raise ValueError(f"{len(words)} columns, not {len(COLUMNS)}")
    name, cores, amx, rate, price, dated = words
    made = Instance(name, int(cores), amx == "yes", float(rate), float(price), dated)
    if not (0 < made.cores < 10**6 and 0 < made.gbits_per_second < 10**6 and 0 <= made.dollars_per_hour < 10**6):
        raise ValueError("cores, rate and price must be positive numbers")
    return made


def find_instance(name: str, path: str = "") -> Instance:
    """The kind of this name in the table at `path`, or in ours. Raises CpuftError with the names most like it."""
    table = Path(path) if path else TABLE
    try:
        found = parse_instances(table.read_text(encoding="utf-8"), str(table))
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}, which --instances names: name a table") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"--instances {path} cannot be read ({error}): name a table") from None
    if name not in found:
        raise CpuftError(f"--instance {name:.60} is not a known type of instance: {near_names(name, tuple(found))}")
    return found[name]
