"""`cpuft predict RUN`: what the model of a run says of other rows, on this machine. Imports no torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.common import compute_settings, find_model_folder, run_or_print
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, complete_runs, make_options, pick
from cpuft.config import PredictConfig, format_arguments, format_flag
from cpuft.errors import CpuftError, suggest_names
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, FILE_TASKS, TASKS, find_task

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
        click.Argument(["run"], metavar="[RUN]", required=False, default="", shell_complete=complete_runs),
    ],
)
def predict(dry_run: bool, **values: Any) -> None:
    """Predict with the model of a finished run, or compute embeddings.

    RUN is the folder of the run. The labels and probabilities of the examples in --file or --split are written to a CSV
    file, or for the test split of a GLUE task in the format that GLUE accepts. If the examples have labels, the metrics
    are printed as well. A text that begins with =, +, - or @ is written with an apostrophe in front, so that no
    spreadsheet runs it as a formula.

    If RUN has trained a decoder with --task chat or --causal, it answers or continues the prompts in --file; prompts
    and answers are written to the file.

    If RUN has trained an embedding model, or with --model instead of RUN, the embeddings of the texts in --file are
    written to a file of NumPy, or with ids to a Parquet file.
    """
    from cpuft.record import read_record

    asked, task = pick(PredictConfig, values), ""
    if asked.model:
        if asked.run:
            raise CpuftError("RUN and --model both name the model: leave out one of them")
        check_embedding_request(asked)
    elif asked.run:
        header = read_record(asked.run).header
        check_request(asked, header)
        task = "chat" if is_decoder_run(header) else header.task
    else:
        raise CpuftError("there is neither RUN nor --model: give the folder of a run, or name an embedding model")
    run_or_print(plan_prediction(asked, compute_settings(os.environ), task), dry_run)


def check_request(asked: PredictConfig, header: Header) -> None:
    """Check what `cpuft predict` is asked for.

    Parameters
    ----------
    header: of the record of the run.

    Raises
    ------
    CpuftError: not exactly one of --file and --split is given; --split is neither validation nor test; --split test for
        a task that is not GLUE's, or with --with-input; --data-dir with --file, or for a task that is not GLUE's; or
        the run has no model; or an option of embeddings is given for another task. For a run that has trained an
        embedding model, what `check_embedding_request` raises.
    """
    if is_embedding_task(header.task):
        check_embedding_request(asked)
        find_model_folder(asked.run)
        return
    if is_decoder_run(header):
        check_generation_request(asked)
        find_model_folder(asked.run)
        return
    _refuse_generation_options(asked, f"--task {header.task} trains no decoder")
    for name in ("id_column", "normalize", "dimensions", "prompt"):
        if value := getattr(asked, name):
            raise CpuftError(
                f"{format_flag(name, value)} is for embeddings, and --task {header.task} trains no embedding model: "
                f"leave it out, or give another RUN or --model"
            )
    if asked.np > 1:
        raise CpuftError("--np is for embeddings; other predictions use all cores of this host anyway: leave it out")
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


def check_embedding_request(asked: PredictConfig) -> None:
    """Check what `cpuft predict` is asked for with an embedding model.

    Raises CpuftError: --file is missing, or an option is given that embeddings do not have.
    """
    _refuse_generation_options(asked, "this model computes embeddings")
    if asked.split or not asked.file:
        raise CpuftError("an embedding model needs --file, without --split: give a file of texts")
    for name in ("label_column", "data_dir", "with_input"):
        if value := getattr(asked, name):
            flag = format_flag(name, value)
            raise CpuftError(f"{flag} is for predictions, and this model computes embeddings: leave it out")


def check_generation_request(asked: PredictConfig) -> None:
    """Check what `cpuft predict` is asked for with a decoder.

    Raises CpuftError: --file is missing, or an option is given that answers do not have.
    """
    if asked.split or not asked.file:
        raise CpuftError("a decoder answers prompts, and needs --file, without --split: give a file of prompts")
    default = PredictConfig()
    for name in ("label_column", "data_dir", "with_input", "id_column", "normalize", "dimensions", "prompt", "np"):
        if (value := getattr(asked, name)) != getattr(default, name):
            raise CpuftError(f"{format_flag(name, value)} is not for decoders, which answer prompts: leave it out")


def _refuse_generation_options(asked: PredictConfig, reason: str) -> None:
    default = PredictConfig()
    for name in ("max_new_tokens", "temperature"):
        if getattr(asked, name) != getattr(default, name):
            raise CpuftError(f"{format_flag(name)} is for decoders, and {reason}: leave it out")


def is_decoder_run(header: Header) -> bool:
    """Return whether a run, whose record has this header, has trained a decoder to predict tokens."""
    return header.task in TASKS and find_task(header.task, header.options.get("causal") is True).kind in DECODER_KINDS


def is_embedding_task(task: str) -> bool:
    """Return whether a run of the task of this name trains an embedding model; False for a name that is unknown."""
    return task in TASKS and TASKS[task].kind in EMBEDDING_KINDS


def plan_prediction(asked: PredictConfig, settings: tuple[Setting, ...], task: str = "") -> Step:
    """Return the step that predicts, in a Python process of its own on this machine. Nothing runs yet.

    Parameters
    ----------
    settings: environment variables of the process.
    task: name of the run's task, chat for any decoder; empty without a run.
    """
    from cpuft.argv import module_command
    from cpuft.plan import Step

    module = "cpuft.train.write_embeddings" if asked.model or is_embedding_task(task) else "cpuft.train.predict"
    if task == "chat":
        module = "cpuft.train.generate"
    command = (*module_command(sys.executable, module), *format_arguments(asked))
    return Step(f"predict with {asked.model or asked.run}", command, settings)
