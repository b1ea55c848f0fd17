"""`cpuft launch`: train, or run a script of the user's own, on the ranks of one or more hosts."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

import click

from cpuft.cli.common import check_hosts, print_plans, say
from cpuft.cli.detached import move, refuse_detaching
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, given_options, make_options, pick, refuse_options
from cpuft.config.launch import DetachConfig, LaunchConfig, ResumeConfig, ScriptConfig
from cpuft.config.train import TrainConfig


@click.command(
    cls=Verb,
    params=[
        *make_options(TrainConfig),
        *make_options(ScriptConfig),
        *make_options(LaunchConfig),
        *make_options(ResumeConfig),
        *make_options(DetachConfig),
        DRY_RUN,
        CONFIG_FILE,
        click.Argument(["script"], nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT.py ARGS...]"),
    ],
)
def launch(script: tuple[str, ...], dry_run: bool, resume: str, detach: bool, **values: Any) -> None:
    """Train a model on the ranks of one or more hosts, or run your own script on them.

    To train, name a --task; without one, it is demo. To run your own script, put it with its own options after two
    dashes: cpuft launch --np 4 -- train.py --lr 1e-4. The script finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT in its environment, as under torchrun. Its ranks have to form one process group, or the
    run ends with an error; see --independent. Options of the training, such as --backend or --batch-size, are not for
    your own script.
    """
    from cpuft.launch.progress_bar import choose_progress
    from cpuft.launch.run import LaunchRequest, plan_request, run_launch

    if script:
        refuse_options(
            TrainConfig,
            "is for cpuft's own training, not for a script: leave it out, and write the options of the script behind "
            f"the script, as in cpuft launch -- {script[0]} --name value",
        )
    configs = pick(LaunchConfig, values), pick(TrainConfig, values), pick(ScriptConfig, values)
    if detach:
        refuse_detaching(configs[0], resume)
    progress = "lines" if dry_run else choose_progress()
    request = LaunchRequest(*configs, script, resume, frozenset(given_options()), progress)
    with ExitStack() as locks:
        with ExitStack() as sessions:
            planned = plan_request(request, os.environ, say, None if dry_run else locks, sessions)
            if dry_run and not detach:
                print_plans([planned.plan])
                return
            if planned.job and not dry_run:
                check_hosts(planned.cluster, planned.job.config)
            if detach:
                values["np"] = planned.cluster.ranks
                place = planned.cluster, planned.run_dir
                sys.exit(move("launch", values, script, *place, planned.plan.full_plan, dry_run))
        code, line = run_launch(request, planned, os.environ, say)
    click.echo(line, err=bool(code), nl=bool(line))
    sys.exit(code)
