"""One short function a verb: parse, call, print. Imports no torch."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import click

from cpuft import __version__
from cpuft.config import (
    LAUNCH_ALONE,
    BenchConfig,
    CompareConfig,
    LaunchConfig,
    ResumeConfig,
    ScriptConfig,
    TrainConfig,
)
from cpuft.errors import CpuftError, Interrupted, describe_disk, find_full_disk
from cpuft.options import (
    CONFIG_FILE,
    DRY_RUN,
    Verb,
    Verbs,
    complete_runs,
    given_options,
    make_options,
    pick,
    refuse_options,
)
from cpuft.terminal import check_output, keep_streams

_GROUPS = {
    "doctor": "cpuft.cli.doctor",
    "provision": "cpuft.cli.provision",
    "estimate": "cpuft.cli.estimate",
    "predict": "cpuft.cli.predict",
    "stacks": "cpuft.cli.stacks",
    "submit": "cpuft.cli.submit",
}
"""Verbs with modules of their own: imported when they are called for, or listed."""


class _Cli(Verbs):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_GROUPS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _GROUPS:
            return cast(click.Command, getattr(importlib.import_module(_GROUPS[cmd_name]), cmd_name))
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cpuft")
def cli() -> None:
    """Fine-tune transformers on a cluster of CPU hosts, and show honestly how much faster N hosts are than one."""


@cli.group(cls=Verbs)
def bench() -> None:
    """Measure the hosts."""


def verb(*params: click.Parameter, group: click.Group = cli) -> Callable[[Callable[..., None]], Verb]:
    """Decorator: make a function a verb with these options and --config."""

    def decorate(function: Callable[..., None]) -> Verb:
        made = Verb(function.__name__, callback=function, params=[*params, CONFIG_FILE], help=function.__doc__)
        group.add_command(made)
        return made

    return decorate


@verb(
    *make_options(TrainConfig),
    *make_options(ScriptConfig),
    *make_options(LaunchConfig),
    *make_options(ResumeConfig),
    DRY_RUN,
    click.Argument(["script"], nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT.py ARGS...]"),
)
def launch(script: tuple[str, ...], dry_run: bool, resume: str, **values: Any) -> None:
    """Train --task on --np ranks; or run a script of your own on them: cpuft launch --np 4 -- train.py --lr 1e-4.

    Your script finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.
    Its ranks have to form one process group, or the run ends with an error: see --independent.
    """
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.active_runs import lock_run
    from cpuft.launch.failures import describe_end
    from cpuft.launch.inputs import list_input_paths, load_allowed_paths, save_allowed_paths
    from cpuft.launch.plan import (
        Job,
        Launch,
        choose_run_dir,
        name_script,
        plan_fetching,
        plan_run,
        plan_script,
        refuse_other_launchers,
        wrap_script,
    )
    from cpuft.launch.remote import fetch_finished
    from cpuft.launch.restart import describe_limit, run_with_restarts
    from cpuft.launch.resume import check_newest_checkpoint, gather_resumed_run
    from cpuft.launch.supervise import SCRIPT_SECONDS, TRAINING_SECONDS

    config, train, how = pick(LaunchConfig, values), pick(TrainConfig, values), pick(ScriptConfig, values)
    if script:
        example = f"cpuft launch -- {script[0]} --name value"
        refuse_options(
            TrainConfig,
            "is for cpuft's own training, not for a script: leave it out, and write the options of the script behind "
            f"the script, as in {example}",
        )
    elif how.independent:
        raise CpuftError("--independent is for a script of yours: cpuft launch --independent -- train.py ...")
    command = plan_script(script) if script else ()
    if how.wrap:
        wrap_script(command, sys.executable, how.wrap)
    if script and config.np > 1 and not how.independent:
        refuse_other_launchers(script)
    name = name_script(command) if script else train.task
    if resume and not dry_run:  # before its state is read: another launch would change it
        click.get_current_context().with_resource(lock_run(resume))
    resumed = gather_resumed_run(resume, config, bool(script)) if resume else None
    if resumed and resumed.finished_on:
        there = [host for host in resumed.hosts if host.name == resumed.finished_on]
        cluster = gather_cluster(replace(config, np=1), tuple(there))
        fetching = plan_fetching(cluster, resumed)
        if dry_run:
            _print_plans([fetching])
            return
        _say(f"cpuft: the run came to its end on {resumed.finished_on}: fetching its results")
        fetch_finished(fetching, resumed.run_dir, cluster, _say)
        save_allowed_paths(resumed.run_dir, (), os.environ)
        click.echo(f"run: {resumed.run_dir}")
        return
    if resumed:
        config, train = resumed.take_over(config, train, given_options())
        for line in resumed.silent:
            click.echo(f"{line}; the run goes on without it", err=True)
    run_dir = resumed.run_dir if resumed else choose_run_dir(config.run_dir, f"{name}-np{config.np}")
    if not resumed and not dry_run:
        click.get_current_context().with_resource(lock_run(run_dir))
    cluster = gather_cluster(config, resumed.hosts if resumed else ())
    if resumed:
        check_newest_checkpoint(resumed.kept, cluster, run_dir)
    named = list_input_paths(train, given_options()) if resumed else list_input_paths(train)
    named |= load_allowed_paths(run_dir, os.environ) if resumed else set()
    may_send = frozenset(named) if resumed else None
    job = Job(config, train, command, how.wrap, how.independent, _progress(), may_send)
    plan = plan_run(job, cluster, run_dir, os.environ, resumed)
    if dry_run:
        _print_plans([replace(plan, notes=(*describe_limit(job, cluster), *plan.notes))])
        return
    _check_hosts(cluster, config)
    grace = config.grace_period if train.engine == "torch" else None
    if not script:
        save_allowed_paths(run_dir, named, os.environ)
    patience = SCRIPT_SECONDS * (command[0] == sys.executable) if command else TRAINING_SECONDS
    start = partial(_run, grace=grace, patience=patience)
    code = run_with_restarts(Launch(job, run_dir, os.environ), plan, cluster, start, _say)
    if not code and not script:
        save_allowed_paths(run_dir, (), os.environ)
    code, line = describe_end(code, run_dir, cluster.rank_hosts, config, script, how)
    click.echo(line, err=bool(code), nl=bool(line))
    sys.exit(code)


@verb(
    *make_options(CompareConfig),
    *make_options(TrainConfig),
    *make_options(LaunchConfig, "np", *LAUNCH_ALONE),
    DRY_RUN,
)
def compare(dry_run: bool, **values: Any) -> None:
    """Train --task on each number of ranks in turn, and report how much faster each was than the fewest."""
    from cpuft.launch.comparison import parse_numbers, plan_comparison
    from cpuft.launch.plan import choose_run_dir

    config, train = pick(LaunchConfig, values | {"np": 1}), pick(TrainConfig, values)
    comparison = pick(CompareConfig, values)
    ranks = parse_numbers(comparison.np)
    run_dir = choose_run_dir(config.run_dir, f"{train.task}-compare")
    planned = plan_comparison(ranks, config, train, comparison, run_dir, _progress(), os.environ)
    if dry_run:
        _print_plans([run.plan for run in planned])
        return
    _check_hosts(planned[-1].cluster, config)
    for run in planned:
        click.echo(f"{run.label}:", err=True)
        if code := _run(run.plan, run.run_dir, run.cluster, config.time_limit):
            sys.exit(code)
    _report([run.run_dir for run in planned], run_dir)


@verb(*make_options(LaunchConfig, "run_dir", "time_limit", "check", *LAUNCH_ALONE))
def env(**values: Any) -> None:
    """Print the settings cpuft would use as export lines with their reasons, for: eval "$(cpuft env)"."""
    from cpuft.hosts.cluster import gather_cluster, read_hosts
    from cpuft.launch.plan import plan_settings
    from cpuft.launch.settings import export_settings, unexportable_names
    from cpuft.plan import format_export

    config = pick(LaunchConfig, values)
    config = replace(config, np=max(config.np, len(read_hosts(config))))
    shared, per_host = plan_settings(gather_cluster(config), config, "gloo", os.environ)
    for name in unexportable_names(os.environ):
        click.echo(f"cpuft: left out, because no shell can set it: {name}", err=True)
    for setting in export_settings(shared + per_host[0]):
        click.echo(format_export(setting))


@verb(*make_options(BenchConfig), *make_options(LaunchConfig, *LAUNCH_ALONE), DRY_RUN, group=bench)
def comm(dry_run: bool, **values: Any) -> None:
    """Measure every backend between the ranks: latency, algorithm and bus bandwidth, as nccl-tests define them.

    ms is the median, beside it the middle half of all repetitions; busy is the share of a rank's cores that the
    backend keeps busy meanwhile; x gloo says how many times as fast as gloo it is.
    """
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.inputs import add_transfers
    from cpuft.launch.plan import choose_run_dir, plan_bench
    from cpuft.report.plots import write_plot

    config = pick(LaunchConfig, values)
    run_dir = choose_run_dir(config.run_dir, f"comm-np{config.np}")
    cluster = gather_cluster(config)
    plan = plan_bench(cluster, config, pick(BenchConfig, values), cluster.work_dir(run_dir), os.environ)
    plan = add_transfers(plan, (), {}, cluster, run_dir)
    if dry_run:
        _print_plans([plan])
        return
    _check_hosts(cluster, config)
    code = _run(plan, run_dir, cluster, config.time_limit)
    if not code:
        click.echo(f"record: {run_dir}/comm.jsonl")
        try:
            click.echo(f"plot: {write_plot(f'{run_dir}/comm.jsonl')}")
        except CpuftError as error:
            click.echo(f"no plot: {error}")
    sys.exit(code)


@verb(
    click.Option(["--json", "as_json"], is_flag=True, help="print one JSON object"),
    click.Option(["--markdown"], is_flag=True, help="print Markdown"),
    click.Option(["--html"], is_flag=True, help="write a page, report.html, into the one RUN, or where you are"),
    click.Option(["--estimate"], default="", metavar="FILE", help="with --html: draw what estimate --json foretold"),
    click.Argument(["runs"], nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs),
)
def report(runs: tuple[str, ...], as_json: bool, markdown: bool, html: bool, estimate: str, config: str) -> None:
    """Report on recorded runs: directories of runs, or of a comparison."""
    from cpuft.record import read_record
    from cpuft.report.comparison import compare
    from cpuft.report.page import find_runs, page_path, read_predictions, write_page
    from cpuft.report.tables import format_markdown, format_text, to_json

    if estimate and not html:
        raise CpuftError("--estimate says what the page shows: add --html")
    found, others = find_runs(runs)
    if others:
        click.echo(f"skipped, because there is no record.jsonl in them: {', '.join(others)}", err=True)
    records = [read_record(run) for run in found]
    comparison = compare(records)
    if html:
        predictions = read_predictions(estimate) if estimate else []
        click.echo(f"page: {write_page(records, page_path(runs), predictions)}")
    elif as_json:
        click.echo(json.dumps(to_json(comparison), indent=2))
    else:
        click.echo(format_markdown(comparison) if markdown else format_text(comparison), nl=False)


def _progress() -> str:
    return "bar" if sys.stderr.isatty() else "lines"


def _print_plans(plans: Sequence[Any]) -> None:
    from cpuft.plan import Plan, format_plan

    stages = tuple(stage for plan in plans for stage in plan.whole.stages)
    ways = {host: way for plan in plans for host, way in plan.ways.items()}
    click.echo(format_plan(Plan(stages, plans[0].notes, ways), os.getcwd()), nl=False)


def _check_hosts(cluster: Any, config: LaunchConfig) -> None:
    from cpuft.doctor.examine import check_before_launch

    if config.check:
        check_before_launch(cluster, _say)


def _run(
    plan: Any, run_dir: str, cluster: Any, seconds: float, grace: float | None = None, patience: float = 0.0
) -> int:
    from cpuft.launch.remote import run_attempt

    return run_attempt(plan, run_dir, cluster, seconds, _say, grace, patience)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _report(runs: list[str], run_dir: str) -> None:
    from cpuft.report.page import write_all

    for said in write_all(runs, run_dir):
        click.echo(said)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Entry point. Bad input: one line, exit code 2; a full disk: one line, exit code 74."""
    keep_streams()
    exit_code = 2
    try:
        code = _run_verb(args)
        check_output()
        sys.exit(code)
    except CpuftError as error:
        message, exit_code = str(error), error.exit_code
    except click.ClickException as error:
        message = _click_message(error)
    except click.exceptions.Abort:
        sys.exit(130)
    except Interrupted as stopped:
        click.echo(f"cpuft: stopped by {stopped}: run the same command again to go on", err=True)
        sys.exit(stopped.exit_code)
    except OSError as error:
        full = find_full_disk(error)
        message, exit_code = (str(full), full.exit_code) if full else (describe_disk(error), 2)
        if not message:
            raise
    click.echo(f"cpuft: error: {message}", err=True)
    sys.exit(exit_code)


def _run_verb(args: Sequence[str] | None) -> Any:
    """The verb's exit code."""
    try:
        return cli.main(args=args, prog_name="cpuft", standalone_mode=False) or 0
    except SystemExit as ending:
        return ending.code


def _click_message(error: click.ClickException) -> str:
    """Click's message in one line, with the next move."""
    context = getattr(error, "ctx", None)
    name = shlex.join(context.command_path.split()) if context else "cpuft"
    return str(CpuftError(f"{' '.join(error.format_message().split())} (see {name} --help)"))
