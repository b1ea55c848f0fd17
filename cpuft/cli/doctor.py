"""`cpuft doctor`. Imports neither torch nor paramiko."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import click

from cpuft.cli.options import Verb, make_options, pick
from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError

_TEXTS = {
    "hostfile": "Hostfile with the hosts to check (default: in a job its hosts, else this machine)",
    "cluster": "Name of a cluster made by cpuft provision, to check its hosts",
}


@click.command(cls=Verb, params=make_options(LaunchConfig, only=(*_TEXTS, "ssh_config"), texts=_TEXTS))
@click.option("--json", is_flag=True, help="Print the findings as one JSON object")
@click.option(
    "--full",
    is_flag=True,
    help="Test ssh from every host to every other host, not only from the head host, and with more than 16 hosts "
    "the TCP connections between all of them, not only between some",
)
@click.option("--bandwidth", is_flag=True, help="Also measure latency and bandwidth between all pairs of hosts")
@click.option("--fix", is_flag=True, help="Run those fixes that are safe without a decision of yours, then check again")
@click.option("--list", "list_checks", is_flag=True, help="Print the codes of all checks and what they look for")
def doctor(json: bool, full: bool, bandwidth: bool, fix: bool, list_checks: bool, **values: Any) -> None:
    """Check all hosts of a cluster for problems that would stop, hang or slow down a run.

    Without --fix, nothing is changed on the hosts. The exit code is 1 if a run would fail or hang, 2 if the hosts
    cannot be read from --hostfile or --cluster, and 0 otherwise, even if there are warnings.
    """
    from cpuft.doctor.checks import CHECKS, find_all, find_kernel_builds, format_kernel_builds
    from cpuft.doctor.examine import examine_hosts, run_fixes
    from cpuft.doctor.finding import findings_to_json, format_findings
    from cpuft.doctor.measure_links import format_links, measure_links
    from cpuft.hosts.cluster import find_access, read_hosts
    from cpuft.serialization import format_json

    if list_checks:
        for check in CHECKS:
            click.echo(f"{check.code}  {check.title}")
        return
    config = pick(LaunchConfig, values)
    hosts, access = read_hosts(config), find_access(config)
    for host in hosts:
        access.transport.refuse_here(host, "cpuft doctor of this machine")
    state = examine_hosts(hosts, access, full=full)
    # Hosts that do not answer have findings of their own; the links between the others can be measured.
    reachable = tuple(one.host for one, _, _ in state.answering)
    failure: CpuftError | None = None
    try:
        links = measure_links(reachable, access) if bandwidth and len(reachable) > 1 else ()
    except CpuftError as error:  # the findings may tell why
        links, failure = (), error
    findings = find_all(replace(state, links=links))
    if fix and any(finding.fix for finding in findings):
        for line in run_fixes(findings, state, access):
            click.echo(line, err=True)
        findings = find_all(replace(examine_hosts(hosts, access, full=full), links=links))
    if json:
        values = findings_to_json(findings, [host.name for host in hosts]) | {"kernels": find_kernel_builds(state)}
        measured = {"links": [asdict(link) for link in links]} if bandwidth else {}
        click.echo(format_json(values | measured))
    else:
        click.echo(format_links(links) + "\n" if links else "", nl=False)
        click.echo(format_kernel_builds(find_kernel_builds(state)), nl=False)
        click.echo(format_findings(findings, len(hosts), len(CHECKS)), nl=False)
    if failure:
        raise failure
    sys.exit(1 if any(finding.severe for finding in findings) else 0)
