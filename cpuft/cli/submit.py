"""`cpuft submit`: give a launch to a scheduler as a job."""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial
from typing import Any

import click

from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, make_options, pick
from cpuft.errors import CpuftError
from cpuft.schedulers import SCHEDULERS, parse_job
from cpuft.schedulers.base import JobLaunch, follow_job

_WAIT = click.Option(["--wait"], is_flag=True, help="Show the job's log until it ends, then exit with its exit code")
_LAUNCH = click.Argument(["argv"], nargs=-1, type=click.UNPROCESSED, metavar="-- launch --np N ...")


@click.group(cls=Verbs)
def submit() -> None:
    """Submit a launch to Slurm, Kubernetes or AWS Batch, as a job that resumes after interruptions."""


def _submit(kind: str, argv: tuple[str, ...], wait: bool, dry_run: bool, name: str, **values: Any) -> None:
    if wait and values.get("array"):
        raise CpuftError("--wait follows one job: leave it out with --array")
    launch, subject = _parse_launch(argv)
    name = name or f"{subject}-np{launch.np}-{time.strftime('%m%d-%H%M%S')}"
    scheduler_class = SCHEDULERS[kind]
    options = pick(scheduler_class.options, {**values, "name": name})
    scheduler = scheduler_class(options.scope)
    # Containers have cpuft on their PATH.
    own = shutil.which("cpuft", path=os.path.dirname(sys.executable)) if scheduler.has_submitters_files else None
    text = scheduler.render(options, launch, own or "cpuft")
    if dry_run:
        click.echo(text, nl=False)
        return
    job = scheduler.submit(text)
    click.echo(f"{kind}:{job}")
    if wait:
        sys.exit(follow_job(scheduler, job.rpartition("/")[2], partial(click.echo, nl=False)))


def _parse_launch(argv: tuple[str, ...]) -> tuple[JobLaunch, str]:
    """Return (the launch, its task or "script") after its own parser has accepted it.

    Raises CpuftError: `argv` is not a launch that a job can run. Raises click.UsageError: the parser refused it.
    """
    root = click.get_current_context().find_root()
    command = root.command.get_command(root, "launch") if isinstance(root.command, click.Group) else None
    if argv[:1] != ("launch",) or command is None:
        raise CpuftError("no launch is given: write it at the end, e.g. -- launch --np 8 --task mrpc")
    if any(argument != argument.encode(errors="replace").decode() for argument in argv):
        raise CpuftError("the launch contains bytes that are not UTF-8, which no job's text can hold: leave them out")
    end = argv.index("--") if "--" in argv else len(argv)
    script = argv[end:] if argv[end + 1 :] else ()
    with command.make_context("launch", list(argv[1:]), root) as context:
        values = context.params
    if values["dry_run"]:
        raise CpuftError("--dry-run is an option of cpuft submit: write it before -- launch")
    if len(values["script"]) != len(script[1:]):
        raise CpuftError("a script comes after a -- of its own, e.g. -- launch --np 8 -- train.py")
    known = {key: values[key] for key in ("np", "ppn", "run_dir", "resume")}
    return JobLaunch(argv[1:end], script, **known), "script" if script else values["task"]


for _kind, _scheduler in SCHEDULERS.items():
    _params = [*make_options(_scheduler.options), _WAIT, DRY_RUN, CONFIG_FILE, _LAUNCH]
    submit.add_command(Verb(_kind, callback=partial(_submit, _kind), params=_params, help=_scheduler.help))


@submit.command()
@click.argument("job")
def status(job: str) -> None:
    """Show the state of JOB and the last line of its log.

    JOB is what cpuft submit printed, such as slurm:1234. If the job has ended, its exit code is shown, too.
    """
    scheduler, name = parse_job(job)
    found = scheduler.status(name)
    end = "" if found.exit_code is None else f", exit code {found.exit_code}"
    click.echo(f"{job} {found.state}{end}" + "".join(f": {line}" for line in found.log.splitlines()[-1:]))


@submit.command()
@click.argument("job")
def cancel(job: str) -> None:
    """End JOB, if cpuft has submitted it; other jobs are refused.

    JOB is what cpuft submit printed, such as slurm:1234.
    """
    scheduler, name = parse_job(job)
    if not scheduler.is_ours(name):
        raise CpuftError(
            f"{job} was not submitted by cpuft submit: check the name, or end the job with the scheduler's own client"
        )
    scheduler.cancel(name)
