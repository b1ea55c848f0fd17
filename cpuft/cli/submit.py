"""`cpuft submit`: a launch as a job of somebody's scheduler."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from functools import partial
from typing import Any

import click

from cpuft.errors import CpuftError
from cpuft.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, make_options, pick
from cpuft.schedulers.clients import CLIENTS, follow, parse_job
from cpuft.schedulers.options import KINDS, JobConfig
from cpuft.schedulers.work import Work

_HELP = {
    "slurm": "Submit a launch by sbatch, e.g.: cpuft submit slurm -- launch --np 8 --task mrpc.",
    "kubernetes": "Submit a launch by kubectl, as an MPIJob of Kubeflow's operator.",
    "batch": "Submit a launch to AWS Batch, as a multi-node parallel job.",
}
_WAIT = click.Option(["--wait"], is_flag=True, help="show its log until it ends, and end as it does")
_WORDS = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="-- launch --np N ...")


@click.group(cls=Verbs)
def submit() -> None:
    """Give a launch to Slurm, Kubernetes or AWS Batch, as a job that goes on after interruptions."""


def _submit(kind: str, words: tuple[str, ...], wait: bool, dry_run: bool, name: str, **values: Any) -> None:
    if wait and values.get("array"):
        raise CpuftError("--wait follows one job: leave it out with --array")
    work, task = _check_words(words)
    name = name or f"{task}-np{work.np}-{time.strftime('%m%d-%H%M%S')}"
    # Slurm's hosts have this user's environment, which containers have on their path.
    here = shutil.which("cpuft", path=os.path.dirname(sys.executable)) if kind == "slurm" else None
    format_job = importlib.import_module(f"cpuft.schedulers.{kind}").format_job
    text = format_job(pick(JobConfig, {**values, "name": name}), work, here or "cpuft")
    if dry_run:
        click.echo(text, nl=False)
        return
    client = CLIENTS[kind](values.get("namespace") or values.get("region") or "")
    job = client.submit(text)
    click.echo(f"{kind}:{job}")
    if wait:
        sys.exit(follow(client, job.rpartition("/")[2], partial(click.echo, nl=False)))


def _check_words(words: tuple[str, ...]) -> tuple[Work, str]:
    """The launch, once its own parser took it, and what it does in a word. Raises CpuftError, or what click does."""
    root = click.get_current_context().find_root()
    launch = root.command.get_command(root, "launch") if isinstance(root.command, click.Group) else None
    if words[:1] != ("launch",) or launch is None:
        raise CpuftError("what is to be submitted? say it at the end: -- launch --np 8 --task mrpc")
    if any(word != word.encode(errors="replace").decode() for word in words):
        raise CpuftError("the launch's words hold half a character, which no job's text can: leave it out")
    end = words.index("--") if "--" in words else len(words)
    script = words[end:] if words[end + 1 :] else ()
    with launch.make_context("launch", list(words[1:]), root) as context:
        values = context.params
    if values["dry_run"] or len(values["script"]) != len(script[1:]):
        raise CpuftError("--dry-run stands before -- launch, and a script behind a -- of its own, as for cpuft launch")
    known = {key: values[key] for key in ("np", "ppn", "run_dir", "resume")}
    return Work(words[1:end], script, **known), "script" if script else values["task"]


for _kind, _names in KINDS.items():
    _options = [one for one in make_options(JobConfig) if one.name in _names]
    _params = [*_options, _WAIT, DRY_RUN, CONFIG_FILE, _WORDS]
    submit.add_command(Verb(_kind, callback=partial(_submit, _kind), params=_params, help=_HELP[_kind]))


@submit.command()
@click.argument("job")
def status(job: str) -> None:
    """Say in one line how JOB is, and what it said last."""
    client, name = parse_job(job)
    state, code, log = client.look(name)
    end = "" if code is None else f", exit code {code}"
    click.echo(f"{job} {state}{end}" + "".join(f": {line}" for line in log.splitlines()[-1:]))


@submit.command()
@click.argument("job")
def cancel(job: str) -> None:
    """End JOB, if cpuft has submitted it."""
    client, name = parse_job(job)
    if not client.is_ours(name):
        raise CpuftError(f"cpuft submit has not made {job}: check the name, or end it with its scheduler's own client")
    client.cancel(name)
