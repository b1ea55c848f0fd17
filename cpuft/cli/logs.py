"""`cpuft logs`: what a detached run has printed until now."""

from __future__ import annotations

import os
from typing import Any

import click

from cpuft.cli.detached import place_options, run_argument
from cpuft.cli.options import Verb, pick
from cpuft.config.launch import LaunchConfig


@click.command(cls=Verb, params=[run_argument(), *place_options()])
def logs(run: str, **values: Any) -> None:
    """Print what a detached run has printed until now.

    RUN is the id of the run, or the beginning of the id, or the run folder on this machine.
    """
    from cpuft.launch.find_runs import find_run

    found, _ = find_run(run, pick(LaunchConfig, values), os.environ)
    found.show(only_past=True)
