"""`cpuft sweep`: many runs with different options, on all hosts at the same time, and a table of the results."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cpuft.cli.common import say
from cpuft.cli.detached import move, refuse_detaching
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, given_options, make_options, pick
from cpuft.config.fields import format_flag, option_names
from cpuft.config.launch import DetachConfig, LaunchConfig
from cpuft.config.sweep import SweepConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import RESUMABLE, CpuftError, Interrupted
from cpuft.sweep.search import list_variable_options

if TYPE_CHECKING:
    from cpuft.report.sweep import SearchSettings, Sweep, SweepHeader
    from cpuft.sweep.queue import Journal, Place, SweepQueue
    from cpuft.sweep.search import Space
    from cpuft.sweep.study import OptunaSearch

MOST_RUNS = 10_000
"""A sweep of more runs needs --yes."""
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
    from cpuft.report.sweep import read_sweep
    from cpuft.sweep.queue import format_status

    if action:
        if len(action) != 2 or action[0] != _STATUS:
            raise CpuftError("cpuft sweep takes no arguments but `status FOLDER`: write options with two dashes")
        found = read_sweep(action[1])
        click.echo(format_status(found, 0, time.time(), _is_running(action[1])))
        return
    config = pick(SweepConfig, values)
    if values["detach"]:
        _detach(config, values, dry_run)
    if config.resume:
        _resume(config, values, dry_run)
    else:
        _begin(config, values, dry_run)


def _detach(config: SweepConfig, values: dict[str, Any], dry_run: bool) -> NoReturn:
    """Move a new sweep to the head host, after it has been planned here as far as possible, and exit."""
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.run_folder import choose_run_dir
    from cpuft.steps import Plan
    from cpuft.sweep.parallel import parse_parallel

    launch = pick(LaunchConfig, values)
    refuse_detaching(replace(launch, copy_checkpoints=False), config.resume)
    if config.storage.startswith("sqlite:///"):
        raise CpuftError(
            "--storage names a file of this machine: leave it out with --detach, or give a database server"
        )
    _plan_header(config, values)
    folder = choose_run_dir(launch.run_dir, "sweep")
    _find_places(config.hosts_per_run, parse_parallel(config.parallel) or 0, launch)
    cluster = gather_cluster(replace(launch, np=1))
    say(f"cpuft: the sweep is moved to {cluster.head} and ends with that host; nobody continues it then")
    packages = ("optuna",) if config.search == "optuna" else ()
    sys.exit(move("sweep", values, (), cluster, folder, Plan(), dry_run, packages))


def _is_running(folder: str) -> bool:
    """Return whether a `cpuft sweep` works on the sweep in a folder.

    It is found on other hosts if the file system of the folder has locks, else only this user's on this machine.
    """
    from cpuft.launch.active_runs import lock_run
    from cpuft.sweep.queue import has_locked_journal

    if has_locked_journal(folder):
        return True
    try:
        with lock_run(os.path.abspath(folder)):
            return False
    except CpuftError:
        return True


def _begin(config: SweepConfig, values: dict[str, Any], dry_run: bool) -> None:
    from cpuft.launch.active_runs import lock_run
    from cpuft.launch.run_folder import choose_run_dir
    from cpuft.report.sweep import NOT_STORED, Sweep
    from cpuft.sweep.parallel import parse_parallel
    from cpuft.sweep.queue import find_host_share, open_journal
    from cpuft.sweep.study import OptunaSearch

    launch = pick(LaunchConfig, values)
    parallel = parse_parallel(config.parallel)
    header = _plan_header(config, values)
    options = _list_launch_options()
    folder = choose_run_dir(launch.run_dir, "sweep")
    if header.search.trials:
        name, token = os.path.basename(os.path.abspath(folder)), os.urandom(8).hex()
        header = replace(header, search=replace(header.search, study=name, token=token))
    places = _find_places(config.hosts_per_run, parallel or 0, launch)
    first = Sweep(folder, header)
    if header.search.trials and (dry_run or parallel is None):
        first = first.add(OptunaSearch(header.search, first.is_maximized).propose(first))
    if dry_run:
        note = "# --parallel auto: nothing was measured, because of --dry-run" if parallel is None else ""
        _print_plan(first, options, places, note)
        return
    measurement = ""
    if parallel is None:
        places, measurement = _measure_places(first, options, launch, places)
    share = find_host_share(places)
    stored = [option for option in options if option.partition("=")[0] not in map(format_flag, NOT_STORED)]
    header = replace(header, launch=stored, working_folder=os.getcwd(), host_share=share, measurement=measurement)
    with ExitStack() as stack:
        stack.enter_context(lock_run(folder))
        search = stack.enter_context(_open_search(Sweep(folder, header), config.storage, is_new=True))
        if header.search.pruner == "none" and config.pruner == "auto" and search:
            say("cpuft: no run is pruned, because runs do not evaluate while training: add --eval-every to allow it")
        journal = stack.enter_context(open_journal(folder, header))
        _carry_out(journal, config, options, places, search)


@contextmanager
def _open_search(sweep: Sweep, storage: str, is_new: bool) -> Iterator[OptunaSearch | None]:
    """Open the Optuna study of a sweep, and keep other sweeps out of it; None for a sweep whose runs are all known."""
    from cpuft.sweep.study import OptunaSearch, lock_study

    settings = sweep.header.search
    if not settings.trials:
        yield None
        return
    with lock_study(storage, settings.study) if storage else nullcontext():
        yield OptunaSearch(settings, sweep.is_maximized, storage, is_new)


def _resume(config: SweepConfig, values: dict[str, Any], dry_run: bool) -> None:
    from cpuft.hosts.cluster import LOCAL, read_hosts
    from cpuft.launch.active_runs import lock_run
    from cpuft.report.sweep import read_sweep
    from cpuft.sweep.parallel import AUTO, parse_parallel
    from cpuft.sweep.queue import continue_journal, make_launch_config

    fixed = {*option_names(TrainConfig), *option_names(SweepConfig), "run_dir"}
    fixed -= {"resume", *list_options_for_resume()}
    for name in given_options():
        if name in fixed:
            raise CpuftError(f"{format_flag(name)} is not for --resume, which takes it from the sweep: leave it out")
    folder = os.path.abspath(config.resume)
    sweep = read_sweep(folder)
    header, given = sweep.header, _list_launch_options()
    if config.storage and not header.search.trials:
        raise CpuftError("--storage is for sweeps that were started with --search optuna: leave it out")
    if not os.path.isdir(header.working_folder or "."):
        raise CpuftError(
            f"the sweep was started in {header.working_folder}, where its relative paths begin, and this folder is "
            "gone: make it again"
        )
    names = {option.partition("=")[0] for option in given}
    # Hosts that are given now replace those of the sweep.
    names |= {"--cluster", "--hostfile"} if names & {"--cluster", "--hostfile"} else set()
    stored = [_make_path_absolute(option, header.working_folder) for option in header.launch]
    options = [option for option in stored if option.partition("=")[0] not in names] + given
    parallel = parse_parallel(config.parallel)
    if parallel is None and not header.measurement:
        raise CpuftError(
            f"--parallel {AUTO} measures only when a sweep begins: give a number, or leave it out to continue as before"
        )
    launch = make_launch_config(options)
    if not parallel and read_hosts(launch) == (LOCAL,):
        # How this machine was divided says nothing about other hosts.
        parallel = round(1 / header.host_share) * (header.host_share < 1)
    places = _find_places(header.hosts_per_run, parallel or 0, launch)
    if dry_run:
        _print_plan(sweep, options, places)
        return
    with ExitStack() as stack:
        stack.enter_context(lock_run(folder))
        journal = stack.enter_context(continue_journal(folder))
        search = stack.enter_context(_open_search(sweep, config.storage, is_new=False))
        _carry_out(journal, config, options, places, search)


def list_options_for_resume() -> list[str]:
    """Return the names of the options that may be given again with --resume."""
    own = ("np", "ppn", "only_hosts", "run_dir")
    launch = [name for name in option_names(LaunchConfig) if name not in own]
    return ["parallel", "stop_after_failures", "storage", *launch]


def _plan_header(config: SweepConfig, values: dict[str, Any]) -> SweepHeader:
    """Return what the sweep does: the options of all runs, and the values of each."""
    from cpuft.report.sweep import VERSION, SearchSettings, SweepHeader
    from cpuft.sweep.search import (
        Space,
        apply_assignment,
        check_assignments,
        count_grid,
        draw_random,
        estimate_length,
        parse_values,
        plan_grid,
        read_conditions,
        sample_configurations,
    )

    common, space = list[str](), Space()
    fixed: dict[str, Any] = {}
    for name in [name for name in option_names(TrainConfig) if name in given_options()]:
        value = values[name]
        if isinstance(value, str) and _is_several(name, value):
            space[name] = parse_values(name, value)
            continue
        fixed[name] = _parse_one(name, value) if isinstance(value, str) else value
        common.append(format_flag(name, value) if isinstance(value, bool) else f"{format_flag(name)}={value}")
    base = TrainConfig(**fixed)
    conditions = read_conditions(config.conditions) if config.conditions else [Space()]
    for condition in conditions:
        for name in condition:
            if name in fixed or name in space:
                raise CpuftError(
                    f"{format_flag(name)} is on the command line and in --conditions {config.conditions}: leave out "
                    "one of them"
                )
    spaces = [space | condition for condition in conditions]
    if config.search != "optuna":
        for name in ("sampler", "pruner", "storage"):
            if getattr(config, name) != getattr(SweepConfig(), name):
                raise CpuftError(f"{format_flag(name)} is for --search optuna: add that, or leave it out")
    if config.search == "grid":
        if config.trials:
            raise CpuftError(
                "--trials is for --search random and --search optuna: a grid has all combinations, so leave it out"
            )
        count = count_grid(spaces)
    else:
        if not config.trials:
            raise CpuftError(f"--search {config.search} needs --trials, the number of configurations: add --trials 20")
        count = config.trials * max(len(one["seed"].texts) if "seed" in one else 1 for one in spaces)
    if count > MOST_RUNS and not config.yes:
        raise CpuftError(
            f"this sweep has {count:,} runs: give fewer values, --search random with --trials 50, or --yes if you "
            "mean it"
        )
    search, direction = SearchSettings(), config.direction
    if config.search == "optuna":
        found = sample_configurations(spaces)
        check_assignments(base, found, fixed)
        configs = [apply_assignment(base, one) for one in found]
        search, direction = _plan_search(config, spaces, configs), _choose_direction(config, configs)
        runs = []
    else:
        runs = plan_grid(spaces) if config.search == "grid" else draw_random(spaces, config.trials, config.search_seed)
        check_assignments(base, runs, fixed)
    ranks = config.hosts_per_run * config.ranks_per_host
    common += [f"--np={ranks}", *([f"--ppn={config.ranks_per_host}"] if ranks > 1 else [])]
    lengths = [estimate_length(apply_assignment(base, run)) for run in runs]
    return SweepHeader(
        VERSION, common, runs, config.metric, direction, config.hosts_per_run, config.price, lengths, search=search
    )


def _plan_search(config: SweepConfig, spaces: Sequence[Space], configs: Sequence[TrainConfig]) -> SearchSettings:
    """Return how Optuna searches the alternatives `spaces`, of which `configs` are a part of the configurations."""
    from cpuft.report.sweep import SEED, SearchSettings
    from cpuft.sweep.search import count_configurations, format_values

    if (count := count_configurations(spaces)) < config.trials:
        raise CpuftError(
            f"the values allow {count:.0f} configurations, fewer than --trials {config.trials}: give a range such as "
            "--learning-rate 1e-5..1e-3, more values, or --search grid without --trials"
        )
    has_evaluations = all(one.eval_every != "none" for one in configs)
    if config.pruner == "median" and not has_evaluations:
        raise CpuftError(
            "--pruner median compares evaluations while training, and there are none: add --eval-every epoch or "
            "a number of updates, or leave out --pruner"
        )
    return SearchSettings(
        trials=config.trials,
        seeds=max(len(space[SEED].texts) if SEED in space else 1 for space in spaces),
        sampler=config.sampler,
        pruner="median" if config.pruner != "none" and has_evaluations else "none",
        seed=config.search_seed,
        spaces=[{name: format_values(name, values) for name, values in space.items()} for space in spaces],
    )


def _choose_direction(config: SweepConfig, configs: Sequence[TrainConfig]) -> str:
    """Return maximize or minimize: Optuna has to know it before a run has reported its metrics."""
    from cpuft.report.sweep import is_larger_better
    from cpuft.tasks import find_task

    if config.direction != "auto":
        return config.direction
    metric = config.metric or find_task(configs[0].task, configs[0].causal).metrics[0]
    return "maximize" if is_larger_better(metric) else "minimize"


def _is_several(name: str, text: str) -> bool:
    """Return whether an option has several values; of options that may not vary, a comma belongs to the value."""
    return name in list_variable_options() and ("," in text or ".." in text)


def _parse_one(name: str, text: str) -> Any:
    from cpuft.sweep.search import apply_assignment

    return getattr(apply_assignment(TrainConfig(), {name: text}), name)


def _find_places(hosts_per_run: int, parallel: int, launch: LaunchConfig) -> list[Place]:
    from cpuft.hosts.cluster import LOCAL, Access, gather_facts
    from cpuft.sweep.queue import plan_places

    facts = gather_facts((LOCAL,), Access())[0]
    return plan_places(launch, hosts_per_run, parallel, [core.threads for core in facts.cores], facts.cpu_quota)


def _measure_places(
    sweep: Sweep, options: list[str], launch: LaunchConfig, places: list[Place]
) -> tuple[list[Place], str]:
    """Return the places with which the first configuration trains fastest, and what was measured, after saying so."""
    from cpuft.hosts.cluster import LOCAL, Access, gather_facts, read_hosts
    from cpuft.sweep.parallel import choose_parallel, describe_choice, list_candidates, measure_parallel
    from cpuft.sweep.queue import plan_places
    from cpuft.sweep.search import format_assignment

    header = sweep.header
    if read_hosts(launch) != (LOCAL,):
        told = "--parallel auto: one run at a time on each group of hosts, because only this machine can be divided"
        say(f"cpuft: {told}")
        return places, told
    facts = gather_facts((LOCAL,), Access())[0]
    cores = [core.threads for core in facts.cores]
    divided = {
        number: plan_places(launch, header.hosts_per_run, number, cores, facts.cpu_quota)
        for number in list_candidates(cores, sweep.total)
    }
    if len(divided) == 1:
        told = "--parallel auto: one run at a time, because there is one run, or one hardware thread"
        say(f"cpuft: {told}")
        return places, told
    first = [*options, *header.options, *format_assignment(header.runs[0])]
    try:
        rates = measure_parallel(divided, first, lambda line: say(f"cpuft: {line}"))
    except Interrupted as stopped:
        say(f"cpuft: the measurement of --parallel auto was stopped by {stopped}: no run was started")
        sys.exit(stopped.exit_code)
    told = describe_choice(rates)
    say(f"cpuft: {told}")
    return divided[choose_parallel(rates)], told


def _list_launch_options() -> list[str]:
    """Return the options of the command line that every launch of the sweep gets, too.

    Paths of files are absolute, because launches start where the sweep was started first, not where it is resumed.
    """
    own = [name for name in option_names(LaunchConfig) if name != "run_dir"]
    context, given = click.get_current_context(), given_options()
    values = {name: context.params[name] for name in own if name in given}
    options = [
        format_flag(name, value) if isinstance(value, bool) else f"{format_flag(name)}={value}"
        for name, value in values.items()
    ]
    return [_make_path_absolute(option, os.getcwd()) for option in options]


def _make_path_absolute(option: str, folder: str) -> str:
    """Return an option of a launch such as "--hostfile=hosts" with an absolute path, if it is one of this machine."""
    flag, _, path = option.partition("=")
    absolute = os.path.abspath(os.path.join(folder, path))
    # --mpirun may be a name that is looked up on PATH, or a path on another host.
    is_mpirun = flag == "--mpirun" and "/" in path and os.path.exists(absolute)
    return f"{flag}={absolute}" if path and (flag in ("--hostfile", "--ssh-config") or is_mpirun) else option


def _print_plan(sweep: Sweep, options: list[str], places: list[Place], note: str = "") -> None:
    """Print the commands of the runs that are still to be made, as a shell script that makes one after another."""
    import shlex

    from cpuft.report.sweep import DONE, PRUNED, STOPPED, describe_values
    from cpuft.sweep.queue import name_folder, name_in_trackers
    from cpuft.sweep.search import format_assignment

    header, total = sweep.header, sweep.total
    click.echo("#!/usr/bin/env bash\nset -eu")
    click.echo(f"# {total} runs; at the same time on: {'; '.join(place.name for place in places)}")
    click.echo(note, nl=bool(note))
    if left := header.search.trials - len(sweep.trials):
        click.echo(f"# {left} more of {header.search.trials} configurations are chosen by Optuna while the sweep runs")
    for name, text in name_in_trackers(header, sweep.folder, os.environ).items():
        click.echo(f"export {name}={shlex.quote(text)}")
    ended = {*sweep.list_with_status(DONE, PRUNED)}
    for number, values in enumerate(header.runs, start=1):
        start, end = sweep.find_start(number), sweep.find_end(number)
        if number in ended:
            click.echo(f"# run {number} has ended: {describe_values(values)}")
            continue
        if start and (end is None or end.status == STOPPED):
            rest = ["--resume", f"{sweep.folder}/{start.folder}"]
        else:
            path = f"{sweep.folder}/{name_folder(number, total, start.attempt + 1 if start else 1)}"
            rest = [*header.options, *format_assignment(values), "--run-dir", path]
        click.echo(shlex.join(["cpuft", "launch", *options, *rest]))


def _carry_out(
    journal: Journal, config: SweepConfig, options: list[str], places: list[Place], search: OptunaSearch | None
) -> None:
    """Run the queue, print the results, and exit.

    SIGUSR1, with which a job script asks for a checkpoint, gives exit code 75.
    """
    from cpuft.report.sweep import format_sweep
    from cpuft.sweep.queue import SweepQueue

    folder = journal.sweep.folder
    live = LiveStatus(len(places)) if sys.stderr.isatty() else None
    queue = SweepQueue(journal, options, places, config.stop_after_failures, live.say if live else say, search)
    try:
        failed = queue.run((lambda: live.show(queue)) if live else (lambda: None))
    except Interrupted as stopped:
        say(f"cpuft: the sweep was stopped by {stopped}: continue it with cpuft sweep --resume {folder}")
        sys.exit(RESUMABLE if stopped.exit_code == 128 + signal.SIGUSR1 else stopped.exit_code)
    finally:
        if live:
            live.clear()
    click.echo(format_sweep(queue.sweep), nl=False)
    click.echo(f"sweep: {folder}")
    sys.exit(1 if failed else 0)


class LiveStatus:
    """Lines at the end of a terminal with the state of a sweep that has `places` runs at the same time."""

    def __init__(self, places: int) -> None:
        self._places, self._lines, self._drawn = places, 0, 0.0

    def show(self, queue: SweepQueue) -> None:
        """Draw the state, at most once per second."""
        from cpuft.sweep.queue import format_status

        if time.monotonic() - self._drawn < _REDRAW_SECONDS:
            return
        self.clear()
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        except OSError:  # The terminal was closed, which must not end the active runs.
            columns = 80
        lines = [line[: columns - 1] for line in format_status(queue.sweep, self._places, time.time()).split("\n")]
        click.echo("\n".join(lines), err=True)
        self._lines, self._drawn = len(lines), time.monotonic()

    def clear(self) -> None:
        """Remove the lines."""
        if self._lines:
            click.echo(f"\x1b[{self._lines}F\x1b[J", err=True, nl=False)
        self._lines, self._drawn = 0, 0.0

    def say(self, line: str) -> None:
        """Print a line above the state."""
        self.clear()
        say(line)
