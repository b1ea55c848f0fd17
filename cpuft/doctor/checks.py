"""All checks, in the order of their codes."""

from __future__ import annotations

from dataclasses import replace

from cpuft.doctor import capacity, network, sameness
from cpuft.doctor.finding import DECLARED, Finding
from cpuft.doctor.state import ClusterState

MODULES = (network, sameness, capacity)
"""They declare the checks."""

CHECKS = tuple(DECLARED[code] for code in sorted(DECLARED))


def find_all(state: ClusterState) -> list[Finding]:
    """What every check finds, in the order of codes."""
    return [
        replace(one, code=check.code, cause=one.cause or check.cause, next_move=one.next_move or check.next_move)
        for check in CHECKS
        for one in check.find(state)
    ]
