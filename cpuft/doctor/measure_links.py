"""Latency and bandwidth between all pairs of hosts: which pairs are measured when, and the table of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpuft.doctor.examine import choose_port, run_probe
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import map_hosts
from cpuft.record import Link
from cpuft.serialization import load
from cpuft.terminal import format_table

SECONDS = 0.5
"""How long each host sends over each link in each direction: about 60 MB at 1 Gbit/s."""
_ROUND_SECONDS = 20.0


def plan_pairs(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return all pairs (smaller, larger) of the numbers 0 to count - 1 in rounds, with no number twice in a round.

    There are count - 1 rounds, or `count` if it is odd; ((),) for count 1. Source: the circle method of tournaments.
    """
    seats = list(range(count + count % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(a, b) for a, b in zip(seats[: len(seats) // 2], reversed(seats)) if max(a, b) < count]
        rounds.append(tuple((min(pair), max(pair)) for pair in pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def measure_links(hosts: tuple[Host, ...], access: Access) -> tuple[Link, ...]:
    """Measure the links between all pairs of hosts in both directions, and return them by source, then by target.

    This takes a little more than 1 s for each host, at most 20 s for each. A link that could not be measured has its
    `error`. Raises CpuftError: a host has no address, cannot be reached or cannot run the measurement.
    """
    addresses = access.transport.addresses(hosts)
    rounds = plan_pairs(len(hosts))
    common = {"port": choose_port(), "seconds": SECONDS}
    orders = {}
    for own, host in enumerate(hosts):
        pairs = [pair for pairs in rounds for pair in pairs if own in pair]
        peers = [[addresses[sum(pair) - own], pair[0] == own] for pair in pairs]
        orders[host.name] = common | {"peers": peers}
    seconds = _ROUND_SECONDS * len(rounds)
    results = map_hosts(lambda host: _measure_on(host, orders[host.name], access, seconds), hosts)
    names = {address: host.name for address, host in zip(addresses, hosts)}
    return read_links([host.name for host in hosts], names, results)


def _measure_on(host: Host, order: dict[str, Any], access: Access, seconds: float) -> list[Any]:
    try:
        return load(list[dict[str, Any]], run_probe(host, access, order, "measure_links(order)", seconds))
    except ValueError as error:
        raise CpuftError(f"host {host.name} could not measure its links ({error}): install Python 3 there") from None


def read_links(hosts: Sequence[str], names: dict[str, str], results: Sequence[list[Any]]) -> tuple[Link, ...]:
    """Return a link for each ordered pair of different hosts, by source, then by target, in the order of `hosts`.

    `results` has what `probe.measure_links` returned on each of `hosts`; `names` are their names by address. The rate
    is that of the target, the latency that of the host that connected, the error the target's, else the source's. 0 or
    "" stands for a rate, latency or error that neither has.
    """
    found = {(host, names[line["peer"]]): line for host, lines in zip(hosts, results) for line in lines}
    links = []
    for source in hosts:
        for target in hosts:
            if source != target:
                here, there = found.get((source, target), {}), found.get((target, source), {})
                latency = here.get("latency_us", there.get("latency_us", 0.0))
                error = there.get("error", here.get("error", ""))
                links.append(Link(source, target, latency, there.get("bits_per_second", 0.0), error))
    return tuple(links)


def format_links(links: Sequence[Link]) -> str:
    """Return a table of sources (rows) and targets: "50 us 9.41 Gbit/s", 30 characters of an error, or "-" for none."""
    hosts = list(dict.fromkeys(link.source for link in links))
    cells = {
        (one.source, one.target): one.error[:30] or f"{one.latency_us:.0f} us {one.bits_per_second / 1e9:.2f} Gbit/s"
        for one in links
    }
    rows = [[source, *(cells.get((source, target), "-") for target in hosts)] for source in hosts]
    title = "Latency (half a round trip) and bandwidth of one TCP connection between hosts"
    return format_table(["from \\ to", *hosts], rows, title, left=1)
