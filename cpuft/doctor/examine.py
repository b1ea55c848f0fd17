"""Examine all hosts of a cluster at the same time, look at them briefly before a launch, and run fixes on them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpuft.doctor import probe
from cpuft.doctor.checks import ClusterState, Health, HostState, find_all
from cpuft.doctor.finding import Finding, describe_errors
from cpuft.errors import CpuftError
from cpuft.hosts import facts
from cpuft.hosts.cluster import FROM_STDIN, Access, Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.topology import HostFacts, parse_facts
from cpuft.hosts.transport import map_hosts, try_hosts
from cpuft.serialization import load, parse_json

PORT_SECONDS, _PORT_SECONDS_PER_HOST = 10.0, 0.1
"""How long hosts try to connect to each other's port. Their probes start within less time, also on busy hosts."""
_PROBE_SECONDS = 30.0
_ALL_PAIRS = 16
"""Most hosts of which each tries to connect to all others."""
_LOGINS = 32
"""Most hosts to which this machine logs in at the same time."""
_FATAL = ("CPUFT-022", "CPUFT-034")
"""Checks (/dev/shm, open files) whose findings stop even a run on a single host: its ranks would die or hang."""
_ALONE = (*_FATAL, "CPUFT-021", "CPUFT-023", "CPUFT-026", "CPUFT-027", "CPUFT-032", "CPUFT-038", "CPUFT-040")
"""Checks that a single host needs, too: those whose findings can differ from run to run (also memory, disk, load,
stolen CPU time, leftovers, NUMA nodes), and that of pages, for which cpuft was not tried."""
_MACOS = (
    "cpuft: this machine has macOS, on which you can only try out training: its ranks have no cores of their own, no "
    "kernels of cpuft, no bf16 and no stack dumps, and it is not checked, so its speed says nothing about servers"
)
_EXAMINE = "{'facts': gather_facts(order), 'health': examine(order)}"


def examine_hosts(
    hosts: tuple[Host, ...],
    access: Access,
    ranks: dict[str, int] | None = None,
    full: bool = False,
    known: Sequence[HostFacts] = (),
) -> ClusterState:
    """Examine all hosts of a hostfile at the same time, and return their states in the order of `hosts`.

    A program that needs only Python 3 runs on each host for up to 40 s, and 0.1 s more for each host; on a host that
    logs in to others, for up to 20 s more for each 16 of them. It changes nothing there, but the hosts connect to each
    other on a random TCP port, and the head host logs in to the others by ssh; with `full`, every host to every other.
    With `known` facts of all hosts, in their order, neither facts nor the build of the kernels are gathered. The state
    of a host that could not be examined has the reason as `failure`; no error is raised. `ranks` has the planned ranks
    by the hosts' names in the hostfile.
    """
    resolved = try_hosts(access.transport.address, hosts)
    addresses = ["" if isinstance(one, CpuftError) else one for one in resolved]
    orders = _make_orders(hosts, addresses, access, full, bool(known))
    facts_of = known or (None,) * len(hosts)
    with access.transport.keep_sessions():
        if len(hosts) > _LOGINS:
            # All probes have to run at the same time, and this machine can't log in to all hosts at the same time.
            try_hosts(lambda host: access.transport.run(host, ("true",)), hosts, _LOGINS)
        tasks = list(zip(hosts, resolved, orders, facts_of))
        states = map_hosts(lambda task: _examine_host(access, *task), tasks, most=len(hosts))
    planned = (replace(one, ranks=(ranks or {}).get(one.host.name, one.host.slots)) for one in states)
    return ClusterState(tuple(planned), access.python if len(hosts) > 1 else "")


def check_before_launch(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Examine a run's hosts. Raises CpuftError with all errors, or tells `say` a line for each check with findings.

    On a single host, only what differs from run to run is told, such as load, memory and disk, and pages of another
    size than 4 KB. Only too little /dev/shm and too few open files are errors there.
    """
    if cluster.facts[0].system != "linux":
        say(_MACOS)
        return
    ranks = {one.host.name: one.ranks for one in cluster.assignments}
    hosts = tuple(one.host for one in cluster.assignments)
    found = find_all(examine_hosts(hosts, cluster.access, ranks, known=cluster.facts))
    is_single = len(cluster.assignments) < 2
    findings = [one for one in found if one.code in _ALONE or not is_single]
    if errors := describe_errors([finding for finding in findings if not is_single or finding.code in _FATAL]):
        raise CpuftError(f"{errors} (details: cpuft doctor; to launch nevertheless: --no-check)")
    for code in sorted({finding.code for finding in findings}):
        same = [finding for finding in findings if finding.code == code]
        say(f"{code} on {', '.join(one.host for one in same)}: {same[0].evidence} (details: cpuft doctor)")


def _make_orders(
    hosts: tuple[Host, ...], addresses: list[str], access: Access, full: bool, has_facts: bool
) -> list[dict[str, Any]]:
    """Return what the probe on each host is told to do; see `probe.examine`."""
    port = choose_port()
    facts_source = "" if has_facts else Path(facts.__file__).read_text(encoding="utf-8")
    seconds = PORT_SECONDS + _PORT_SECONDS_PER_HOST * len(hosts)
    others = [address for address in dict.fromkeys(addresses) if address]
    options, by_ssh = list(access.mpirun_options), len(hosts) > 1 and not access.transport.bootstrap
    orders = []
    for index, address in enumerate(addresses):
        peers = choose_peers(others, address, full)
        order = {
            "facts_source": facts_source,
            "kernels": not has_facts,
            "port": port,
            "peers": peers,
            "targets": peers[:1] or [address],
            "seconds": seconds,
            "ssh_options": options,
            # mpirun starts the proxy on its own host without ssh.
            "ssh_peers": [h.name for h in hosts if (full or index == 0) and h is not hosts[index]] if by_ssh else [],
        }
        orders.append(order)
    return orders


def choose_peers(addresses: Sequence[str], own: str, full: bool) -> list[str]:
    """Return those of `addresses`, in their order, to which the host `own` tries to connect, and they to this host.

    With `full` or up to 16 hosts these are all others. Of more hosts they are those that are 1, 2, 4, 8 ... places
    before and behind it in a circle: the pairs of rings, trees and recursive doubling, by which ranks exchange data. []
    if `own` is not among the addresses, such as "" for a host without one.
    """
    count = len(addresses)
    if own not in addresses or full or count <= _ALL_PAIRS:
        return [other for other in addresses if own in addresses and other != own]
    place = addresses.index(own)
    steps = [1 << power for power in range((count - 1).bit_length())]
    places = dict.fromkeys((place + sign * step) % count for step in steps for sign in (1, -1))
    return [addresses[other] for other in sorted(places) if other != place]


def choose_port() -> int:
    """Return a random one of `facts.PORTS`, which is probably free on all hosts."""
    return random.SystemRandom().choice(facts.PORTS)


def _examine_host(
    access: Access, host: Host, address: str | CpuftError, order: dict[str, Any], known: HostFacts | None
) -> HostState:
    if isinstance(address, CpuftError):
        return HostState(host, failure=str(address))
    before = time.time()
    try:
        found = run_probe(host, access, order, _EXAMINE, _count_seconds(order))
        after = time.time()
        values = load(dict[str, Any], found)
        health = load(Health, values.get("health"), "health")
        # The host read its clock at some moment between these two, so only a difference beyond them is certain.
        skew = max(0.0, health.time - after) + min(0.0, health.time - before)
        host_facts = known or parse_facts(json.dumps(values.get("facts")), host.name)
        return HostState(host, address, host_facts, health, skew=skew)
    except (CpuftError, ValueError) as error:
        return HostState(host, address, failure=str(error), kind=getattr(error, "kind", ""))


def _count_seconds(order: dict[str, Any]) -> float:
    """Return the time limit of an examination; if no host answers, each round of logins takes as long as it may."""
    logins: int = -(-len(order["ssh_peers"]) // probe.LOGINS)
    return _PROBE_SECONDS + float(order["seconds"]) + probe.LOGIN_SECONDS * logins


def run_probe(host: Host, access: Access, order: dict[str, Any], expression: str, seconds: float) -> Any:
    """Return the value of an expression of `order` and the functions of `probe`, computed by the Python of a host.

    Raises CpuftError: it fails, or takes more than `seconds`; ValueError: the answer is not JSON.
    """
    # The source is sent, because a host may have neither cpuft nor a disk to write to.
    source = Path(probe.__file__).read_text(encoding="utf-8")
    program = f"{source}\nimport json\norder = json.loads({json.dumps(order)!r})\nprint(json.dumps({expression}))\n"
    answer = access.transport.run(host, access.any_python("-c", FROM_STDIN), program, seconds)
    if answer.exit_code:
        last_lines = " | ".join(answer.errors.strip().splitlines()[-3:])
        raise CpuftError(f"The probe failed in the Python of host {host.name} ({last_lines}).")
    return parse_json(answer.output)


def run_fixes(findings: Sequence[Finding], state: ClusterState, access: Access) -> list[str]:
    """Run the fixes of those findings that have one; return a line for each, "CPUFT-028 on HOST: fixed", or
    "CPUFT-028 on HOST: the fix failed (REASON)".
    """
    hosts = {one.name: one.host for one in state.hosts}
    lines = []
    for finding in findings:
        if finding.fix:
            try:
                answer = access.transport.run(hosts[finding.host], finding.fix)
                result = f"the fix failed ({' '.join(answer.text.split())[-200:]})" if answer.exit_code else "fixed"
            except CpuftError as error:  # what was done on others is told all the same
                result = f"the fix failed ({error})"
            lines.append(f"{finding.code} on {finding.host}: {result}")
    return lines
