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
"""In a run's directory, what it has learned."""
_NOT_GLUE = ("demo", "files", "text")
_SPLITS = ("validation", "test")
_FOR_COMPUTE = ("KMP_", "LD_PRELOAD", "MALLOC_", "OMP_", "THP_")
"""How names begin of the settings that a rank would have, and one process alone has too."""


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
    """Raises CpuftError: rows are asked for in no way or in two, the task has no such split, or RUN no model."""
    if bool(asked.file) == bool(asked.split):
        both = "both say which rows: give one of them" if asked.file else "which rows? name one"
        raise CpuftError(f"--file and --split: {both}")
    if asked.split and asked.split not in _SPLITS:
        raise CpuftError(f"{asked.split[:60]!r} is not a value of --split: {suggest_names(asked.split, _SPLITS)}")
    if asked.split == "test" and (header.task in _NOT_GLUE or header.task not in TASKS):
        raise CpuftError(f"--task {header.task} has no test rows: name a file with --file")
    if asked.split == "test" and asked.with_input:
        raise CpuftError("--with-input adds columns, and GLUE takes its test rows without: leave it out, or use --file")
    if asked.data_dir and (asked.file or header.task in _NOT_GLUE):
        raise CpuftError("--data-dir holds the splits of a GLUE task: add --split, or leave it out")
    if not (Path(asked.run) / MODEL / "config.json").exists():
        raise CpuftError(
            f"{asked.run} holds no {MODEL}/: it has not come to its end, or had --no-save-model: name a finished run"
        )


def plan_prediction(asked: PredictConfig, settings: tuple[Setting, ...]) -> Step:
    """The process that predicts."""
    from cpuft.argv import module_command
    from cpuft.plan import Step

    words = (*module_command(sys.executable, "cpuft.train.predict"), *format_arguments(asked))
    return Step(f"predict with {asked.run}", words, settings)


def compute_settings(environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """What a rank alone on this machine would have for its threads and its memory."""
    from cpuft.hosts.cluster import LOCAL, Access, gather_facts
    from cpuft.hosts.topology import Interface, plan_placement
    from cpuft.launch.settings import host_settings, keep_user_values, shared_settings, user_variables

    facts, loopback = gather_facts((LOCAL,), Access()), Interface("lo", "127.0.0.1", "")
    ranks = plan_placement(facts[0].cores, 1, 0)
    settings = (*shared_settings(loopback, 0, facts, 1), *host_settings(facts[0], loopback, ranks, False, ""))
    chosen = tuple(setting for setting in settings if setting.name.startswith(_FOR_COMPUTE))
    return keep_user_values(chosen, user_variables(environ))
