"""`cpuft submit`: give a launch or a sweep to a scheduler as a job."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, make_options, pick
from cpuft.cli.sweep import list_options_for_resume
from cpuft.config.fields import format_options
from cpuft.errors import CpuftError, refuse_other_systems
from cpuft.schedulers import SCHEDULERS, parse_job
from cpuft.schedulers.base import JobLaunch, JobSweep, follow_job
from cpuft.serialization import is_count

_COMMANDLINE, _DEFAULT_MAP = ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP
_WAIT = click.Option(["--wait"], is_flag=True, help="Show the job's log until it ends, then exit with its exit code")
_NODES_WITH_SWEEPS = "Number of hosts, required for a sweep (default for a launch: --np divided by --ppn, else --np)"


@click.group(cls=Verbs)
def submit() -> None:
    """Submit a launch to Slurm, Kubernetes or a cloud, as a job that resumes after interruptions.

    Slurm and Kubernetes also take a sweep: cpuft submit slurm --nodes 4 -- sweep --task rte --seed 1..5.
    """


def _submit(kind: str, argv: tuple[str, ...], wait: bool, dry_run: bool, name: str, **values: Any) -> None:
    if wait and values.get("array"):
        raise CpuftError("--wait follows one job: leave it out with --array")
    scheduler_class = SCHEDULERS[kind]
    if scheduler_class.has_submitters_files:  # the hosts run the cpuft of this machine
        refuse_other_systems(f"cpuft submit {kind}", "run it on a login node")
    launch: JobLaunch
    if argv[:1] == ("sweep",):
        if not scheduler_class.takes_sweeps:
            raise CpuftError(
                f"cpuft submit {kind} takes no sweep: use slurm or kubernetes, or cpuft sweep --cluster NAME"
            )
        launch, subject = _parse_sweep(argv, scheduler_class.has_submitters_files)
    else:
        launch, subject = _parse_launch(argv, values["nodes"], scheduler_class.has_submitters_files)
    name = name or f"{subject}-np{launch.np}-{time.strftime('%m%d-%H%M%S')}"
    options = pick(scheduler_class.options, {**values, "name": name})
    scheduler = scheduler_class(options.scope)
    # Containers have cpuft on their PATH.
    own = shutil.which("cpuft", path=os.path.dirname(sys.executable)) if scheduler.has_submitters_files else None
    text = scheduler.render(options, launch, own or "cpuft")
    if dry_run:
        click.echo(text, nl=False)
        return
    job = f"{kind}:{scheduler.submit(text)}"
    click.echo(job)
    if wait:
        sys.exit(follow_job(*parse_job(job), partial(click.echo, nl=False)))


def _parse_launch(argv: tuple[str, ...], nodes: int, sees_files: bool) -> tuple[JobLaunch, str]:
    """Return (the launch, its task or "script") after its own parser has accepted it.

    `nodes` is 0 for as many hosts as the ranks need; with `sees_files`, the job sees the files of this machine.
    """
    if argv[:1] != ("launch",):
        raise CpuftError("no launch is given: write it at the end, e.g. -- launch --np 8 --task mrpc")
    end = argv.index("--") if "--" in argv else len(argv)
    script = argv[end:] if argv[end + 1 :] else ()
    context = _parse("launch", argv[1:], sees_files)
    values = context.params
    if len(values["script"]) != len(script[1:]):
        raise CpuftError("a script comes after a -- of its own, e.g. -- launch --np 8 -- train.py")
    known = {key: values[key] for key in ("np", "ppn", "run_dir", "resume")}
    if values["resume"] and context.get_parameter_source("np") not in (_COMMANDLINE, _DEFAULT_MAP):
        known["np"], most = _read_ranks(values["resume"], sees_files)
        known["ppn"] = values["ppn"] or (0 if nodes else most)
    # The hosts are not known yet: one rank on each, so that the job has room for as many as it starts.
    options = argv[1:end] if known["np"] else (*argv[1:end], f"--np={max(nodes, 1) * max(known['ppn'], 1)}")
    known["np"] = known["np"] or max(nodes, 1) * max(known["ppn"], 1)
    return JobLaunch(options, script, **known), "script" if script else values["task"]


def _read_ranks(run: str, sees_files: bool) -> tuple[int, int]:
    """Return (recorded number of ranks of a run, number of ranks on the host that had most)."""
    from cpuft.record import read_record

    if sees_files:
        with suppress(CpuftError):
            header = read_record(run).header
            return header.world_size, max(Counter(rank.host for rank in header.ranks).values(), default=0)
    raise CpuftError(f"the ranks of the run in {run} cannot be read here: add --np N to the launch")


def _parse_sweep(argv: tuple[str, ...], sees_files: bool) -> tuple[JobSweep, str]:
    from cpuft.sweep.study import import_optuna, read_sweep

    context = _parse("sweep", argv[1:], sees_files)
    values = context.params
    if values["action"]:
        raise CpuftError("a job runs a sweep, and has no status to show: leave out the words after the options")
    given = {name for name in values if context.get_parameter_source(name) in (_COMMANDLINE, _DEFAULT_MAP)}
    resume_options = tuple(format_options({name: values[name] for name in list_options_for_resume() if name in given}))
    hosts, ppn = values["hosts_per_run"], values["ranks_per_host"]
    if sees_files:
        import_optuna()  # without it, the job would end when it has waited in the queue
    if values["resume"] and sees_files:
        settings = read_sweep(values["resume"]).settings
        recorded = dict(option.split("=", 1) for option in settings.options if "=" in option)
        ppn = int(text) if is_count(text := recorded.get("--ppn", "1")) else 1  # the journal was edited
        hosts = settings.hosts_per_run
    np = hosts * ppn
    return JobSweep(argv[1:], (), np, ppn, values["run_dir"], values["resume"], resume_options), "sweep"


def _parse(verb: str, argv: tuple[str, ...], sees_files: bool) -> click.Context:
    """Return the context of a verb of cpuft whose parser has accepted these arguments for a job."""
    root = click.get_current_context().find_root()
    command = root.command.get_command(root, verb) if isinstance(root.command, click.Group) else None
    assert command is not None
    if any(argument != argument.encode(errors="replace").decode() for argument in argv):
        raise CpuftError(f"the {verb} contains bytes that are not UTF-8, which no job's text can hold: leave them out")
    with command.make_context(verb, list(argv), root) as context:
        if not sees_files and context.get_parameter_source("config") is _COMMANDLINE:
            raise CpuftError(f"the job's containers lack the file of --config: write its options after -- {verb}")
        if context.params["dry_run"]:
            raise CpuftError(f"--dry-run is an option of cpuft submit: write it before -- {verb}")
        if context.params.get("detach"):
            raise CpuftError("a job goes on when you log out: leave out --detach")
        if context.params["cluster"]:
            raise CpuftError(f"the {verb} of a job uses the hosts of the job: leave out --cluster")
        return context


for _kind, _scheduler in SCHEDULERS.items():
    _texts = {"nodes": _NODES_WITH_SWEEPS} if _scheduler.takes_sweeps else {}
    _form = "-- launch|sweep ..." if _scheduler.takes_sweeps else "-- launch ..."
    _params = [
        *make_options(_scheduler.options, texts=_texts),
        _WAIT,
        DRY_RUN,
        CONFIG_FILE,
        click.Argument(["argv"], nargs=-1, type=click.UNPROCESSED, metavar=_form),
    ]
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
        raise CpuftError(f"{job} was not submitted by cpuft submit: end it with the scheduler's own client")
    scheduler.cancel(name)
