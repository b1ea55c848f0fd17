"""`cpuft runs`: the detached runs of a cluster, or all that this machine knows."""

from __future__ import annotations

import os
from typing import Any

import click

from cpuft.cli.common import say
from cpuft.cli.detached import place_options
from cpuft.cli.options import Verb, pick
from cpuft.config.launch import LaunchConfig

_COLUMNS = ("id", "command", "run", "host", "started", "state", "results")
_WIDTH = 400


@click.command(cls=Verb, params=place_options("those of all detached runs started from this machine"))
def runs(**values: Any) -> None:
    """List detached runs and their states.

    They are those on the hosts of --cluster or --hostfile, or without these options on the hosts of all detached runs
    that were started from this machine. Ended runs are listed for 30 days.
    """
    from cpuft.launch.find_runs import list_known_places, list_run_cells, list_runs, list_unseen
    from cpuft.terminal import format_table

    answers = [list_runs(place) for place in list_known_places(pick(LaunchConfig, values), os.environ)]
    rows = [list_run_cells(head, one) for found, _ in answers for head, one in found]
    errors = [error for _, silent in answers for error in silent]
    for line in (*map(str, errors), *list_unseen([row[0] for row in rows], errors, os.environ)):
        say(f"cpuft: {line}")
    click.echo(format_table(_COLUMNS, rows, left=len(_COLUMNS), width=_WIDTH), nl=False)
