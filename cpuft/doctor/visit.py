"""Asks all hosts of a cluster side by side, and runs fixes on them."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuft.doctor import probe
from cpuft.doctor.finding import Finding
from cpuft.doctor.state import ClusterState, Health, HostState
from cpuft.errors import CpuftError
from cpuft.hosts import facts
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.topology import parse_facts
from cpuft.hosts.transport import HostError, side_by_side
from cpuft.serialization import load, parse_json
from cpuft.words import WITHOUT_FOLDER

PORT_SECONDS = 3.0
"""How long hosts try to reach each other's port: longer than their ssh logins lie apart."""

_ANSWER_SECONDS = 30.0
_TRY_SECONDS, _PAUSE_SECONDS = 1.0, 0.1
"""For one connection from outside, and from one to the next."""

# Both sources come with the order, because a host may have neither cpuft nor a disk to write to.
_LOADER = (
    f"{WITHOUT_FOLDER}\nimport json\n"
    "order=json.load(sys.stdin)\n"
    "facts,probe={'__name__':'facts'},{'__name__':'probe'}\n"
    "exec(order['facts_source'],facts)\n"
    "exec(order['probe_source'],probe)\n"
    "print(json.dumps({'facts':facts['gather'](order['targets']),'health':probe['examine'](order)}))\n"
)


def examine_hosts(
    hosts: tuple[Host, ...],
    access: Access,
    ranks: dict[str, int] | None = None,
    full: bool = False,
    try_outside: bool = False,
) -> ClusterState:
    """What there is behind every line of a hostfile, all asked at once.

    Parameters
    ----------
    full: log in from every host to every other, rather than from the master only.
    try_outside: connect to a port of each host from this machine, if that is outside of the hosts' network.
    """
    addresses = [_resolve(host, access) for host in hosts]
    try_outside = try_outside and not access.transport.bootstrap and not any(map(access.transport.is_here, hosts))
    routes = _read_routes() if try_outside else ""
    outside = [bool(address) and is_outside(address, routes) for address, _ in addresses]
    orders = dict(zip(hosts, _make_orders(hosts, [address for address, _ in addresses], access, full, outside)))
    found = dict(zip(hosts, addresses))
    states = side_by_side(lambda host: _examine(host, found[host], orders[host], access), hosts)
    return ClusterState(tuple(states), access.python if len(hosts) > 1 else "", ranks or {})


def _read_routes() -> str:
    """This machine's IPv4 routes, as the kernel tells them."""
    try:
        return Path("/proc/net/route").read_text(encoding="utf-8")
    except OSError:
        return ""


def is_outside(address: str, routes: str) -> bool:
    """Whether packets from this machine to an IPv4 address pass a gateway: the address is on another network.

    `routes`: the content of /proc/net/route. An address that is none, such as a name behind a bastion, is not tried.
    """
    try:
        target = int.from_bytes(socket.inet_aton(address), sys.byteorder) if address.count(".") == 3 else None
    except OSError:
        target = None
    found = []
    for words in (line.split() for line in routes.splitlines()[1:]):
        with contextlib.suppress(ValueError, IndexError):
            network, gateway, mask = (int(words[index], 16) for index in (1, 2, 7))
            if target is not None and target & mask == network:
                found.append((mask.bit_count(), -int(words[6]), bool(gateway)))
    return max(found)[2] if found else False


def _make_orders(
    hosts: tuple[Host, ...], addresses: list[str], access: Access, full: bool, outside: list[bool]
) -> list[dict[str, Any]]:
    port = random.SystemRandom().randrange(20000, 32000)  # below the range that the kernel gives to clients
    sources = {
        "facts_source": Path(facts.__file__).read_text(encoding="utf-8"),
        "probe_source": Path(probe.__file__).read_text(encoding="utf-8"),
    }
    options, by_ssh = list(access.mpirun_options), len(hosts) > 1 and not access.transport.bootstrap
    orders = []
    for index, address in enumerate(addresses):
        peers = [other for other in dict.fromkeys(addresses) if other and other != address]
        order = {
            "port": port,
            "peers": peers,
            "targets": peers[:1] or [address],
            "seconds": PORT_SECONDS,
            "greeting": f"cpuft doctor {secrets.token_hex(16)}" if outside[index] else "",
            "ssh_options": options,
            # On its own host mpirun starts its proxy without ssh.
            "ssh_peers": [h.name for h in hosts if (full or index == 0) and h is not hosts[index]] if by_ssh else [],
        }
        orders.append(sources | order)
    return orders


def _resolve(host: Host, access: Access) -> tuple[str, str]:
    try:
        return access.transport.address(host), ""
    except CpuftError as error:
        return "", str(error)


def _examine(host: Host, resolved: tuple[str, str], order: dict[str, Any], access: Access) -> HostState:
    address, failure = resolved
    if not address:
        return HostState(host, "", failure=failure)
    before = time.time()
    port, found = order["port"], list[bool]()
    ended = threading.Event()
    trial = threading.Thread(target=lambda: found.append(_reach(address, port, order["greeting"], ended)), daemon=True)
    if order["greeting"]:
        trial.start()
    try:
        text = _ask(host, json.dumps(order), access)
        after = time.time()
        ended.set()
        if order["greeting"]:
            trial.join(_TRY_SECONDS * 2)
        values = load(dict[str, Any], parse_json(text))
        health = load(Health, values.get("health"), "health")
        # Its clock was read at some moment between these two: only what lies outside is surely wrong.
        skew = max(0.0, health.time - after) + min(0.0, health.time - before)
        facts_there = parse_facts(json.dumps(values.get("facts")), host.name)
        return HostState(host, address, facts_there, health, outside_port=port if any(found) else 0, skew=skew)
    except CpuftError as error:
        kind = error.kind if isinstance(error, HostError) else ""
        return HostState(host, address, failure=str(error), kind=kind)
    except ValueError as error:
        return HostState(host, address, failure=f"its answer is not understood ({error}): is there a Python 3?")
    finally:
        ended.set()


def _reach(address: str, port: int, greeting: str, ended: threading.Event) -> bool:
    """Whether the probe that listens at a port of a host can be reached from here, before it has `ended`.

    Another program of another machine with the same private address does not send the greeting.
    """
    while not ended.is_set():
        with contextlib.suppress(OSError), socket.create_connection((address, port), _TRY_SECONDS) as connection:
            connection.settimeout(_TRY_SECONDS)
            if connection.recv(len(greeting), socket.MSG_WAITALL) == greeting.encode():
                return True
        ended.wait(_PAUSE_SECONDS)
    return False


def _ask(host: Host, order: str, access: Access) -> str:
    answer = access.transport.run(host, access.any_python("-c", _LOADER), order, _ANSWER_SECONDS)
    if answer.exit_code:
        said = " | ".join(answer.errors.strip().splitlines()[-3:])
        raise CpuftError(f"host {host.name}: its Python failed ({said})")
    return answer.output


def run_fixes(findings: Sequence[Finding], state: ClusterState, access: Access) -> list[str]:
    """Run the command of each finding that has one, on its host; a line each on how that went."""
    hosts = {one.name: one for one in state.hosts}
    lines = []
    for finding in findings:
        if finding.fix:
            one = hosts[finding.host]
            lines.append(f"{finding.code} on {finding.host}: {_fix(one, finding.fix, access)}")
    return lines


def _fix(one: HostState, command: tuple[str, ...], access: Access) -> str:
    answer = access.transport.run(one.host, command)
    return "done" if not answer.exit_code else f"failed ({' '.join(answer.said.split())[-200:]})"
