"""Speeds of networks: bit rates as users write them, and what bytes and messages cost."""

from __future__ import annotations

import re

from cpuft.errors import CpuftError

ETHERNET = 1448 / 1538
"""Payload of a TCP segment divided by the bytes that its 1,500-byte frame takes on the wire: headers of IP and TCP with
time stamps, and Ethernet's header, preamble and gap (RFC 9293, IEEE 802.3)."""
CPU_SECONDS_PER_BYTE = 2e-9
"""Core seconds per byte that a rank sends in a ring: copies, TCP in the kernel, and the additions. `cpuft bench comm`
measures the value of your hosts for `cpuft estimate --link`."""
CPU_SECONDS_PER_MESSAGE = 1e-4
"""Core seconds of a rank for each message to its neighbour in a ring, whatever its size. In slow motion, updates of 10
small all-reduces between 8, 16 and 32 ranks took 31, 52 and 60 ms on an AMD EPYC (family 23, model 1)."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bit_rate(rate: str, flag: str = "--net") -> int:
    """Return bits per second: 10**9 for "1gbit", 1500000 for "1.5mbit", 0 for ""; CpuftError for other forms and 0."""
    if not rate:
        return 0
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgt]?)bit", rate)
    bits = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not bits:
        raise CpuftError(f"{flag} {rate[:60]!r} is not a bit rate: write for example 1gbit or 100mbit")
    return bits
