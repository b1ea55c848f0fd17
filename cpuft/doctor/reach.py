"""Checks of how hosts are reached: names, ssh, ports, interfaces."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from ipaddress import ip_address

from cpuft.doctor.finding import Finding, check, warning
from cpuft.doctor.state import ClusterState, HostState
from cpuft.errors import CpuftError
from cpuft.hosts.interfaces import choose_interface
from cpuft.hosts.topology import HostFacts

_LEAST_MTU = 1280
"""What every IPv6 network carries; below it, something is set wrongly."""


@check("CPUFT-001", "a name of the hostfile has no address.")
def _check_names(state: ClusterState) -> Iterator[Finding]:
    for one in state.hosts:
        if not one.address:
            yield Finding(
                one.host.name,
                f"the name has no address ({one.failure})",
                "it is misspelt, or neither DNS nor /etc/hosts knows it here",
                "correct it in the hostfile, or write the host's address there",
            )


@check("CPUFT-002", "no ssh server answers.")
def _check_reachable(state: ClusterState) -> Iterator[Finding]:
    for one in _failed(state):
        if not _is_key(one.failure) and not _is_login(one.failure):
            yield Finding(
                one.host.name,
                one.failure,
                "the host is off, cut off or too busy, its sshd does not run, or a firewall drops its ssh port",
                f"start it, or try: ssh -v {one.host.name}",
            )


@check("CPUFT-003", "the host's key is unknown, or not the one that is known.")
def _check_host_keys(state: ClusterState) -> Iterator[Finding]:
    for one in _failed(state):
        if _is_key(one.failure):
            yield Finding(
                one.host.name,
                one.failure,
                "the host was installed anew, or another machine answers at its address",
                "compare its key (ssh-keygen -lf on the host), then replace the line in known_hosts",
            )


@check("CPUFT-004", "the host does not let us in.")
def _check_login(state: ClusterState) -> Iterator[Finding]:
    for one in _failed(state):
        if _is_login(one.failure):
            yield Finding(
                one.host.name,
                one.failure,
                "our public key is not in its authorized_keys, or the user is another",
                "cpuft provision hosts puts the key there; or name the user in the hostfile (user=NAME)",
            )


def _failed(state: ClusterState) -> list[HostState]:
    return [one for one in state.hosts if one.address and one.failure and one.facts is None]


def _is_key(failure: str) -> bool:
    return any(sign in failure for sign in ("known_hosts", "does not match", "key verification"))


def _is_login(failure: str) -> bool:
    return "uthentication" in failure


@check("CPUFT-005", "a host cannot log in to another, and mpirun starts ranks that way.")
def _check_ssh_between(state: ClusterState) -> Iterator[Finding]:
    lost = {one.host.name for one in state.hosts if one.failure}
    for one, _, health in state.answering:
        for peer, complaint in health.ssh.items():
            if complaint and peer not in lost:
                yield Finding(
                    one.name,
                    f"ssh from here to {peer} fails ({complaint[:160]})",
                    "mpirun starts ranks by ssh from the master, which needs a key there and in authorized_keys here",
                    "cpuft provision hosts sets that up between all hosts",
                )


@check("CPUFT-006", "the host's own name is a loopback address, as Debian's 127.0.1.1 line makes it.")
def _check_own_name(state: ClusterState) -> Iterator[Finding]:
    for one, facts, health in state.answering:
        if health.own_address.startswith("127.") and len(state.hosts) > 1:
            yield warning(
                one.name,
                f"its own name {facts.hostname} resolves to {health.own_address}",
                "a line of /etc/hosts, Debian's installer writes it: libraries then listen where no other host reaches",
                f"write its network address before {facts.hostname} in its /etc/hosts",
            )


@check("CPUFT-007", "hosts do not reach each other's ports.")
def _check_ports(state: ClusterState) -> Iterator[Finding]:
    listening = {one.address: one for one, _, health in state.answering if health.listens}
    for one, _, health in state.answering:
        lost = [peer for peer in listening if peer != one.address and peer not in health.connected]
        if lost and health.listens:
            yield Finding(
                one.name,
                f"no TCP connection to {', '.join(listening[peer].name for peer in lost)}",
                "a firewall or security group between the hosts lets only some ports through, or there is no route",
                "open all TCP ports between the cluster's hosts, and only between them",
            )


@check("CPUFT-008", "the hosts talk over public addresses.")
def _check_outside(state: ClusterState) -> Iterator[Finding]:
    for one in state.hosts:
        if one.address and ip_address(one.address).is_global:
            yield warning(
                one.name,
                f"its address {one.address} is a public one",
                "gradients and rendezvous are neither encrypted nor protected by a password",
                "write private addresses into the hostfile; close all ports but ssh to the outside",
            )


@check("CPUFT-009", "the way to the other hosts leads over loopback, a container bridge or a VPN.")
def _check_interfaces(state: ClusterState) -> Iterator[Finding]:
    for one, facts, _ in state.answering:
        if len(state.answering) < 2:
            return
        try:
            choose_interface(facts, next(iter(facts.routes), ""))
        except CpuftError as error:
            yield Finding(
                one.name,
                str(error).split(": ")[0],
                "the hostfile's addresses are of another network than the one between the hosts",
                "write addresses of the cluster's own network into the hostfile, or name --iface",
            )


@check("CPUFT-010", "packet sizes differ, or are too small.")
def _check_mtu(state: ClusterState) -> Iterator[Finding]:
    sizes = {one.name: _mtu(facts, health.mtus) for one, facts, health in state.answering}
    common = max(sizes.values(), key=list(sizes.values()).count, default=0)
    for name, size in sizes.items():
        if len(sizes) > 1 and size and (size != common or size < _LEAST_MTU):
            yield Finding(
                name,
                f"MTU {size} on the interface to the other hosts; most have {common}",
                "jumbo frames are on at one end only: small messages pass, large ones hang",
                "set one MTU on all hosts: ip link set dev NAME mtu NUMBER",
            )


@check("CPUFT-033", "a link carries less than half of what most carry.")
def _check_links(state: ClusterState) -> Iterator[Finding]:
    rates = [link.bits_per_second for link in state.links if not link.error]
    usual = statistics.median(rates) if rates else 0.0
    names = {one.host.name: one.name for one in state.hosts}
    for link in state.links:
        if not link.error and link.bits_per_second < usual / 2:
            yield warning(
                names[link.source],
                f"{link.bits_per_second / 1e9:.2f} Gbit/s to {link.target}, most links carry {usual / 1e9:.2f}",
                "an instance of another size, a bad cable or port, or another placement group; all ranks wait for it",
                "use another host in its place, or leave one of the two out of the hostfile",
            )


@check("CPUFT-035", "a run that goes on listens beyond the cluster's addresses.")
def _check_listening(state: ClusterState) -> Iterator[Finding]:
    for one, facts, health in state.answering:
        own = {one.address, *facts.routes.values()}
        for what, address in health.listening.items():
            if address not in own:
                yield warning(
                    one.name,
                    f"{what} is open on {'all interfaces' if address in ('0.0.0.0', '::') else address}",
                    "mpirun's proxies know no other way, and believe who calls himself a host; else a script of yours",
                    "let a firewall keep all but the cluster's hosts away from all its ports but ssh",
                )


def _mtu(facts: HostFacts, mtus: dict[str, int]) -> int:
    source = next(iter(facts.routes.values()), "")
    name = next((name for name, address in facts.interfaces.items() if address == source), "")
    return mtus.get(name, 0)
