"""Rates of a link in tc's words."""

from __future__ import annotations

import re

from cpuft.errors import CpuftError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bits(rate: str, flag: str = "--net") -> int:
    """Bits a second of a rate ("1gbit", "100mbit"); 0 for an empty one. Raises CpuftError that names the flag."""
    if not rate:
        return 0
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgt]?)bit", rate)
    if not match or float(match[1]) <= 0:
        raise CpuftError(f"{flag} {rate[:60]!r} is no rate: write e.g. 1gbit or 100mbit")
    return int(float(match[1]) * _UNITS[match[2]])
