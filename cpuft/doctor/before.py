"""The doctor's short form, before every launch."""

from __future__ import annotations

from collections.abc import Callable

from cpuft.doctor.checks import find_all
from cpuft.doctor.finding import describe_stop
from cpuft.doctor.visit import examine_hosts
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Cluster

_FATAL = ("CPUFT-022", "CPUFT-034")
"""/dev/shm, open files: what ranks die of, or wait for."""
_OF_THE_MOMENT = (*_FATAL, "CPUFT-021", "CPUFT-023", "CPUFT-026", "CPUFT-027", "CPUFT-032")
"""Besides memory, disk, load, stolen time, leftovers."""


def check_before_launch(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Look at the hosts of a run; tell warnings by their codes.

    Of a single host only what may change from run to run is told, and only what no run survives stops it: no other
    host waits for it.

    Raises CpuftError: something that would make the run fail or hang, by its code.
    """
    ranks = {one.host.name: one.ranks for one in cluster.assignments}
    findings = find_all(examine_hosts(tuple(one.host for one in cluster.assignments), cluster.access, ranks))
    alone = len(cluster.assignments) < 2
    if alone:
        findings = [finding for finding in findings if finding.code in _OF_THE_MOMENT]
    if stop := describe_stop([finding for finding in findings if not alone or finding.code in _FATAL]):
        raise CpuftError(f"{stop} (cpuft doctor tells more; --no-check launches all the same)")
    for code in sorted({finding.code for finding in findings}):
        told = [finding for finding in findings if finding.code == code]
        say(f"{code} on {', '.join(finding.host for finding in told)}: {told[0].evidence} (cpuft doctor tells more)")
