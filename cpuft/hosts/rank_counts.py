"""Choose how many ranks each host has, and say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpuft.errors import CpuftError, counted
from cpuft.hosts.hostfile import Host
from cpuft.hosts.topology import HostFacts


@dataclass(frozen=True)
class Assignment:
    """A host and the number of ranks on it, at least 1."""

    host: Host
    ranks: int


def assign_ranks(hosts: tuple[Host, ...], np: int, ppn: int, cores: Mapping[str, int]) -> tuple[Assignment, ...]:
    """Distribute `np` ranks over hosts, in the order of the hostfile; hosts that get none are left out. `ppn` is the
    number of ranks on each host, 0 for as even as possible. A host takes its `slots`, else the smaller of its `cores`
    (by name) and `max_slots`; with none of these, any number. Raises CpuftError: the ranks do not fit.
    """
    limits = {host.name: (cores.get(host.name, 0), host.max_slots) for host in hosts}
    slots = {host.name: host.slots or min(filter(None, limits[host.name]), default=0) for host in hosts}
    share = ppn or max(1, -(-np // len(hosts)))
    # If even shares do not fit, because hosts differ in size, every host is filled before the next one.
    for most in (share, np) if not ppn and all(slots.values()) else (share,):
        assignments, left = [], np
        for host in hosts:
            count = min(most, left)
            if slots[host.name] and count > slots[host.name]:
                if ppn or len(hosts) == 1:
                    raise CpuftError(_too_many(count, host, slots[host.name]))
                count = slots[host.name]
            assignments += [Assignment(host, count)] if count else []
            left -= count
        if not left:
            return tuple(assignments)
    fitting = sum(min(share, slots[host.name] or share) for host in hosts)
    raise CpuftError(
        f"{np} ranks do not fit: {counted(len(hosts), 'host')} with {counted(fitting, 'slot')}"
        f"{f' at --ppn {ppn}' if ppn else ''}: lower --np, or add hosts or slots=N to the hostfile"
    )


def choose_ranks(hosts: tuple[Host, ...], np: int, ppn: int, facts: Mapping[str, HostFacts]) -> tuple[Assignment, ...]:
    """Return the ranks of each host: without `ppn`, and if `np` is 0 or their sum, one for each NUMA node, but no more
    than its slots; else those of `assign_ranks`. `facts` are by host name. Raises CpuftError: the ranks do not fit.
    """
    cores = {name: len(one.cores) for name, one in facts.items()}
    if ppn:
        return assign_ranks(hosts, np or ppn * len(hosts), ppn, cores)
    nodes = [facts[host.name].numa_nodes for host in hosts]
    default = tuple(Assignment(one, min(one.slots or one.max_slots or n, n)) for one, n in zip(hosts, nodes))
    # As many ranks as the default may be a run that was moved, resumed or restarted: each host keeps its number.
    return default if np in (0, sum(one.ranks for one in default)) else assign_ranks(hosts, np, 0, cores)


def describe_ranks(assignments: Sequence[Assignment], facts: Sequence[HostFacts], ppn: int) -> str:
    """Return the line "cpuft: 4 ranks on 2 hosts, one for each NUMA node; --np sets another number". The reason is "2
    on each host" with `ppn`, or else "no more than their slots" if these limited a host. `facts` are in the same order.
    """
    where = f"{ppn} on each host" if ppn else "one for each NUMA node"
    if any(one.ranks < its.numa_nodes for one, its in zip(assignments, facts)) and not ppn:
        where = "no more than their slots"
    ranks, hosts = sum(one.ranks for one in assignments), counted(len(assignments), "host")
    return f"cpuft: {counted(ranks, 'rank')} on {hosts}, {where}; --np sets another number"


def _too_many(ranks: int, host: Host, slots: int) -> str:
    what = counted(slots, "slot" if slots in (host.slots, host.max_slots) else "core")
    advice = f"lower --np or --ppn, or write slots={ranks} in a hostfile"
    return f"{ranks} ranks on {host.name}, which has {what}: {advice}"
