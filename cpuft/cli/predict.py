"""`cpuft predict RUN`: what the model of a run says of other rows, on this machine. Imports no torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.common import compute_settings, find_model_folder, run_or_print
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, complete_runs, make_options, pick
from cpuft.config import PredictConfig, format_arguments
from cpuft.errors import CpuftError, suggest_names
from cpuft.tasks import FILE_TASKS, TASKS

if TYPE_CHECKING:
    from cpuft.plan import Setting, Step
    from cpuft.record import Header

_NOT_GLUE = ("demo", *FILE_TASKS)
_SPLITS = ("validation", "test")


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
    from cpuft.record import read_record

    asked = pick(PredictConfig, values)
    check_request(asked, read_record(asked.run).header)
    run_or_print(plan_prediction(asked, compute_settings(os.environ)), dry_run)


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
    find_model_folder(asked.run)


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
