"""`cpuft env`: the environment variables of a launch, for a shell."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import click

from cpuft.cli.options import CONFIG_FILE, Verb, make_options, pick
from cpuft.config.launch import LAUNCH_ONLY, LaunchConfig


@click.command(
    cls=Verb, params=[*make_options(LaunchConfig, "run_dir", "time_limit", "check", *LAUNCH_ONLY), CONFIG_FILE]
)
def env(**values: Any) -> None:
    """Print the environment variables that cpuft sets for its ranks, as export lines.

    The variables are those of the first host, with the backend gloo and, unless --np or --ppn says more, one rank on
    each host. A comment above each line has its reason. To set the variables in a shell, run: eval "$(cpuft env)"
    """
    from cpuft.hosts.cluster import gather_cluster, read_hosts
    from cpuft.launch.rank_variables import export_settings, plan_settings
    from cpuft.plans import format_export

    config = pick(LaunchConfig, values)
    # One rank on each host: a shell that sets these variables starts one process.
    config = replace(config, np=max(config.np, len(read_hosts(config))))
    shared, per_host = plan_settings(gather_cluster(config), config, "gloo", os.environ)
    for setting in export_settings(shared + per_host[0]):
        click.echo(format_export(setting))
