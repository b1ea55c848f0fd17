"""What several verbs share: printing plans and messages, checks of hosts and runs, and settings of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpuft.errors import CpuftError

if TYPE_CHECKING:
    from cpuft.config.launch import LaunchConfig
    from cpuft.hosts.cluster import Cluster
    from cpuft.plans import RunPlan, Setting, Step

MODEL = "model"
_FOR_COMPUTE = ("GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "OMP_", "THP_")
"""Prefixes of the settings for threads and memory, which a single process needs as well as a rank."""


def say(line: str) -> None:
    """Print a line on standard error."""
    click.echo(line, err=True)


def print_plans(plans: Sequence[RunPlan]) -> None:
    """Print the stages of plans as one bash script, with the notes of the first plan and without `partial_cleanup`."""
    from cpuft.plans import Plan, format_plan

    stages = tuple(stage for plan in plans for stage in plan.full_plan.stages)
    command_prefixes = {host: way for plan in plans for host, way in plan.command_prefixes.items()}
    click.echo(format_plan(Plan(stages, plans[0].notes, command_prefixes), os.getcwd()), nl=False)


def plan_module(why: str, module: str, arguments: Sequence[str]) -> Step:
    """Return the step that runs a module, such as "cpuft.train.export", here, with the variables of a single rank."""
    from cpuft.argv import module_command
    from cpuft.plans import Step

    return Step(why, (*module_command(sys.executable, module), *arguments), compute_settings(os.environ))


def run_or_print(step: Step, dry_run: bool) -> None:
    """Run a step on this machine and exit with its exit code, or print it as a bash script with `dry_run`."""
    from cpuft.execute import run_step
    from cpuft.plans import Plan, format_plan

    if not dry_run:
        sys.exit(run_step(step, os.environ))
    click.echo(format_plan(Plan(((step,),)), os.getcwd()), nl=False)


def check_hosts(cluster: Cluster, config: LaunchConfig) -> None:
    """Check the hosts as the doctor does: raise CpuftError, or print warnings. Without `config.check`, do nothing."""
    from cpuft.doctor.examine import check_before_launch

    if config.check:
        check_before_launch(cluster, say)


def find_model_folder(run: str) -> Path:
    """Return RUN/model, the folder of the trained model. Raises CpuftError: there is no config.json in it."""
    folder = Path(run, MODEL)
    if not Path(run).exists():
        raise CpuftError(f"there is no folder {run}: give the folder of an earlier run")
    if not (folder / "config.json").exists():
        raise CpuftError(f"{run} has no folder {MODEL}, as the run is unfinished or had --no-save-model: give another")
    return folder


def compute_settings(environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the settings for threads and memory of a single rank here; values in `environ` replace cpuft's."""
    from cpuft.hosts.cluster import LOCAL, Access, gather_facts
    from cpuft.hosts.topology import Interface, plan_placement
    from cpuft.launch.rank_variables import host_settings, keep_user_values, shared_settings, user_variables

    facts, loopback = gather_facts((LOCAL,), Access()), Interface("lo", "127.0.0.1", "")
    ranks = plan_placement(facts[0].cores, 1, 0)
    settings = (*shared_settings(loopback, 0, facts, 1), *host_settings(facts[0], loopback, ranks, False, ""))
    chosen = tuple(setting for setting in settings if setting.name.startswith(_FOR_COMPUTE))
    return keep_user_values(chosen, user_variables(environ))
