"""A finding of the doctor, and how findings are printed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cpuft.errors import counted


@dataclass(frozen=True)
class Finding:
    """A problem on one host."""

    host: str
    """Name of the host, as in the hostfile, with its own hostname if that differs."""
    evidence: str
    """What was observed, with figures."""
    cause: str = ""
    """Why this happens, in a sentence or two."""
    next_step: str = ""
    severe: bool = True
    """Whether a run would fail or hang. Otherwise the run is slower than it could be, or its measurements mislead."""
    fix: tuple[str, ...] = ()
    """Command that repairs the problem on that host without risk. Empty if a person must decide."""
    code: str = ""
    """Code of the check, such as CPUFT-007. It means the same in every version."""


warning = functools.partial(Finding, severe=False)
"""Make a finding that does not stop a run."""


def format_findings(findings: Sequence[Finding], hosts: int, checks: int) -> str:
    """Return "CODE error on HOST, HOST: EVIDENCE", cause and next step for all findings that differ only in the host,
    errors first, then by code; then a line with the numbers of examined `hosts` and `checks` and of findings, one for
    each host, such as "2 hosts, 40 checks: no problems found", and a newline.
    """
    examined = f"{counted(hosts, 'host')}, {counted(checks, 'check')}"
    if not findings:
        return f"{examined}: no problems found\n"
    hosts_of: dict[Finding, list[str]] = {}
    for finding in sorted(findings, key=lambda one: (not one.severe, one.code)):
        hosts_of.setdefault(replace(finding, host=""), []).append(finding.host)
    parts = [
        f"{finding.code} {'error' if finding.severe else 'warning'} on {', '.join(names)}: {finding.evidence}\n"
        f"  cause: {finding.cause}\n"
        f"  next:  {finding.next_step}{' (or run cpuft doctor --fix)' if finding.fix else ''}"
        for finding, names in hosts_of.items()
    ]
    errors = sum(finding.severe for finding in findings)
    parts.append(f"{examined}: {counted(errors, 'error')}, {counted(len(findings) - errors, 'warning')}")
    return "\n".join(parts) + "\n"


def findings_to_json(findings: Sequence[Finding], hosts: Sequence[str]) -> dict[str, Any]:
    """Return {"format": 1, "hosts": names, "findings": [an object with the fields of each finding]}."""
    return {"format": 1, "hosts": list(hosts), "findings": [asdict(finding) for finding in findings]}


def describe_errors(findings: Sequence[Finding]) -> str:
    """Return "CODE on HOST: EVIDENCE NEXT_STEP" of all severe findings, joined by spaces; "" if there is none."""
    return " ".join(f"{one.code} on {one.host}: {one.evidence} {one.next_step}" for one in findings if one.severe)
