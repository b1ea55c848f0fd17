"""Checks of how hosts are reached: names, ssh, ports, interfaces."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from ipaddress import ip_address

from cpuft.doctor.finding import Finding, check, warning
from cpuft.doctor.state import ClusterState, HostState
from cpuft.errors import CpuftError
from cpuft.hosts import transport as transport_module
from cpuft.hosts.interfaces import choose_interface
from cpuft.hosts.topology import HostFacts

_LEAST_MTU = 1280
"""What every IPv6 network carries; below it, something is set wrongly."""


@check("CPUFT-001", "a name of the hostfile has no address.")
def _check_names(state: ClusterState) -> Iterator[Finding]:
    """it is misspelt, or neither DNS nor /etc/hosts knows it here
    next: correct it in the hostfile, or write the host's address there"""
    for one in state.hosts:
        if not one.address:
            yield Finding(one.host.name, f"the name has no address ({one.failure})")


@check("CPUFT-002", "no ssh server answers.")
def _check_reachable(state: ClusterState) -> Iterator[Finding]:
    """the host is off, cut off or too busy, its sshd does not run, or a firewall drops its ssh port"""
    for one in _failed(state, "", transport_module.UNREACHABLE, transport_module.TIMED_OUT):
        yield Finding(one.host.name, one.failure, next_move=f"start it, or try: ssh -v {one.host.name}")


@check("CPUFT-003", "the host's key is unknown, or not the one that is known.")
def _check_host_keys(state: ClusterState) -> Iterator[Finding]:
    """the host was installed anew, or another machine answers at its address
    next: compare its key (ssh-keygen -lf on the host), then replace the line in known_hosts"""
    for one in _failed(state, transport_module.KEY_CHANGED):
        yield Finding(one.host.name, one.failure)
    for one in _failed(state, transport_module.KEY_UNKNOWN):
        yield Finding(
            one.host.name,
            one.failure,
            "this machine has never connected to the host, so no known_hosts file has its key",
            f"compare the key (ssh-keygen -lf on the host), then run ssh {one.host.name} once and answer yes",
        )


@check("CPUFT-004", "the host does not let us in.")
def _check_login(state: ClusterState) -> Iterator[Finding]:
    """our public key is not in its authorized_keys, or the user is another
    next: cpuft provision hosts puts the key there; or name the user in the hostfile (user=NAME)"""
    for one in _failed(state, transport_module.LOGIN_REFUSED):
        yield Finding(one.host.name, one.failure)


def _failed(state: ClusterState, *kinds: str) -> list[HostState]:
    return [one for one in state.hosts if one.address and one.failure and one.facts is None and one.kind in kinds]


@check("CPUFT-005", "a host cannot log in to another, and mpirun starts ranks that way.")
def _check_ssh_between(state: ClusterState) -> Iterator[Finding]:
    """mpirun starts ranks by ssh from the master, which needs a key there and in authorized_keys here
    next: cpuft provision hosts sets that up between all hosts"""
    lost = {one.host.name for one in state.hosts if one.failure}
    for one, _, health in state.answering:
        for peer, complaint in health.ssh.items():
            if complaint and peer not in lost:
                yield Finding(one.name, f"ssh from here to {peer} fails ({complaint[:160]})")


@check("CPUFT-006", "the host's own name is a loopback address, as Debian's 127.0.1.1 line makes it.")
def _check_own_name(state: ClusterState) -> Iterator[Finding]:
    """a line of /etc/hosts, Debian's installer writes it: libraries then listen where no other host reaches"""
    for one, facts, health in state.answering:
        if health.own_address.startswith("127.") and len(state.hosts) > 1:
            yield warning(
                one.name,
                f"its own name {facts.hostname} resolves to {health.own_address}",
                next_move=f"write its network address before {facts.hostname} in its /etc/hosts",
            )


@check("CPUFT-007", "hosts do not reach each other's ports.")
def _check_ports(state: ClusterState) -> Iterator[Finding]:
    """a firewall or security group between the hosts lets only some ports through, or there is no route
    next: open all TCP ports between the cluster's hosts, and only between them"""
    listening = {one.address: one for one, _, health in state.answering if health.listens}
    for one, _, health in state.answering:
        lost = [peer for peer in listening if peer != one.address and peer not in health.connected]
        if lost and health.listens:
            yield Finding(one.name, f"no TCP connection to {', '.join(listening[peer].name for peer in lost)}")


@check("CPUFT-008", "the hosts talk over public addresses.")
def _check_outside(state: ClusterState) -> Iterator[Finding]:
    """gradients and rendezvous are neither encrypted nor protected by a password
    next: write private addresses into the hostfile; close all ports but ssh to the outside"""
    for one in state.hosts:
        if one.address and ip_address(one.address).is_global:
            yield warning(one.name, f"its address {one.address} is a public one")


@check("CPUFT-009", "the way to the other hosts leads over loopback, a container bridge or a VPN.")
def _check_interfaces(state: ClusterState) -> Iterator[Finding]:
    """the hostfile's addresses are of another network than the one between the hosts
    next: write addresses of the cluster's own network into the hostfile, or name --iface"""
    for one, facts, _ in state.answering:
        if len(state.answering) < 2:
            return
        try:
            choose_interface(facts, next(iter(facts.routes), ""))
        except CpuftError as error:
            yield Finding(one.name, str(error).split(": ")[0])


@check("CPUFT-010", "packet sizes differ, or are too small.")
def _check_mtu(state: ClusterState) -> Iterator[Finding]:
    """jumbo frames are on at one end only: small messages pass, large ones hang
    next: set one MTU on all hosts: ip link set dev NAME mtu NUMBER"""
    sizes = {one.name: _mtu(facts, health.mtus) for one, facts, health in state.answering}
    common = max(sizes.values(), key=list(sizes.values()).count, default=0)
    for name, size in sizes.items():
        if len(sizes) > 1 and size and (size != common or size < _LEAST_MTU):
            yield Finding(name, f"MTU {size} on the interface to the other hosts; most have {common}")


@check("CPUFT-033", "a link carries less than half of what most carry.")
def _check_links(state: ClusterState) -> Iterator[Finding]:
    """an instance of another size, a bad cable or port, or another placement group; all ranks wait for it
    next: use another host in its place, or leave one of the two out of the hostfile"""
    rates = [link.bits_per_second for link in state.links if not link.error]
    usual = statistics.median(rates) if rates else 0.0
    names = {one.host.name: one.name for one in state.hosts}
    for link in state.links:
        if not link.error and link.bits_per_second < usual / 2:
            yield warning(
                names[link.source],
                f"{link.bits_per_second / 1e9:.2f} Gbit/s to {link.target}, most links carry {usual / 1e9:.2f}",
            )


@check("CPUFT-035", "a run that goes on listens beyond the cluster's addresses.")
def _check_listening(state: ClusterState) -> Iterator[Finding]:
    """mpirun's proxies know no other way, and believe who calls himself a host; else a script of yours
    next: let a firewall keep all but the cluster's hosts away from all its ports but ssh"""
    for one, facts, health in state.answering:
        own = {one.address, *facts.routes.values()}
        for what, address in health.listening.items():
            if address not in own:
                yield warning(
                    one.name, f"{what} is open on {'all interfaces' if address in ('0.0.0.0', '::') else address}"
                )


@check("CPUFT-036", "ports that ranks listen at can be reached from outside of the cluster's network.")
def _check_reached_from_outside(state: ClusterState) -> Iterator[Finding]:
    """no firewall or security group protects the hosts, and ranks send gradients and keys in plain text
    next: allow nothing but ssh from outside, and all TCP ports between the cluster's hosts only"""
    for one, _, _ in state.answering:
        if one.outside_port:
            yield warning(one.name, f"this machine, which is on another network, reached its port {one.outside_port}")


def _mtu(facts: HostFacts, mtus: dict[str, int]) -> int:
    source = next(iter(facts.routes.values()), "")
    name = next((name for name, address in facts.interfaces.items() if address == source), "")
    return mtus.get(name, 0)
