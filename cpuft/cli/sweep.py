"""`cpuft sweep`: many runs with different options, on all hosts at the same time, and a table of the results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cpuft.cli.common import say
from cpuft.cli.detached import move, refuse_detaching
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, given_options, make_options, pick
from cpuft.config.fields import format_flag, format_options, option_names
from cpuft.config.launch import DetachConfig, LaunchConfig
from cpuft.config.sweep import SweepConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import RESUMABLE, CpuftError, Interrupted
from cpuft.sweep.search_space import list_variable_options

if TYPE_CHECKING:
    from cpuft.sweep.places import Place
    from cpuft.sweep.study import Sweep

_REDRAW_SECONDS = 1.0
_STATUS = "status"


@click.command(
    cls=Verb,
    params=[
        *make_options(SweepConfig),
        *make_options(TrainConfig, lists=list_variable_options()),
        *make_options(LaunchConfig, "np", "ppn", "only_hosts"),
        *make_options(DetachConfig),
        DRY_RUN,
        CONFIG_FILE,
        click.Argument(["action"], nargs=-1, metavar="[status FOLDER]"),
    ],
)
def sweep(action: tuple[str, ...], dry_run: bool, **values: Any) -> None:
    """Train with many combinations of options, on all hosts at the same time, and compare the results.

    Options with numbers or choices, and --model, may have several values with commas between them, such as
    --learning-rate 1e-5,3e-5, or a range of whole numbers, such as --seed 1..5. Each combination is a run of its own;
    runs that differ only in --seed are repetitions of one configuration. Each run trains on --hosts-per-run hosts, and
    as soon as it has ended, its hosts get the next one. A run that fails does not end the sweep, and the run of a host
    that is lost continues on another host from a copy of its checkpoint.

    cpuft sweep status FOLDER shows what a sweep is doing, and cpuft report FOLDER its results.
    """
    from cpuft.sweep.queue import format_status
    from cpuft.sweep.study import is_active, read_sweep

    if action:
        if len(action) != 2 or action[0] != _STATUS:
            raise CpuftError("cpuft sweep takes no arguments but `status FOLDER`: write options with two dashes")
        click.echo(format_status(read_sweep(action[1]), 0, time.time(), is_active(action[1])))
        return
    config = pick(SweepConfig, values)
    if values["detach"]:
        _detach(config, values, dry_run)
    if config.resume:
        _resume(config, dry_run)
    else:
        _begin(config, values, dry_run)


def _detach(config: SweepConfig, values: dict[str, Any], dry_run: bool) -> NoReturn:
    """Move a new sweep to the head host, after it has been planned here as far as possible, and exit."""
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.run_folder import choose_run_dir
    from cpuft.plans import Plan
    from cpuft.sweep.places import plan_places
    from cpuft.sweep.plan import plan_sweep

    launch = pick(LaunchConfig, values)
    refuse_detaching(replace(launch, copy_checkpoints=False), config.resume)
    plan_sweep(config, _list_training_options(values))
    folder = choose_run_dir(launch.run_dir, "sweep")
    plan_places(launch, config.hosts_per_run, config.parallel)
    cluster = gather_cluster(replace(launch, np=1))
    say(f"cpuft: the sweep is moved to {cluster.head} and ends with that host; nobody continues it then")
    sys.exit(move("sweep", values, (), cluster, folder, Plan(), dry_run, ("optuna",)))


def _begin(config: SweepConfig, values: dict[str, Any], dry_run: bool) -> None:
    from cpuft.launch.run_folder import choose_run_dir
    from cpuft.sweep.places import plan_places
    from cpuft.sweep.plan import plan_sweep
    from cpuft.sweep.study import NOT_STORED, create_sweep, make_sweep

    launch = pick(LaunchConfig, values)
    settings, is_maximized, runs = plan_sweep(config, _list_training_options(values))
    options = _list_launch_options()
    folder = choose_run_dir(launch.run_dir, "sweep")
    places = plan_places(launch, config.hosts_per_run, config.parallel)
    if dry_run:
        first = make_sweep(folder, settings, is_maximized, runs)
        if config.search == "tpe":
            first.choose_next()
        _print_plan(first, options, places)
        return
    if config.search == "tpe" and settings.pruner == "none" and config.pruner == "auto":
        say("cpuft: no run is pruned, because runs do not evaluate while training: add --eval-every to allow it")
    settings = replace(
        settings,
        launch=[option for option in options if option.partition("=")[0] not in map(format_flag, NOT_STORED)],
        working_folder=os.getcwd(),
        parallel=config.parallel,
    )
    create_sweep(folder, settings, is_maximized, runs)
    _carry_out(folder, config, options, places)


def _resume(config: SweepConfig, dry_run: bool) -> None:
    from cpuft.sweep.places import make_launch_config, plan_places
    from cpuft.sweep.study import read_sweep

    fixed = {*option_names(TrainConfig), *option_names(SweepConfig), "run_dir"}
    fixed -= {"resume", *list_options_for_resume()}
    for name in given_options():
        if name in fixed:
            raise CpuftError(f"{format_flag(name)} is not for --resume, which takes it from the sweep: leave it out")
    folder = os.path.abspath(config.resume)
    found = read_sweep(folder)
    settings, given = found.settings, _list_launch_options()
    if not os.path.isdir(settings.working_folder or "."):
        raise CpuftError(f"{settings.working_folder}, where the sweep's relative paths begin, is gone: make it again")
    names = {option.partition("=")[0] for option in given}
    # Hosts that are given now replace those of the sweep.
    names |= {"--cluster", "--hostfile"} if names & {"--cluster", "--hostfile"} else set()
    options = [option for option in settings.launch if option.partition("=")[0] not in names] + given
    # What fitted the hosts of the sweep says nothing about others.
    before = 0 if names & {"--cluster", "--hostfile"} else settings.parallel
    places = plan_places(make_launch_config(options), settings.hosts_per_run, config.parallel or before)
    if dry_run:
        _print_plan(found, options, places)
        return
    _carry_out(folder, config, options, places)


def list_options_for_resume() -> list[str]:
    """Return the names, with underscores, of the options that may be given with --resume: parallel,
    stop_after_failures, and all of LaunchConfig but np, ppn, only_hosts and run_dir.
    """
    own = ("np", "ppn", "only_hosts", "run_dir")
    launch = [name for name in option_names(LaunchConfig) if name not in own]
    return ["parallel", "stop_after_failures", *launch]


def _list_training_options(values: dict[str, Any]) -> dict[str, Any]:
    given = given_options()
    return {name: values[name] for name in option_names(TrainConfig) if name in given}


def _list_launch_options() -> list[str]:
    """Return the options of the command line that every launch of the sweep gets, too, with absolute paths."""
    own = [name for name in option_names(LaunchConfig) if name != "run_dir"]
    context, given = click.get_current_context(), given_options()
    values = {name: context.params[name] for name in own if name in given}
    return [_make_path_absolute(option) for option in format_options(values)]


def _make_path_absolute(option: str) -> str:
    """Return an option of a launch such as "--hostfile=hosts" with an absolute path, if it is one of this machine."""
    flag, _, path = option.partition("=")
    absolute = os.path.abspath(os.path.expanduser(path))
    # --mpirun may be a name that is looked up on PATH, or a path on another host.
    is_mpirun = flag == "--mpirun" and "/" in path and os.path.exists(absolute)
    return f"{flag}={absolute}" if path and (flag in ("--hostfile", "--ssh-config") or is_mpirun) else option


def _print_plan(sweep: Sweep, options: list[str], places: list[Place]) -> None:
    """Print the commands of the runs that are still to be made, as a shell script that makes one after another."""
    import shlex

    from cpuft.sweep.queue import name_in_trackers, plan_trial
    from cpuft.sweep.search_space import describe_values
    from cpuft.sweep.study import DONE, PRUNED

    click.echo("#!/usr/bin/env bash\nset -eu")
    click.echo(f"# {sweep.total} runs; at the same time on: {'; '.join(place.name for place in places)}")
    trials = sweep.settings.trials
    if left := trials - len(sweep.configurations):
        click.echo(f"# {left} more of {trials} configurations are chosen by Optuna while the sweep runs")
    for name, text in name_in_trackers(sweep, os.environ).items():
        click.echo(f"export {name}={shlex.quote(text)}")
    for run in sweep.runs:
        if run.status in (DONE, PRUNED):
            click.echo(f"# run {run.number} has ended: {describe_values(run.values)}")
        else:
            _, arguments, _ = plan_trial(sweep, run, run.last.place if run.last else "")
            click.echo(shlex.join(["cpuft", "launch", *options, *arguments]))


def _carry_out(folder: str, config: SweepConfig, options: list[str], places: list[Place]) -> None:
    """Run the queue, print the results, and exit: with 75 after SIGUSR1, a job script's request for a checkpoint."""
    from cpuft.sweep.queue import SweepQueue
    from cpuft.sweep.results import format_sweep
    from cpuft.sweep.study import open_sweep

    with ExitStack() as stack:
        found = stack.enter_context(open_sweep(folder))
        queue = SweepQueue(found, options, places, config.stop_after_failures, say)
        try:
            failed = queue.run(stack.enter_context(show_status(found, len(places))))
        except Interrupted as stopped:
            say(f"cpuft: the sweep was stopped by {stopped}: continue it with cpuft sweep --resume {folder}")
            sys.exit(RESUMABLE if str(stopped) == "SIGUSR1" else stopped.exit_code)
    click.echo(format_sweep(found), nl=False)
    click.echo(f"sweep: {folder}")
    sys.exit(1 if failed else 0)


@contextmanager
def show_status(sweep: Sweep, places: int) -> Iterator[Callable[[], None]]:
    """Yield a function that draws the state of a sweep anew, at most once a second, at the end of a terminal. What is
    printed meanwhile appears above it. Without a terminal, the function does nothing.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from cpuft.sweep.queue import format_status

    drawn = 0.0

    def draw() -> None:
        nonlocal drawn
        if time.monotonic() - drawn >= _REDRAW_SECONDS:
            live.update(Text(format_status(sweep, places, time.time()), no_wrap=True, overflow="crop"), refresh=True)
            drawn = time.monotonic()

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield draw
