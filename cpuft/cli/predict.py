"""`cpuft predict RUN`: what the model of a run says of other rows; embeddings also on several hosts. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.common import check_hosts, find_model_folder, plan_module, print_plans, run_or_print, say
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, complete_runs, make_options, pick
from cpuft.config.fields import format_arguments, format_flag
from cpuft.config.launch import PLACE_OPTIONS, LaunchConfig
from cpuft.config.predict import PredictConfig
from cpuft.embedding_files import name_embeddings
from cpuft.errors import IO_ERROR, RESUMABLE, CpuftError
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, FILE_TASKS, TASKS, find_task

if TYPE_CHECKING:
    from cpuft.plans import Step
    from cpuft.record import Header

_NOT_GLUE = ("demo", *FILE_TASKS)
_OPTIONS = {
    "predicts labels": ("label_column", "data_dir", "with_input", "threshold"),
    "computes embeddings": ("normalize", "dimensions", "prompt", "np"),
    "answers prompts": ("max_new_tokens", "temperature"),
}
"""Options that are for one sort of model only, by what such a model does."""
_RUN_DIR = (
    "Folder of the run that computes embeddings on several hosts; it must not exist yet (default: a new folder in "
    "runs/)"
)


@click.command(
    cls=Verb,
    params=[
        *make_options(PredictConfig, "run"),
        *make_options(LaunchConfig, only=PLACE_OPTIONS, texts={"run_dir": _RUN_DIR}),
        DRY_RUN,
        CONFIG_FILE,
        click.Argument(["run"], metavar="[RUN]", required=False, default="", shell_complete=complete_runs),
    ],
)
def predict(dry_run: bool, **values: Any) -> None:
    """Predict with the model of a finished run, or compute embeddings.

    RUN is the folder of the run. The labels and probabilities of the examples in --file or --split are written to a CSV
    file or one of another format, or for the test split of a GLUE task in the format that GLUE accepts. If the examples
    have labels, these are written beside the predictions, and the metrics are printed. In CSV and TSV files, a text
    that begins with =, +, - or @ gets an apostrophe in front, so that no spreadsheet runs it as a formula.

    If RUN has trained a decoder with --task chat or --causal, it answers or continues the prompts in --file; prompts
    and answers are written to the file.

    If RUN has trained an embedding model, or with --model instead of RUN, the embeddings of the texts in --file are
    written to a file of NumPy, or with ids to a Parquet file. With --hostfile or --cluster, several hosts compute them.
    The options of hosts and ranks, and --run-dir, are for embeddings only.
    """
    from cpuft.record import read_record

    asked, config, task = pick(PredictConfig, values), pick(LaunchConfig, values), ""
    if asked.model:
        if asked.run:
            raise CpuftError("RUN and --model both name the model: leave out one of them")
        _check_file_request(asked, "computes embeddings")
    elif asked.run:
        header = read_record(asked.run).header
        check_request(asked, header, config)
        task = "chat" if _is_decoder_run(header) else header.task
    else:
        raise CpuftError("there is neither RUN nor --model: give the folder of a run, or name an embedding model")
    if (asked.model or is_embedding_task(task)) and needs_launch(config):
        embed_on_hosts(asked, config, dry_run)
    else:
        run_or_print(plan_prediction(asked, task), dry_run)


def needs_launch(config: LaunchConfig) -> bool:
    """Return whether mpirun starts the ranks: options but --np are not at the default, or --np > 1 in a scheduler's job
    with several hosts. CpuftError: the job's hosts cannot be read.
    """
    from cpuft.hosts.cluster import read_hosts

    return replace(config, np=0) != LaunchConfig() or (config.np > 1 and len(read_hosts(config)) > 1)


def embed_on_hosts(asked: PredictConfig, config: LaunchConfig, dry_run: bool) -> None:
    """Compute embeddings on a launch's ranks and move the file to its place, or print the plan; exit if the ranks or
    the move fail. CpuftError: the launch is not possible, or the file cannot be fetched.
    """
    from cpuft.execute import run_step
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.attempt import run_attempt
    from cpuft.launch.lease_renewal import renew_leases
    from cpuft.launch.plan import plan_embedding
    from cpuft.launch.results import NotStoredError
    from cpuft.launch.run_folder import choose_run_dir
    from cpuft.plans import RunPlan, local_step

    path = name_embeddings(asked)
    run_dir = choose_run_dir(config.run_dir, f"embeddings-np{config.np}")
    result = Path(run_dir, f"embeddings{path.suffix}")
    cluster = gather_cluster(config)
    plan = plan_embedding(cluster, config, replace(asked, output=result.name), run_dir, os.environ)
    store = local_step(f"move the embeddings to {path}", "move", str(result), str(path.absolute()))
    if dry_run:
        print_plans([plan, RunPlan(results=((store,),))])
        return
    check_hosts(cluster, config)
    try:
        with renew_leases(cluster.access, say):
            code = run_attempt(plan, run_dir, cluster, config.time_limit, say)
        if code:
            sys.exit(1 if code == RESUMABLE else code)  # there is nothing that could be resumed
    except NotStoredError:
        raise NotStoredError(
            f"{cluster.work_dir(run_dir)}/{result.name} on {cluster.head} could not be fetched, or not be stored in "
            f"{run_dir} here: check the network and the room here, then copy the file from that host"
        ) from None
    finally:
        for part in Path(run_dir).glob(f"{result.name}.*.new"):  # of a rank 0 that was killed
            part.unlink(missing_ok=True)
    if run_step(store, os.environ):
        say(f"cpuft: error: {result} could not be moved to {path}: make room there, then move the file")
        sys.exit(IO_ERROR)
    click.echo(f"embeddings: {path}")


def check_request(asked: PredictConfig, header: Header, config: LaunchConfig | None = None) -> None:
    """Raise CpuftError if the run has no model or cannot predict what is asked for, or not on the hosts of `config`."""
    if is_embedding_task(header.task):
        _check_file_request(asked, "computes embeddings")
    else:
        here = "is for embeddings; other predictions use this host only: leave it out"
        _refuse_given(config or LaunchConfig(), PLACE_OPTIONS, here)
        if _is_decoder_run(header):
            _check_file_request(asked, "answers prompts")
        else:
            _check_label_request(asked, header)
    find_model_folder(asked.run)


def _check_file_request(asked: PredictConfig, does: str) -> None:
    if asked.split or not asked.file:
        raise CpuftError(f"a model that {does} needs --file, without --split: give a file of texts")
    _refuse_others(asked, does)


def _check_label_request(asked: PredictConfig, header: Header) -> None:
    _refuse_others(asked, "predicts labels")
    if bool(asked.file) == bool(asked.split):
        problem = "both are given" if asked.file else "neither is given"
        raise CpuftError(f"--file and --split: {problem}; give one of them to say which examples to predict")
    if asked.split == "test" and (header.task in _NOT_GLUE or header.task not in TASKS):
        raise CpuftError(f"--task {header.task} has no test examples: give a file with --file")
    if asked.split == "test" and asked.with_input:
        raise CpuftError("--with-input adds columns that GLUE does not accept: leave it out, or use --file")
    if asked.id_column and not asked.file:
        raise CpuftError("--id-column names a column of --file: give --file in place of --split, or leave it out")
    if asked.data_dir and (asked.file or header.task in _NOT_GLUE):
        raise CpuftError("--data-dir is for --split of a GLUE task: add --split, or leave out --data-dir")


def _refuse_others(asked: PredictConfig, does: str) -> None:
    for what, names in _OPTIONS.items():
        if what != does:
            _refuse_given(asked, names, f"is for a model that {what}, and this one {does}: leave it out")


def _refuse_given(config: PredictConfig | LaunchConfig, names: Sequence[str], reason: str) -> None:
    default = type(config)()
    for name in names:
        if (value := getattr(config, name)) != getattr(default, name):
            raise CpuftError(f"{format_flag(name, value)} {reason}")


def _is_decoder_run(header: Header) -> bool:
    return header.task in TASKS and find_task(header.task, header.options.get("causal") is True).kind in DECODER_KINDS


def is_embedding_task(task: str) -> bool:
    """Return whether a run of this task trains an embedding model; False for a name that is unknown."""
    return task in TASKS and TASKS[task].kind in EMBEDDING_KINDS


def plan_prediction(asked: PredictConfig, task: str) -> Step:
    """Return the step that predicts in a process of its own; `task` is "chat" for any decoder, "" without a run."""
    module = "predict" if task != "chat" else "generate"
    module = "write_embeddings" if asked.model or is_embedding_task(task) else module
    why = f"predict with {asked.model or asked.run}"
    return plan_module(why, f"cpuft.train.{module}", format_arguments(asked))
