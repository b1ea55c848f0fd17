"""What several verbs share: printing plans and messages, and the check of the hosts before a launch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cpuft.config import LaunchConfig
    from cpuft.hosts.cluster import Cluster
    from cpuft.plan import RunPlan


def say(line: str) -> None:
    """Print a line on standard error."""
    click.echo(line, err=True)


def print_plans(plans: Sequence[RunPlan]) -> None:
    """Print the stages of one or more plans of runs, in their order, as one bash script on standard output.

    The notes are those of the first plan. `partial_cleanup` is left out.
    """
    from cpuft.plan import Plan, format_plan

    stages = tuple(stage for plan in plans for stage in plan.full_plan.stages)
    command_prefixes = {host: way for plan in plans for host, way in plan.command_prefixes.items()}
    click.echo(format_plan(Plan(stages, plans[0].notes, command_prefixes), os.getcwd()), nl=False)


def check_hosts(cluster: Cluster, config: LaunchConfig) -> None:
    """Run a short form of the doctor's checks on the hosts of a cluster, and print each warning on standard error.

    Does nothing if --no-check was given (`config.check` is False).

    Raises
    ------
    CpuftError: a check found a problem that would make the run fail or hang. The message has the codes of the checks.
    """
    from cpuft.doctor.examine import check_before_launch

    if config.check:
        check_before_launch(cluster, say)
