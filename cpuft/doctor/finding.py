"""A finding of the doctor, and how it is told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cpuft.doctor.state import ClusterState
from cpuft.errors import counted


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong on one host."""

    host: str
    evidence: str
    """What was seen, in figures."""
    cause: str = ""
    next_move: str = ""
    severe: bool = True
    """Whether a run would fail or hang; otherwise it is slower than it could be, or its figures mislead."""
    fix: tuple[str, ...] = ()
    """A command that puts it right on that host without harm; empty when a person must decide."""
    code: str = ""
    """Its check's. Stable: CPUFT-001 means the same in every version."""


warning = functools.partial(Finding, severe=False)
"""A finding that stops no run."""


Find = Callable[[ClusterState], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """A pure function of what was found on the hosts, what it looks for, and what its findings mean unless they say."""

    code: str
    title: str
    cause: str
    next_move: str
    find: Find


DECLARED: dict[str, Check] = {}
"""By code. A code is never given to another check."""


def check(code: str, title: str) -> Callable[[Find], Find]:
    """Decorator: declare a check. Its docstring is for users: the cause, and in a line `next: ` what to do about it."""

    def declare(find: Find) -> Find:
        assert code not in DECLARED, f"{code} is given to two checks"
        cause, _, move = inspect.cleandoc(find.__doc__ or "").partition("\nnext: ")
        DECLARED[code] = Check(code, title, cause, move, find)
        return find

    return declare


def format_findings(findings: Sequence[Finding], hosts: int, checks: int) -> str:
    """Findings for a terminal, the severe ones first; a line of praise when there is none."""
    if not findings:
        return f"{counted(hosts, 'host')}, {counted(checks, 'check')}: all is well\n"
    alike: dict[Finding, list[str]] = {}
    for finding in sorted(findings, key=lambda one: (not one.severe, one.code)):
        alike.setdefault(replace(finding, host=""), []).append(finding.host)
    parts = [
        f"{finding.code} {'error' if finding.severe else 'warning'} on {', '.join(names)}: {finding.evidence}\n"
        f"  cause: {finding.cause}\n"
        f"  next:  {finding.next_move}{' (or --fix)' if finding.fix else ''}"
        for finding, names in alike.items()
    ]
    severe = sum(finding.severe for finding in findings)
    parts.append(
        f"{counted(hosts, 'host')}, {counted(checks, 'check')}: {counted(severe, 'error')}, "
        f"{counted(len(findings) - severe, 'warning')}"
    )
    return "\n".join(parts) + "\n"


def to_json(findings: Sequence[Finding], hosts: Sequence[str]) -> dict[str, Any]:
    """All findings as one object."""
    return {"format": 1, "hosts": list(hosts), "findings": [asdict(finding) for finding in findings]}


def describe_stop(findings: Sequence[Finding]) -> str:
    """One line on the severe findings, which ends with the next move of the last."""
    return "; ".join(f"{f.code} on {f.host}: {f.evidence}: {f.next_move}" for f in findings if f.severe)
