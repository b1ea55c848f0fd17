"""Latency and bandwidth between all pairs of hosts: who measures with whom and when, and the table of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuft.doctor import link
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import side_by_side
from cpuft.measurement import Link
from cpuft.serialization import load, parse_json
from cpuft.terminal import format_table
from cpuft.words import WITHOUT_FOLDER

SECONDS = 0.5
"""Of sending each way over each link: some 60 MB at 1 Gbit/s."""

_ANSWER_SECONDS = 20.0
_LOADER = (
    f"{WITHOUT_FOLDER}\nimport json\n"
    "order=json.load(sys.stdin)\n"
    "link={'__name__':'link'}\n"
    "exec(order['source'],link)\n"
    "print(json.dumps(link['measure'](order)))\n"
)


def plan_pairs(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Rounds of pairs of 0 .. count - 1, such that all meet once and nobody is in two pairs of a round.

    Source: the circle method of round-robin tournaments.
    """
    seats = list(range(count + count % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(a, b) for a, b in zip(seats[: len(seats) // 2], reversed(seats)) if max(a, b) < count]
        rounds.append(tuple((min(pair), max(pair)) for pair in pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def measure_links(hosts: tuple[Host, ...], access: Access) -> tuple[Link, ...]:
    """Every link both ways; pairs that share no host are measured side by side.

    Raises CpuftError: naming every host that could not be asked.
    """
    addresses = [access.transport.address(host) for host in hosts]
    rounds = plan_pairs(len(hosts))
    port = random.SystemRandom().randrange(20000, 32000)  # below the range that the kernel gives to clients
    source = Path(link.__file__).read_text(encoding="utf-8")
    orders = []
    for own in range(len(hosts)):
        met = [pair for pairs in rounds for pair in pairs if own in pair]
        peers = [[addresses[sum(pair) - own], pair[0] == own] for pair in met]
        orders.append({"source": source, "port": port, "peers": peers, "seconds": SECONDS})
    seconds = _ANSWER_SECONDS * len(rounds)
    order_of = {host.name: json.dumps(order) for host, order in zip(hosts, orders)}
    answers = side_by_side(lambda host: _ask(host, order_of[host.name], access, seconds), hosts)
    names = {address: host.name for address, host in zip(addresses, hosts)}
    return read_links([host.name for host in hosts], names, answers)


def _ask(host: Host, order: str, access: Access, seconds: float) -> list[Any]:
    answer = access.transport.run(host, access.any_python("-c", _LOADER), order, seconds)
    try:
        return load(list[dict[str, Any]], parse_json(answer.output))
    except ValueError:
        raise CpuftError(
            f"host {host.name} measured nothing (it said {answer.said.strip()[-200:]!r}): is there a Python 3?"
        ) from None


def read_links(hosts: Sequence[str], names: dict[str, str], answers: Sequence[list[Any]]) -> tuple[Link, ...]:
    """Links from what each host measured: a rate is told by its receiver, a latency by the one that called."""
    told = {(host, names[line["peer"]]): line for host, lines in zip(hosts, answers) for line in lines}
    links = []
    for source in hosts:
        for target in hosts:
            if source != target:
                here, there = told.get((source, target), {}), told.get((target, source), {})
                latency = here.get("latency_us", there.get("latency_us", 0.0))
                error = there.get("error", here.get("error", ""))
                links.append(Link(source, target, latency, there.get("bits_per_second", 0.0), error))
    return tuple(links)


def format_links(links: Sequence[Link]) -> str:
    """A table: from each host, a line, to each host, a column."""
    hosts = list(dict.fromkeys(link.source for link in links))
    cells = {(one.source, one.target): _cell(one) for one in links}
    rows = [[a, *(cells.get((a, b), "-") for b in hosts)] for a in hosts]
    head = "latency (half a round trip) and rate of one TCP connection between hosts"
    return format_table(["from \\ to", *hosts], rows, head, left=1)


def _cell(one: Link) -> str:
    return one.error[:30] if one.error else f"{one.latency_us:.0f} us {one.bits_per_second / 1e9:.2f} Gbit/s"
