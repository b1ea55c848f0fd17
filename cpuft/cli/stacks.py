"""`cpuft stacks RUN`: what every rank of a run that goes on does, and whom the others wait for. Imports no torch."""

from __future__ import annotations

import os
import sys

import click

from cpuft.cli.options import Verb, complete_runs
from cpuft.launch.stack_dumps import RankDump, describe_state

_WIDTH = 400
_COLUMNS = ("rank", "host", "pid", "state", "operation", "stands at")


@click.command(cls=Verb, params=[click.Argument(["run"], metavar="RUN", shell_complete=complete_runs)])
def stacks(run: str) -> None:
    """Show what every rank of an active run is doing, and which rank the others wait for.

    RUN is the folder of the run. The full stack dumps are written to RUN/logs/rank-N.stack on the head host.
    """
    from cpuft.launch.active_runs import find_active_run
    from cpuft.launch.stack_dumps import diagnose, gather_dumps, write_dumps

    place = find_active_run(run, os.environ)
    dumps, silent = gather_dumps(place)
    click.echo(format_dumps(dumps), nl=False)
    click.echo(f"cpuft: {diagnose(dumps).text}")
    for reason in silent.values():
        click.echo(f"cpuft: error: {reason}", err=True)
    if place.hosts[0].name not in silent:
        write_dumps(place, dumps)
        where = "" if place.access.transport.is_here(place.hosts[0]) else f" on {place.hosts[0].name}"
        click.echo(f"stacks: {place.work}/logs/rank-N.stack{where}")
    sys.exit(2 if silent else 0)


def format_dumps(dumps: tuple[RankDump, ...]) -> str:
    """A line for each rank."""
    from cpuft.terminal import format_table

    return format_table(_COLUMNS, [_format_row(dump) for dump in dumps], left=len(_COLUMNS), width=_WIDTH)


def _format_row(dump: RankDump) -> tuple[str, ...]:
    now = f"{dump.waits[0].text}, {dump.waits[0].seconds:.1f} s" if dump.waits else ""
    before = f"after {dump.last}" if dump.last else ""
    pid = str(dump.pid) if dump.pid else ""
    return str(dump.rank), dump.host, pid, describe_state(dump), now or before, dump.place
