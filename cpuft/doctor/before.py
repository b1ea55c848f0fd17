"""The doctor's short form, before every launch on several hosts."""

from __future__ import annotations

from collections.abc import Callable

from cpuft.cluster import Cluster
from cpuft.doctor.checks import find_all
from cpuft.doctor.finding import describe_stop
from cpuft.doctor.visit import examine_hosts
from cpuft.errors import CpuftError


def check_before_launch(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Look at the hosts of a run; tell warnings by their codes.

    Raises
    ------
    CpuftError: something that would make the run fail or hang, by its code.
    """
    if len(cluster.assignments) < 2:
        return
    ranks = {one.host.name: one.ranks for one in cluster.assignments}
    findings = find_all(examine_hosts(tuple(one.host for one in cluster.assignments), cluster.reach, ranks))
    stop = describe_stop(findings)
    if stop:
        raise CpuftError(f"{stop} (cpuft doctor tells more; --no-check launches all the same)")
    for code in sorted({finding.code for finding in findings}):
        told = [finding for finding in findings if finding.code == code]
        say(f"{code} on {', '.join(finding.host for finding in told)}: {told[0].evidence} (cpuft doctor tells more)")
