"""`cpuft attach`: what a detached run prints, and its results."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from cpuft.cli.common import say
from cpuft.cli.detached import place_options, run_argument
from cpuft.cli.options import Verb, pick
from cpuft.config.launch import LaunchConfig
from cpuft.errors import escape_controls

_RUN_DIR = (
    "Folder on this machine for the results; it must not exist yet (default: the one named when the run was started "
    "here, else runs/NAME)"
)


@click.command(cls=Verb, params=[run_argument(), *place_options(run_dir=_RUN_DIR)])
def attach(run: str, **values: Any) -> None:
    """Show what a detached run prints, and fetch its results when it ends.

    RUN is the id of the run, or the beginning of the id, or the run folder on this machine. What the run has printed
    before is shown first, and the exit code is that of the run. Ctrl-C leaves the run as it is. The first cpuft attach
    that sees the end fetches the results.
    """
    from cpuft.launch.detached import HeadLostError
    from cpuft.launch.find_runs import choose_folder, find_run
    from cpuft.launch.run_state import FINISHED

    config = pick(LaunchConfig, values)
    found, description = find_run(run, config, os.environ)
    if found.order.claimed and not description.fetched:
        found = choose_folder(found, description, config.run_dir)
    try:
        try:
            code = found.show()
        except HeadLostError:
            # The command may have been killed when the results were whole.
            description = find_run(found.order.id, config, os.environ)[1]
            if not (description.has_results and description.phase == FINISHED):
                raise
            code = 0
        if where := found.fetch(say) if found.order.claimed else "":
            click.echo(f"run: {escape_controls(where)}", err=bool(code))
    except KeyboardInterrupt:
        say(f"cpuft: run {found.order.id} goes on. {found.describe_commands()}")
        code = 130
    sys.exit(code)
