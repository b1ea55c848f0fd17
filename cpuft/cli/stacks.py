"""`cpuft stacks`: what every rank of an active run is doing, and which rank the others wait for."""

from __future__ import annotations

import os
import sys

import click

from cpuft.cli.options import Verb, complete_runs
from cpuft.launch.stack_dumps import RankDump, describe_state

_WIDTH = 400
_COLUMNS = ("rank", "host", "pid", "state", "operation", "location")


@click.command(cls=Verb, params=[click.Argument(["run"], metavar="RUN", shell_complete=complete_runs)])
def stacks(run: str) -> None:
    """Show what every rank of an active run is doing, and which rank the others wait for.

    RUN is the folder of the run. The full stack dumps are written to RUN/logs/rank-N.stack on the head host. The hosts
    have 15 seconds to answer; the exit code is 2 if one does not.
    """
    from cpuft.launch.run_locks import find_active_run
    from cpuft.launch.stack_dumps import diagnose, gather_dumps, write_dumps

    active_run = find_active_run(run, os.environ)
    active_run.access.transport.refuse_here(active_run.hosts[0], "cpuft stacks of a run on this machine")
    dumps, silent = gather_dumps(active_run)
    click.echo(format_dumps(dumps), nl=False)
    click.echo(f"cpuft: {diagnose(dumps)}")
    for reason in silent.values():
        click.echo(f"cpuft: error: {reason}", err=True)
    head_host = active_run.hosts[0]
    if head_host.name not in silent:
        write_dumps(active_run, dumps)
        where = "" if active_run.access.transport.is_here(head_host) else f" on {head_host.name}"
        click.echo(f"stacks: {active_run.work}/logs/rank-N.stack{where}")
    sys.exit(2 if silent else 0)


def format_dumps(dumps: tuple[RankDump, ...]) -> str:
    """Return a table with a row for each rank: its longest pending collective, else "after" and its last operations."""
    from cpuft.terminal import format_table

    return format_table(_COLUMNS, [_format_row(dump) for dump in dumps], left=len(_COLUMNS), width=_WIDTH)


def _format_row(dump: RankDump) -> tuple[str, ...]:
    now = f"{dump.pending[0].text}, {dump.pending[0].seconds:.1f} s" if dump.pending else ""
    before = f"after {dump.last_operations}" if dump.last_operations else ""
    pid = str(dump.pid) if dump.pid else ""
    return str(dump.rank), dump.host, pid, describe_state(dump), now or before, dump.location
