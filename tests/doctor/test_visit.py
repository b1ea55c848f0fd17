"""Whether this machine, on another network, reaches the ports of hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cpuft.doctor import visit
from cpuft.doctor.checks import find_all
from cpuft.doctor.visit import examine_hosts, is_outside
from cpuft.execute import Answer
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport

ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0
eth0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
wg0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
eth0 0005000A 0101A8C0 0003 0 0 0 00FFFFFF 0 0 0
"""
"""A laptop: everything through a gateway but its own network and what a tunnel leads to."""


@pytest.mark.parametrize(
    "address, outside",
    [("52.1.2.3", True), ("192.168.1.7", False), ("10.1.2.3", False), ("10.0.5.1", True), ("bastion.host", False)],
)
def test_what_lies_behind_a_gateway_is_another_network(address: str, outside: bool) -> None:
    assert is_outside(address, ROUTES) is outside
    assert not is_outside(address, ROUTES.splitlines()[0])
    assert not is_outside(address, "")


class OtherTransport(Transport):
    """This machine's address as if it were another machine's."""

    def is_here(self, host: Host) -> bool:
        return False

    def address(self, host: Host) -> str:
        return "127.0.0.1"

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=seconds)
        return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("asked, behind, reached", [(True, True, True), (True, False, False), (False, True, False)])
def test_a_port_that_is_reached_from_another_network_is_told(
    asked: bool, behind: bool, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visit, "_read_routes", lambda: ROUTES)
    monkeypatch.setattr(visit, "is_outside", lambda address, routes: behind and bool(routes))
    state = examine_hosts((Host("node1"),), Access(OtherTransport(), sys.executable), try_outside=asked)
    assert bool(state.hosts[0].outside_port) is reached
    found = [(finding.code, finding.severe) for finding in find_all(state)]
    assert (("CPUFT-036", False) in found) is reached


def test_a_firewall_keeps_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection comes through: the doctor's look ends in time, and nothing is told."""
    monkeypatch.setattr(visit, "_read_routes", lambda: ROUTES)
    monkeypatch.setattr(visit, "is_outside", lambda address, routes: True)
    monkeypatch.setattr(visit, "PORT_SECONDS", 0.5)
    monkeypatch.setattr(visit, "_reach", lambda address, port, greeting, ended: not ended.wait(20))
    state = examine_hosts((Host("node1"),), Access(OtherTransport(), sys.executable), try_outside=True)
    assert state.hosts[0].failure == ""
    assert find_all(replace(state, hosts=(replace(state.hosts[0], health=None),))) == []
    assert "CPUFT-036" not in {finding.code for finding in find_all(state)}
