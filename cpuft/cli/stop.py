"""`cpuft stop`: end a detached run."""

from __future__ import annotations

import os
from typing import Any

import click

from cpuft.cli.detached import place_options, run_argument
from cpuft.cli.options import Verb, pick
from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError


@click.command(cls=Verb, params=[run_argument(), *place_options()])
def stop(run: str, **values: Any) -> None:
    """Ask a detached run to save a checkpoint and end.

    RUN is the id of the run, or the beginning of the id, or the run folder on this machine. A training has two minutes,
    a script of your own 30 seconds; asked again, the run ends at once. cpuft attach then fetches what it has saved.
    """
    from cpuft.launch.detached_head import RUNNING
    from cpuft.launch.find_runs import find_run

    found, description = find_run(run, pick(LaunchConfig, values), os.environ)
    if description.state != RUNNING:
        raise CpuftError(f"run {found.order.id} does not run any more: see cpuft runs")
    found.head.ask("stop", found.order.id)
    click.echo(f"asked run {found.order.id} to save a checkpoint and end: cpuft attach {found.order.id} shows its end")
