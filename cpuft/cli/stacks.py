"""`cpuft stacks RUN`: what every rank of a run that goes on does, and whom the others wait for. Imports no torch."""

from __future__ import annotations

import os
import sys

import click

from cpuft.launch.stack_dumps import Sight, describe_state
from cpuft.options import Verb, complete_runs

_WIDTH = 400
_COLUMNS = ("rank", "host", "pid", "state", "operation", "stands at")


@click.command(cls=Verb, params=[click.Argument(["run"], metavar="RUN", shell_complete=complete_runs)])
def stacks(run: str) -> None:
    """Show what every rank of RUN, which goes on, is doing, and which of them holds up the others.

    All stacks are kept in RUN/logs/rank-N.stack; of a run on hosts with disks of their own, they come back with it.
    """
    from cpuft.launch.active_runs import find_place
    from cpuft.launch.stack_dumps import gather_sights, judge, write_sights

    place = find_place(run, os.environ)
    sights, silent = gather_sights(place)
    click.echo(format_sights(sights), nl=False)
    click.echo(f"cpuft: {judge(sights).text}")
    for reason in silent.values():
        click.echo(f"cpuft: error: {reason}", err=True)
    if place.hosts[0].name not in silent:
        write_sights(place, sights)
        where = "" if place.access.transport.is_here(place.hosts[0]) else f" on {place.hosts[0].name}"
        click.echo(f"stacks: {place.work}/logs/rank-N.stack{where}")
    sys.exit(2 if silent else 0)


def format_sights(sights: tuple[Sight, ...]) -> str:
    """A line for each rank."""
    from cpuft.terminal import format_table

    return format_table(_COLUMNS, [_format_row(sight) for sight in sights], left=len(_COLUMNS), width=_WIDTH)


def _format_row(sight: Sight) -> tuple[str, ...]:
    now = f"{sight.waits[0].text}, {sight.waits[0].seconds:.1f} s" if sight.waits else ""
    before = f"after {sight.last}" if sight.last else ""
    pid = str(sight.pid) if sight.pid else ""
    return str(sight.rank), sight.host, pid, describe_state(sight), now or before, sight.place
