"""`cpuft predict RUN`: what the model of a run says of other rows, on this machine. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, complete_runs, make_options, pick
from cpuft.config import PredictConfig, format_arguments
from cpuft.errors import CpuftError, suggest_names
from cpuft.tasks import TASKS

if TYPE_CHECKING:
    from cpuft.plan import Setting, Step
    from cpuft.record import Header

MODEL = "model"
"""Folder of the trained model in the folder of a run."""
_NOT_GLUE = ("demo", "files", "text")
_SPLITS = ("validation", "test")
_FOR_COMPUTE = ("KMP_", "LD_PRELOAD", "MALLOC_", "OMP_", "THP_")
"""Prefixes of the settings for threads and memory, which a single process needs as well as a rank."""


@click.command(
    cls=Verb,
    params=[
        *make_options(PredictConfig, "run"),
        DRY_RUN,
        CONFIG_FILE,
        click.Argument(["run"], metavar="RUN", shell_complete=complete_runs),
    ],
)
def predict(dry_run: bool, **values: Any) -> None:
    """Predict with the model of a finished run.

    RUN is the folder of the run. The labels and probabilities of the examples in --file or --split are written to a CSV
    file, or for the test split of a GLUE task in the format that GLUE accepts. If the examples have labels, the metrics
    are printed as well. A text that begins with =, +, - or @ is written with an apostrophe in front, so that no
    spreadsheet runs it as a formula.
    """
    from cpuft.execute import run_step
    from cpuft.plan import Plan, format_plan
    from cpuft.record import read_record

    asked = pick(PredictConfig, values)
    check_request(asked, read_record(asked.run).header)
    step = plan_prediction(asked, compute_settings(os.environ))
    if dry_run:
        click.echo(format_plan(Plan(((step,),)), os.getcwd()), nl=False)
        return
    sys.exit(run_step(step, os.environ, None, lambda: None))


def check_request(asked: PredictConfig, header: Header) -> None:
    """Check what `cpuft predict` is asked for.

    Parameters
    ----------
    header: of the record of the run.

    Raises
    ------
    CpuftError: not exactly one of --file and --split is given; --split is neither validation nor test; --split test for
        a task that is not GLUE's, or with --with-input; --data-dir with --file, or for a task that is not GLUE's; or
        the run has no model.
    """
    if bool(asked.file) == bool(asked.split):
        problem = "both are given" if asked.file else "neither is given"
        raise CpuftError(f"--file and --split: {problem}; give one of them to say which examples to predict")
    if asked.split and asked.split not in _SPLITS:
        raise CpuftError(f"{asked.split[:60]!r} is not a value of --split: {suggest_names(asked.split, _SPLITS)}")
    if asked.split == "test" and (header.task in _NOT_GLUE or header.task not in TASKS):
        raise CpuftError(f"--task {header.task} has no test examples: give a file with --file")
    if asked.split == "test" and asked.with_input:
        raise CpuftError(
            "--with-input adds columns that GLUE does not accept for its test examples: leave it out, or use --file"
        )
    if asked.data_dir and (asked.file or header.task in _NOT_GLUE):
        raise CpuftError(
            "--data-dir is for a GLUE task, of whose data --split chooses a part: add --split, or leave out --data-dir"
        )
    if not (Path(asked.run) / MODEL / "config.json").exists():
        raise CpuftError(
            f"{asked.run} has no folder {MODEL}, because the run is unfinished or had --no-save-model: give another run"
        )


def plan_prediction(asked: PredictConfig, settings: tuple[Setting, ...]) -> Step:
    """Return the step that predicts, in a Python process of its own on this machine. Nothing runs yet.

    Parameters
    ----------
    settings: environment variables of the process.
    """
    from cpuft.argv import module_command
    from cpuft.plan import Step

    command = (*module_command(sys.executable, "cpuft.train.predict"), *format_arguments(asked))
    return Step(f"predict with {asked.run}", command, settings)


def compute_settings(environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the settings for threads and memory that a single rank on this machine would have.

    These are the variables that begin with KMP_, LD_PRELOAD, MALLOC_, OMP_ or THP_. A value of the user's own in
    `environ` replaces cpuft's.

    Raises CpuftError: the facts about this machine, such as its cores, cannot be gathered.
    """
    from cpuft.hosts.cluster import LOCAL, Access, gather_facts
    from cpuft.hosts.topology import Interface, plan_placement
    from cpuft.launch.settings import host_settings, keep_user_values, shared_settings, user_variables

    facts, loopback = gather_facts((LOCAL,), Access()), Interface("lo", "127.0.0.1", "")
    ranks = plan_placement(facts[0].cores, 1, 0)
    settings = (*shared_settings(loopback, 0, facts, 1), *host_settings(facts[0], loopback, ranks, False, ""))
    chosen = tuple(setting for setting in settings if setting.name.startswith(_FOR_COMPUTE))
    return keep_user_values(chosen, user_variables(environ))
