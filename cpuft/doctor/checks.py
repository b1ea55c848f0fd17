"""All checks, in the order of their codes."""

from __future__ import annotations

from dataclasses import replace

from cpuft.doctor import capacity, reach, sameness
from cpuft.doctor.finding import DECLARED, Finding
from cpuft.doctor.state import ClusterState

MODULES = (reach, sameness, capacity)
"""They declare the checks."""

CHECKS = tuple(DECLARED[code] for code in sorted(DECLARED))


def find_all(state: ClusterState) -> list[Finding]:
    """What every check finds, in the order of codes."""
    return [replace(finding, code=check.code) for check in CHECKS for finding in check.find(state)]
