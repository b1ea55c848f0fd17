"""Draw the hosts of runs and their cores, coloured by rank, as SVG for the report page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from cpuft.errors import counted
from cpuft.record import Record, RecordedRank
from cpuft.report.plots import COLOURS

MOST_HOSTS = 8
_COLUMNS = 16
_CELL, _GAP = 18, 3


@dataclass(frozen=True)
class HostDrawing:
    """A host of a run."""

    name: str
    ranks: str
    """How many ranks and cores, such as "1 rank, 1 of 2 cores"."""
    svg: str
    """Its cores as squares; empty if the record does not tell them."""


def draw_hosts(runs: Sequence[Record]) -> list[list[HostDrawing]]:
    """Return for each run drawings of its first 8 hosts; cores that only another run used are drawn in grey."""
    cores: dict[str, set[int]] = {}
    for run in runs:
        for one in run.header.ranks:
            cores.setdefault(one.host, set()).update(one.cpus)
    return [[_draw_host(run, host, sorted(cores[host])) for host in run.header.hosts[:MOST_HOSTS]] for run in runs]


def _draw_host(run: Record, host: str, cores: list[int]) -> HostDrawing:
    ranks = [one for one in run.header.ranks if one.host == host]
    used = {cpu for one in ranks for cpu in one.cpus}
    idle = f"{len(used)} of " if len(used) < len(cores) else ""
    said = f"{counted(len(ranks), 'rank')}, {idle}{counted(len(cores), 'core')}"
    return HostDrawing(host, said, _draw_cores(ranks, cores, f"{host}: {said}") if cores else "")


def _draw_cores(ranks: Sequence[RecordedRank], cores: Sequence[int], name: str) -> str:
    """Draw a square for each core, divided among the ranks that share it; the first one of a rank has its number."""
    step = _CELL + _GAP
    places = {cpu: (at % _COLUMNS * step, at // _COLUMNS * step) for at, cpu in enumerate(cores)}
    sharing = {cpu: [one.rank for one in ranks if cpu in one.cpus] for cpu in cores}
    width, height = min(len(cores), _COLUMNS) * step - _GAP, -(-len(cores) // _COLUMNS) * step - _GAP
    parts = [_draw_squares([(x, y, _CELL) for cpu, (x, y) in places.items() if not sharing[cpu]], "idle", "--line")]
    for one in ranks:
        squares = []
        for cpu in one.cpus:
            (x, y), others = places[cpu], sharing[cpu]
            share = _CELL / len(others)
            squares.append((x + others.index(one.rank) * share, y, share))
        title = f"rank {one.rank}, CPU {', '.join(map(str, one.cpus))}"
        parts.append(_draw_squares(squares, title, f"--c{one.rank % COLOURS}"))
        for left, top, share in squares[:1]:
            place = f'x="{left + share / 2:.4g}" y="{top + _CELL / 2:.4g}"'
            parts.append(f'<text {place} style="fill: var(--paper)">{one.rank}</text>' if share > _CELL / 3 else "")
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="{html.escape(name)}">{"".join(parts)}</svg>'


def _draw_squares(squares: Sequence[tuple[float, float, float]], title: str, colour: str) -> str:
    outlines = "".join(f"M{x:.5g} {y:.5g}h{width:.5g}v{_CELL}h-{width:.5g}z" for x, y, width in squares)
    return f'<path d="{outlines}" style="fill: var({colour})"><title>{title}</title></path>' if squares else ""
