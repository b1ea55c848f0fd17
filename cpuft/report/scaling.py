"""The results of `cpuft bench scaling` as a table, and as an HTML page with a timeline of each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpuft.record import Record, ScalingLine
from cpuft.report.page import host_row, list_settings, render_page
from cpuft.report.plots import Line, draw_lines, draw_timeline
from cpuft.terminal import format_table

COLUMNS = (
    "hosts",
    "link\nMbit/s",
    "gradients\nas",
    "MB per\nstep",
    "CPU ms\nper step",
    "ideal\nms",
    "step\nms",
    "waiting",
    "slowed",
    "of the\nideal",
)
"""Headings of the table."""


def scaling_row(line: ScalingLine) -> list[str]:
    """Return the cells of a case, in the order of COLUMNS."""
    how = f"{line.compression}, every {line.sync_every}" if line.sync_every > 1 else line.compression
    return [
        str(line.ranks),
        f"{line.bits_per_second / 1e6:g}",
        how,
        f"{line.bytes_per_step / 1e6:.2f}",
        f"{line.cpu_seconds * 1e3:.1f}",
        f"{line.ideal_seconds * 1e3:.1f}",
        f"{(line.step_seconds + line.taken_seconds) * 1e3:.1f}",
        f"{line.waiting:.1%}",
        f"{line.slowed:.1%}",
        f"{line.share:.1%}",
    ]


def list_notes(lines: Sequence[ScalingLine]) -> list[str]:
    """Return what a reader must know about the figures of one or more cases."""
    slowdowns = sorted({round(line.slowdown, 1) for line in lines})
    text = ", ".join(f"{one:g}" for one in slowdowns)
    return [
        "Ranks waited for the recorded times of a step instead of computing, and sent the real messages with gloo, "
        f"slowed down {text} times. The ideal is the step of a host that does not communicate.",
        f"waiting: share of a step in which a host (cores: {lines[0].cores:g}) waits for messages. slowed: share that "
        "the CPU time of communication, which was measured on this machine, takes from computing.",
        "Not simulated: the latency of a network, steps of different length, and other traffic on the links.",
    ]


def format_scaling(lines: Sequence[ScalingLine], record: Record) -> str:
    """Return the table of one or more cases as text for a terminal, with a newline at its end.

    Parameters
    ----------
    record: of the run whose step was replayed.
    """
    rows = [scaling_row(line) for line in lines]
    return format_table(COLUMNS, rows, f"{record.header.task}, {record.header.model}", list_notes(lines))


def format_verdict(lines: Sequence[ScalingLine]) -> str:
    """Return the main result in one sentence: the share of the ideal speed of the case with the most hosts.

    Of several cases with as many hosts, it is that of the fastest link.
    """
    line = max(lines, key=lambda one: (one.ranks, one.bits_per_second, one.share))
    rate = f"{line.bits_per_second / 1e6:g} Mbit/s"
    return f"{line.ranks} hosts with {rate} reach {line.share:.0%} of the speed of as many independent hosts."


def write_scaling_page(lines: Sequence[ScalingLine], record: Record, path: Path) -> Path:
    """Write the page of one or more cases to `path`, and return `path`. An older page of cpuft there is replaced.

    Parameters
    ----------
    record: of the run whose step was replayed.

    Raises
    ------
    CpuftError: matplotlib or Jinja2 is not installed, or something else than a page of cpuft is at `path`.
    OSError: the page cannot be written.
    """
    return render_page(path, lambda: _describe(lines, record))


def _describe(lines: Sequence[ScalingLine], record: Record) -> dict[str, Any]:
    return {
        "title": f"{record.header.task} in slow motion",
        "verdict": format_verdict(lines),
        "columns": [column.replace("\n", " ") for column in COLUMNS],
        "rows": [scaling_row(line) for line in lines],
        "legend": [],
        "figures": {
            "Share of the ideal": [_draw_shares(lines)],
            "Messages and computing of the first rank in one step": [
                (_label(line), draw_timeline(_label(line), line.intervals)) for line in lines
            ],
        },
        "links": [],
        "hosts": [host_row(record)],
        "settings": list_settings([record]),
        "notes": list_notes(lines),
    }


def _label(line: ScalingLine) -> str:
    return f"{line.ranks} hosts, {line.bits_per_second / 1e6:g} Mbit/s, {scaling_row(line)[2]}"


def _draw_shares(lines: Sequence[ScalingLine]) -> tuple[str, str]:
    """Return the caption and the SVG of the share of the ideal over the number of hosts, a line for each link."""
    groups: dict[str, list[ScalingLine]] = {}
    for line in lines:
        groups.setdefault(f"{line.bits_per_second / 1e6:g} Mbit/s, {scaling_row(line)[2]}", []).append(line)
    drawn = [
        Line(label, [float(one.ranks) for one in group], [100 * one.share for one in group], colour=number)
        for number, (label, group) in enumerate(groups.items())
    ]
    axes = ("hosts", "percent of the ideal")
    return "Speed relative to as many independent hosts.", draw_lines("Share of the ideal", axes, drawn, "o", True)
