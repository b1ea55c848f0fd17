"""`cpuft compare`: the same training on several numbers of ranks, and a report of the speedup."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import click

from cpuft.cli.common import check_hosts, print_plans, say
from cpuft.cli.detached import move, refuse_detaching
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, make_options, pick
from cpuft.config.compare import CompareConfig
from cpuft.config.fields import parse_numbers
from cpuft.config.launch import LAUNCH_ONLY, DetachConfig, LaunchConfig
from cpuft.config.train import TrainConfig

_RUN_DIR = "Folder for the reports and one folder per run; it must not exist yet (default: a new folder in runs/)"


@click.command(
    cls=Verb,
    params=[
        *make_options(CompareConfig),
        *make_options(TrainConfig),
        *make_options(LaunchConfig, "np", *LAUNCH_ONLY, texts={"run_dir": _RUN_DIR}),
        *make_options(DetachConfig),
        DRY_RUN,
        CONFIG_FILE,
    ],
)
def compare(dry_run: bool, detach: bool, **values: Any) -> None:
    """Train on several numbers of ranks, one after another, and report the speedup.

    Speedup and efficiency are relative to the run with the fewest ranks. Each run has its own folder in --run-dir. The
    reports are written there at the end, as report.txt, report.md and report.json, and as report.html if matplotlib and
    Jinja2 are installed. With --seeds, the reports also say whether all numbers of ranks reach the same metric. If a
    run fails, the command ends with its exit code, without the other runs and without a report.
    """
    from cpuft.launch.compare import plan_comparison, run_comparison
    from cpuft.launch.progress_bar import choose_progress
    from cpuft.launch.run_folder import choose_run_dir
    from cpuft.report.page import write_all

    config, train = pick(LaunchConfig, values | {"np": 1}), pick(TrainConfig, values)
    comparison = pick(CompareConfig, values)
    ranks = parse_numbers(comparison.np, "--np")
    if detach:
        refuse_detaching(config)
    run_dir = choose_run_dir(config.run_dir, f"{train.task}-compare")
    progress = "lines" if dry_run else choose_progress()
    planned = plan_comparison(ranks, config, train, comparison, run_dir, progress, os.environ)
    if dry_run and not detach:
        print_plans([run.plan for run in planned])
        return
    if not dry_run:
        check_hosts(planned[-1].cluster, config)
    if detach:
        stages = tuple(stage for run in planned for stage in run.plan.full_plan.stages)
        there = replace(planned[0].plan.full_plan, stages=stages)
        sys.exit(move("compare", values, (), planned[-1].cluster, run_dir, there, dry_run))
    code, _ = run_comparison(planned, progress, config.time_limit, say)
    if code:
        sys.exit(code)
    for line in write_all([run.run_dir for run in planned], run_dir):
        click.echo(line)
