"""By which network interface a host reaches the others."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.errors import CpuftError
from cpuft.hosts.topology import HostFacts

_UNSUITABLE = ("lo", "docker", "br-", "virbr", "veth", "tun", "tap", "wg", "tailscale", "cni", "flannel", "cali")


@dataclass(frozen=True)
class Interface:
    """A network interface of a host and its IPv4 address."""

    name: str
    address: str
    reason: str


def choose_interface(facts: HostFacts, target: str, wanted: str = "") -> Interface:
    """The interface of a host by which it reaches `target`, another host's address; `wanted` names one instead.

    Raises CpuftError: no such interface, no route, or one that leads nowhere else (loopback, docker, VPN).
    """
    if wanted:
        if wanted not in facts.interfaces:
            known = ", ".join(sorted(facts.interfaces))
            raise CpuftError(f"host {facts.hostname} has no interface {wanted} with an address: use one of {known}")
        return Interface(wanted, facts.interfaces[wanted], "the interface you named")
    source = facts.routes.get(target, "")
    name = next((name for name, address in sorted(facts.interfaces.items()) if address == source), "")
    if not name or name.startswith(_UNSUITABLE):
        raise CpuftError(
            f"host {facts.hostname} reaches {target} by {name or 'no interface'}, which other hosts cannot use: "
            f"write addresses of the cluster's own network into the hostfile, or name --iface"
        )
    return Interface(name, source, f"the interface of {facts.hostname} that routes to {target}")
