"""The journal of a sweep (sweep.jsonl), and the table of its results: configurations, their means, and what differs."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cpuft.config.fields import format_flag, option_names
from cpuft.config.launch import LaunchConfig
from cpuft.config.sweep import SWEEP_PRUNERS, SWEEP_SAMPLERS
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.report.page import render_page
from cpuft.report.plots import Line, draw_lines
from cpuft.report.significance import is_different, standard_error
from cpuft.serialization import load, parse_json
from cpuft.terminal import format_table

FILE_NAME = "sweep.jsonl"
VERSION = 2
_READABLE = (1, VERSION)
"""Versions of a journal that can be read. In version 1, all runs are in the header."""
NOT_STORED = ("mpirun", "ssh_config", "run_dir", "only_hosts")
"""Options of LaunchConfig that are not in a journal, so that no program is started because a file names it."""
_FOLDER = re.compile(r"run-[0-9]{1,9}(-attempt-[0-9]{1,9})?")
SEED = "seed"
DONE, FAILED, LOST, STOPPED, PRUNED = "done", "failed", "lost", "stopped", "pruned"
"""How an attempt at a run ended: with a metric; by an error of its own; because a host was lost, or before its first
update, so that the run starts again; interrupted, so that the run can be resumed; by the pruner, for good."""
_MINIMIZED = ("perplexity", "loss", "eval_loss")
"""Beginnings of the names of metrics of which less is better."""


@dataclass(frozen=True)
class SearchSettings:
    """How Optuna chooses the configurations of a sweep while it runs."""

    trials: int = 0
    """Number of configurations; 0 if all runs are in the header, and Optuna chooses none."""
    seeds: int = 1
    """Largest number of runs of a configuration, one for each value of --seed."""
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 0
    """Seed of the sampler."""
    spaces: list[dict[str, str]] = field(default_factory=list)
    """Alternatives, each with the values of its options as the command line takes them, such as "1e-5..1e-3"."""
    study: str = ""
    token: str = ""
    """Random text that the study has, too, so that a study of another sweep is noticed."""


@dataclass(frozen=True)
class SweepHeader:
    """First line of a journal: what the sweep does."""

    version: int
    options: list[str]
    """Arguments of all runs, such as "--task=mrpc"."""
    runs: list[dict[str, str]]
    """The values of each run by option; run 1 is the first."""
    metric: str
    """Name of the metric that is compared; empty for the first one that the runs report."""
    direction: str
    """auto, maximize or minimize."""
    hosts_per_run: int
    price: float
    """Price of one host for one hour; 0 if it is not known."""
    lengths: list[float]
    """Relative length of each run, by which they are ordered."""
    launch: list[str] = field(default_factory=list)
    """Arguments of all launches that say where and how they run, such as "--cluster=office", without `NOT_STORED`."""
    working_folder: str = ""
    """Folder in which the launches start, because options may have relative paths."""
    host_share: float = 1.0
    """Share of a host that a run has at the beginning, if this machine is divided among several runs."""
    measurement: str = ""
    """What `--parallel auto` has measured and chosen; empty if it was not given."""
    search: SearchSettings = field(default_factory=SearchSettings)


@dataclass(frozen=True)
class Trial:
    """Optuna has chosen a configuration. Its runs are numbered after those that the sweep has already."""

    number: int
    params: dict[str, str]
    """Parameters of the Optuna study, with all their digits."""
    runs: list[dict[str, str]]
    """The values of each run by option, one run for each value of --seed."""
    lengths: list[float]


@dataclass(frozen=True)
class AttemptStart:
    """A run was started. Runs and attempts at them are numbered from 1."""

    run: int
    attempt: int
    place: str
    """Names of its hosts, or the cores of this machine."""
    folder: str
    """Folder of the run, in the folder of the sweep."""
    time: float
    """Seconds since 1970."""
    host_share: float = 0.0
    """Share of a host that it has; 0 for that of the header, as in older journals. A sweep may continue elsewhere."""


@dataclass(frozen=True)
class AttemptEnd:
    """A run has ended."""

    run: int
    attempt: int
    status: str
    """DONE, FAILED, LOST, STOPPED or PRUNED."""
    exit_code: int
    seconds: float
    metrics: dict[str, float]
    reason: str = ""
    """Why it failed (the last lines of its log) or was pruned."""


@dataclass(frozen=True)
class Evaluation:
    """A run that Optuna may prune has evaluated its model while training."""

    run: int
    attempt: int
    update: int
    """Number of updates that it had made."""
    metrics: dict[str, float]


JournalLine = SweepHeader | Trial | AttemptStart | Evaluation | AttemptEnd
_KINDS: dict[str, type[JournalLine]] = {
    "sweep": SweepHeader,
    "trial": Trial,
    "start": AttemptStart,
    "evaluation": Evaluation,
    "end": AttemptEnd,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


def format_journal_line(line: JournalLine) -> str:
    """Return a line of the journal as one JSON object, without a newline."""
    return json.dumps({"kind": _NAMES[type(line)]} | dataclasses.asdict(line))


@dataclass(frozen=True)
class Sweep:
    """What a journal says."""

    folder: str
    header: SweepHeader
    starts: tuple[AttemptStart, ...] = ()
    ends: tuple[AttemptEnd, ...] = ()
    trials: tuple[Trial, ...] = ()
    """Configurations that Optuna has chosen until now. The header has their runs, too."""
    evaluations: tuple[Evaluation, ...] = ()

    def add(self, line: JournalLine) -> Sweep:
        """Return the sweep with one more line of its journal, which is not a header."""
        if isinstance(line, Trial):
            header = _extend_header(self.header, [line])
            return dataclasses.replace(self, header=header, trials=(*self.trials, line))
        if isinstance(line, AttemptStart):
            return dataclasses.replace(self, starts=(*self.starts, line))
        if isinstance(line, Evaluation):
            return dataclasses.replace(self, evaluations=(*self.evaluations, line))
        assert isinstance(line, AttemptEnd)
        return dataclasses.replace(self, ends=(*self.ends, line))

    @cached_property
    def _last_starts(self) -> dict[int, AttemptStart]:
        return {one.run: one for one in self.starts}

    @cached_property
    def _last_ends(self) -> dict[int, AttemptEnd]:
        starts = self._last_starts
        return {one.run: one for one in self.ends if one.run in starts and one.attempt == starts[one.run].attempt}

    @cached_property
    def _statuses(self) -> dict[int, str]:
        """How each run has ended. If one run of a configuration was pruned, those that are not trained are, too."""
        found = {run: end.status for run, end in self._last_ends.items()}
        for trial in self.trials:
            runs = self.list_runs(trial.number)
            if any(found.get(run) == PRUNED for run in runs):
                for run in runs:
                    is_active = run in self._last_starts and run not in self._last_ends
                    if not is_active and found.get(run) not in (DONE, FAILED):
                        found[run] = PRUNED
        return found

    @cached_property
    def _trial_ends(self) -> list[int]:
        """Number of the last run of each configuration that Optuna has chosen."""
        return list(itertools.accumulate(len(trial.runs) for trial in self.trials))

    def list_runs(self, trial: int) -> range:
        """Return the numbers of the runs of a configuration that Optuna has chosen; its own number counts from 1."""
        end = self._trial_ends[trial - 1]
        return range(end - len(self.trials[trial - 1].runs) + 1, end + 1)

    def find_trial(self, run: int) -> int:
        """Return the number of the configuration of a run; 0 if Optuna has not chosen it."""
        return bisect.bisect_left(self._trial_ends, run) + 1 if self.trials else 0

    @cached_property
    def _curves(self) -> dict[int, dict[int, float]]:
        """Run -> number of updates -> metric of the evaluation there, in the folder of the last attempt at the run."""
        folders = {(start.run, start.attempt): start.folder for start in self.starts}
        found: dict[int, dict[int, float]] = {}
        for one in self.evaluations:
            is_last = folders.get((one.run, one.attempt)) == find_folder(self, one.run)
            if is_last and self.metric in one.metrics:
                found.setdefault(one.run, {})[one.update] = one.metrics[self.metric]
        return found

    def average_curve(self, trial: int) -> list[tuple[int, float]]:
        """Return (number of updates, metric) at each evaluation while training, of a configuration of Optuna.

        The metric is the mean over those of its runs that have got so far.
        """
        curves = [self._curves.get(run, {}) for run in self.list_runs(trial)]
        updates = sorted({update for curve in curves for update in curve})
        return [(update, statistics.fmean(curve[update] for curve in curves if update in curve)) for update in updates]

    def count_evaluations(self, run: int) -> int:
        """Return how many evaluations while training a run has made, in the folder of its last attempt."""
        return len(self._curves.get(run, {}))

    def find_end(self, run: int) -> AttemptEnd | None:
        """Return how the last attempt at a run ended; None if there was none, or it has not ended."""
        return self._last_ends.get(run)

    def find_start(self, run: int) -> AttemptStart | None:
        """Return the last attempt at a run; None if there was none."""
        return self._last_starts.get(run)

    def list_with_status(self, *statuses: str) -> list[int]:
        """Return the numbers of the runs whose last attempt ended in one of these ways, ascending."""
        return sorted(run for run, status in self._statuses.items() if status in statuses)

    def count_seconds(self, run: int) -> float:
        """Return the seconds of all attempts at a run that have ended and trained in the folder of its last one."""
        folder = start.folder if (start := self.find_start(run)) else ""
        same = {one.attempt for one in self.starts if one.run == run and one.folder == folder}
        return sum(end.seconds for end in self.ends if end.run == run and end.attempt in same)

    @property
    def numbers(self) -> range:
        """Numbers of all runs that are known. Optuna chooses further ones while the sweep runs."""
        return range(1, len(self.header.runs) + 1)

    @property
    def total(self) -> int:
        """Number of all runs, with those that Optuna has not chosen yet."""
        search = self.header.search
        return len(self.header.runs) + max(0, search.trials - len(self.trials)) * search.seeds

    @property
    def metric(self) -> str:
        """Name of the metric that is compared; empty if no run has reported one."""
        done = [end.metrics for end in self.ends if end.status == DONE]
        found = (name for metrics in [*done, *(one.metrics for one in self.evaluations)] for name in metrics)
        return self.header.metric or next(found, "")

    @property
    def is_maximized(self) -> bool:
        """Whether a larger metric is better."""
        if self.header.direction != "auto":
            return self.header.direction == "maximize"
        return is_larger_better(self.metric)

    @property
    def host_hours(self) -> float:
        """Hours of all hosts in all attempts that have ended."""
        shares = {(one.run, one.attempt): one.host_share or self.header.host_share for one in self.starts}
        seconds = sum(end.seconds * shares.get((end.run, end.attempt), self.header.host_share) for end in self.ends)
        return seconds * self.header.hosts_per_run / 3600


def is_larger_better(metric: str) -> bool:
    """Return whether a larger value of a metric of cpuft is better."""
    return not metric.startswith(_MINIMIZED)


def _extend_header(header: SweepHeader, trials: Sequence[Trial]) -> SweepHeader:
    runs = [run for trial in trials for run in trial.runs]
    lengths = [length for trial in trials for length in trial.lengths]
    return dataclasses.replace(header, runs=[*header.runs, *runs], lengths=[*header.lengths, *lengths])


def parse_journal(text: str, folder: str) -> Sweep:
    """Return the sweep of a journal. A last line that was cut off is left out."""
    lines, parsed = text.split("\n"), list[JournalLine]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = load(dict[str, Any], parse_json(line))
            parsed.append(load(_KINDS[str(values.pop("kind", ""))], values))
        except (ValueError, KeyError) as error:
            if number == len(lines):
                break
            raise CpuftError(
                f"{folder}/{FILE_NAME}, line {number} is not a line of a sweep ({error}): give the folder of a sweep "
                "that this version of cpuft has made"
            ) from None
    header = parsed[0] if parsed else None
    is_whole = isinstance(header, SweepHeader) and header.version in _READABLE
    if not isinstance(header, SweepHeader) or not is_whole or len(header.lengths) != len(header.runs):
        raise CpuftError(f"{folder}/{FILE_NAME} has no header of this version of cpuft: start the sweep anew")
    trials = tuple(line for line in parsed if isinstance(line, Trial))
    _refuse_broken_trials(header, trials, f"{folder}/{FILE_NAME}")
    header = _extend_header(header, trials)
    starts = tuple(line for line in parsed if isinstance(line, AttemptStart))
    _refuse_foreign(header, starts, f"{folder}/{FILE_NAME}")
    ends = tuple(line for line in parsed if isinstance(line, AttemptEnd))
    return Sweep(folder, header, starts, ends, trials, tuple(line for line in parsed if isinstance(line, Evaluation)))


def _refuse_broken_trials(header: SweepHeader, trials: Sequence[Trial], path: str) -> None:
    """Raise CpuftError if the configurations that Optuna has chosen do not fit each other, or the header."""
    search = header.search
    is_whole = [trial.number for trial in trials] == list(range(1, len(trials) + 1)) and all(
        trial.runs and len(trial.runs) == len(trial.lengths) for trial in trials
    )
    is_known = search.sampler in SWEEP_SAMPLERS and search.pruner in SWEEP_PRUNERS and 0 <= search.trials <= 10**6
    if not is_whole or not is_known or not 0 < search.seeds <= 10**6 or (header.runs and search.trials):
        raise CpuftError(f"{path} has configurations that do not fit together: start the sweep anew")
    if len(trials) > search.trials or bool(search.trials) != bool(search.spaces):
        raise CpuftError(f"{path} has other configurations than its header says: start the sweep anew")


def _refuse_foreign(header: SweepHeader, starts: Sequence[AttemptStart], path: str) -> None:
    """Raise CpuftError if a journal holds what no sweep writes: its arguments become those of `cpuft launch`."""
    training = {*option_names(TrainConfig), "np", "ppn"}
    launch = {*option_names(LaunchConfig)} - {*NOT_STORED}
    found = [one for one in header.options if _name_of(one) not in training]
    found += [one for one in header.launch if _name_of(one) not in launch]
    found += [name for values in (*header.runs, *header.search.spaces) for name in values if name not in training]
    found += [one.folder for one in starts if not _FOLDER.fullmatch(one.folder)]
    found += [f"run {one.run}" for one in starts if not 1 <= one.run <= len(header.runs)]
    if found:
        raise CpuftError(
            f"{path} holds {found[0]!r:.80}, which no sweep writes: give a folder that cpuft sweep has made"
        )


def _name_of(argument: str) -> str:
    """Return the name of the option of an argument such as "--batch-size=8" or "--no-check"; empty for another text."""
    flag = argument.partition("=")[0]
    name = flag.removeprefix("--no-" if flag.startswith("--no-") else "--").replace("-", "_")
    return name if flag in (format_flag(name), format_flag(name, False)) else ""


def read_sweep(folder: str) -> Sweep:
    """Return the sweep in a folder."""
    try:
        return parse_journal(Path(folder, FILE_NAME).read_text(encoding="utf-8"), folder)
    except (FileNotFoundError, NotADirectoryError):
        raise CpuftError(
            f"there is no sweep in {folder}, because it has no file {FILE_NAME}: give the folder that cpuft sweep named"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"{folder}/{FILE_NAME} cannot be read ({error}): check its permissions") from None


def choose_metric(sweep: Sweep, metric: str) -> Sweep:
    """Return the sweep with another metric by which its configurations are compared.

    Whether a larger value is better follows from the name of the metric, unless it is the sweep's own.
    """
    known = list(dict.fromkeys(name for end in sweep.ends for name in end.metrics))
    if metric not in known:
        raise CpuftError(
            f"no run of {sweep.folder} has reported --metric {metric:.60}: "
            + (suggest_names(metric, known) if known else "wait until one has ended")
        )
    direction = sweep.header.direction if metric == sweep.metric else "auto"
    return dataclasses.replace(sweep, header=dataclasses.replace(sweep.header, metric=metric, direction=direction))


@dataclass(frozen=True)
class Configuration:
    """Runs that have the same options apart from the seed."""

    values: tuple[tuple[str, str], ...]
    """Option and value, without the seed."""
    metrics: Mapping[str, float]
    """The metric that is compared, by seed; by the number of the run if the seed does not vary."""
    best_run: int
    """Number of the run with the best metric."""
    seconds: float
    """Mean of the runs."""

    @property
    def mean(self) -> float:
        """Mean of the metric over the runs."""
        return statistics.fmean(self.metrics.values())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN with one run."""
        return standard_error([*self.metrics.values()]) if len(self.metrics) > 1 else math.nan


def list_configurations(sweep: Sweep) -> list[Configuration]:
    """Return the configurations that have a run with a metric, the best mean first."""
    found: dict[tuple[tuple[str, str], ...], list[tuple[int, str, AttemptEnd]]] = {}
    for run in sweep.list_with_status(DONE):
        values, end = sweep.header.runs[run - 1], sweep.find_end(run)
        if end is None or sweep.metric not in end.metrics:
            continue
        key = tuple((name, text) for name, text in values.items() if name != SEED)
        found.setdefault(key, []).append((run, values.get(SEED, f"run {run}"), end))
    sign = 1 if sweep.is_maximized else -1

    def value_of(one: tuple[int, str, AttemptEnd]) -> float:
        return sign * one[2].metrics[sweep.metric]

    made = [
        Configuration(
            key,
            {seed: end.metrics[sweep.metric] for _, seed, end in runs},
            max(runs, key=value_of)[0],
            statistics.fmean(sweep.count_seconds(run) for run, _, _ in runs),
        )
        for key, runs in found.items()
    ]
    return sorted(made, key=lambda one: -sign * one.mean)


def describe_best(configurations: Sequence[Configuration]) -> str:
    """Return in plain words how sure it is that the best of one or more configurations is the best."""
    best, others = configurations[0], configurations[1:]
    if not others:
        return "there is one configuration, so there is nothing to compare"
    tests = [is_different(best.metrics, other.metrics) for other in others]
    if None in tests:
        return (
            "whether the best configuration is better than others cannot be told, because a configuration has too few "
            "runs that have ended: sweep several seeds, for example --seed 1..5"
        )
    same = [number for number, test in enumerate(tests, start=2) if not test]
    if not same:
        return "the best configuration is better than each of the others (t-test over seeds, 5 % level)"
    if same == [2]:
        which = "the next one"
    elif len(same) == len(others):
        which = "any of the others"
    else:
        which = f"{counted(len(same), 'other configuration')} (numbers {', '.join(map(str, same))})"
    return f"the best configuration is not distinguishable from {which} (t-test over seeds, 5 % level)"


def format_sweep(sweep: Sweep) -> str:
    """Return the results of a sweep as a table for a terminal, the best configuration first, with notes."""
    configurations = list_configurations(sweep)
    notes = [f"{describe_best(configurations)}."] if configurations else []
    arrow = "larger is better" if sweep.is_maximized else "less is better"
    title = f"{sweep.metric or 'no run has reported a metric'}: {arrow}"
    columns, rows = _make_table(sweep, configurations)
    return format_table(columns, rows, title, [*notes, *_list_notes(sweep)])


def _make_table(sweep: Sweep, configurations: Sequence[Configuration]) -> tuple[list[str], list[list[str]]]:
    names = _list_names(configurations)
    rows = [
        [
            str(number),
            *(dict(one.values).get(name, "-") for name in names),
            f"{one.mean:.4f}",
            "-" if math.isnan(one.standard_error) else f"{one.standard_error:.4f}",
            str(len(one.metrics)),
            f"{one.seconds / 60:.1f}",
            find_folder(sweep, one.best_run),
        ]
        for number, one in enumerate(configurations, start=1)
    ]
    flags = [format_flag(name)[2:] for name in names]
    return ["", *flags, f"mean {sweep.metric}", "+-", "runs", "minutes", "best run"], rows


def _list_names(configurations: Sequence[Configuration]) -> list[str]:
    return list(dict.fromkeys(name for one in configurations for name, _ in one.values))


def _list_notes(sweep: Sweep) -> list[str]:
    """Return a note for each run that failed, one about pruned runs, and one about progress and costs."""
    notes = list[str]()
    for run in sweep.list_with_status(DONE, FAILED):
        end, values = sweep.find_end(run), describe_values(sweep.header.runs[run - 1])
        if end and end.status == FAILED:
            notes.append(f"failed: run {run} ({values}): {end.reason}")
        elif end and sweep.metric not in end.metrics:
            notes.append(f"run {run} ({values}) reports no {sweep.metric}, but {', '.join(end.metrics)}")
    if pruned := sweep.list_with_status(PRUNED):
        numbers = ", ".join(map(str, pruned))
        notes.append(f"{counted(len(pruned), 'run')} pruned, because their evaluations were worse: {numbers}")
    done, total = len(sweep.list_with_status(DONE)), sweep.total
    cost = f", {sweep.host_hours * sweep.header.price:.2f} dollars" if sweep.header.price else ""
    notes += [f"{sweep.header.measurement}."] if sweep.header.measurement else []
    return [*notes, f"{done} of {counted(total, 'run')} done, {sweep.host_hours:.2f} host-hours{cost}."]


def write_sweep_page(sweep: Sweep, path: Path) -> Path:
    """Write the results of a sweep as an HTML page to `path`, and return `path`. An older page there is replaced."""
    configurations = list_configurations(sweep)
    if not configurations:
        raise CpuftError(f"no run of {sweep.folder} has reported a metric: wait until one has ended")
    return render_page(path, lambda: _describe_page(sweep, configurations))


def _describe_page(sweep: Sweep, configurations: Sequence[Configuration]) -> dict[str, Any]:
    columns, rows = _make_table(sweep, configurations)
    best = configurations[0]
    values = describe_values(dict(best.values))
    sentence = describe_best(configurations)
    return {
        "title": f"sweep {Path(sweep.folder).name}",
        "verdict": f"Best {sweep.metric}: {best.mean:.4f} with {values}. {sentence[0].upper()}{sentence[1:]}.",
        "columns": columns,
        "rows": rows,
        "legend": [],
        "figures": {
            "The metric by option": _draw_options(sweep, configurations),
            "All configurations": _draw_coordinates(sweep, configurations),
        },
        "links": [],
        "hosts": [],
        "settings": [("options of all runs", " ".join(sweep.header.options))],
        "notes": _list_notes(sweep),
    }


def _draw_options(sweep: Sweep, configurations: Sequence[Configuration]) -> list[tuple[str, str]]:
    """Return captions and SVGs: for each option with several numbers, the metric over them."""
    found = list[tuple[str, str]]()
    for name in _list_names(configurations):
        numbers = [number for one in configurations if (number := _find_number(one, name)) is not None]
        if len({*numbers}) < 2:
            continue
        is_logarithmic = min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
        groups: dict[tuple[tuple[str, str], ...], list[tuple[float, float, float]]] = {}
        for one in configurations:
            if (number := _find_number(one, name)) is not None:
                others = tuple(value for value in one.values if value[0] != name)
                error = 0.0 if math.isnan(one.standard_error) else one.standard_error
                point = (math.log10(number) if is_logarithmic else number, one.mean, error)
                groups.setdefault(others, []).append(point)
        lines = [
            Line(
                describe_values(dict(others)),
                [x for x, _, _ in sorted(points)],
                [y for _, y, _ in sorted(points)],
                [off for _, _, off in sorted(points)],
                colour=number,
            )
            for number, (others, points) in enumerate(groups.items())
        ]
        flag = format_flag(name)[2:]
        axes = (f"logarithm (base 10) of {flag}" if is_logarithmic else flag, sweep.metric)
        caption = (
            f"Mean {sweep.metric} over {flag}, with standard errors; a line connects what differs in nothing else."
        )
        found.append((caption, draw_lines(f"{sweep.metric} over {flag}", axes, lines, "o")))
    return found


def _find_number(configuration: Configuration, name: str) -> float | None:
    try:
        return float(dict(configuration.values)[name])
    except (KeyError, ValueError):
        return None


def _draw_coordinates(sweep: Sweep, configurations: Sequence[Configuration]) -> list[tuple[str, str]]:
    """Return the caption and the SVG of parallel coordinates, if two or more options vary."""
    names = _list_names(configurations)
    if len(names) < 2:
        return []
    ranks: list[list[float]] = []
    for name in names:
        texts = {dict(one.values).get(name, "-") for one in configurations}
        order = sorted(texts, key=lambda text: (_as_number(text), text))
        ranks.append([order.index(dict(one.values).get(name, "-")) / max(1, len(order) - 1) for one in configurations])
    means = [one.mean for one in configurations]
    width = max(means) - min(means) or 1.0
    ranks.append([(mean - min(means)) / width for mean in means])
    lines = [
        Line(str(number + 1), [float(place) for place in range(1, len(ranks) + 1)], [axis[number] for axis in ranks])
        for number in range(len(configurations))
    ]
    lines = [dataclasses.replace(line, colour=0 if number == 0 else 7) for number, line in enumerate(lines)]
    flags = ", ".join(f"{place} {format_flag(name)[2:]}" for place, name in enumerate(names, start=1))
    caption = (
        f"A line for each configuration; the best one has a colour of its own. Places: {flags}, {len(ranks)} "
        f"{sweep.metric}. Each option goes from its smallest value (0) to its largest (1)."
    )
    return [(caption, draw_lines("all configurations", ("place", "from smallest to largest"), lines[::-1], "o"))]


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def find_folder(sweep: Sweep, run: int) -> str:
    """Return the folder of a run's last attempt, relative to that of the sweep; empty if the run has not started."""
    start = sweep.find_start(run)
    return start.folder if start else ""


def describe_values(values: Mapping[str, str]) -> str:
    """Return the values of a run for people: "learning-rate 1e-5, seed 2"."""
    return ", ".join(f"{format_flag(name)[2:]} {text}" for name, text in values.items()) or "the only configuration"


def sweep_to_json(sweep: Sweep) -> dict[str, Any]:
    """Return the results of a sweep as a JSON object: metric, configurations with the best one first, and costs."""
    return {
        "metric": sweep.metric,
        "maximized": sweep.is_maximized,
        "configurations": [
            {
                "options": dict(one.values),
                "mean": one.mean,
                "standard_error": None if math.isnan(one.standard_error) else one.standard_error,
                "metrics": dict(one.metrics),
                "seconds": one.seconds,
                "best_run": find_folder(sweep, one.best_run),
            }
            for one in list_configurations(sweep)
        ],
        "failed": [sweep.header.runs[run - 1] for run in sweep.list_with_status(FAILED)],
        "pruned": [sweep.header.runs[run - 1] for run in sweep.list_with_status(PRUNED)],
        "host_hours": sweep.host_hours,
        "price": sweep.host_hours * sweep.header.price,
    }
