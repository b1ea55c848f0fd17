"""The results of a sweep: its configurations, their means, and whether the best one is better than the others."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.config.fields import format_flag
from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.judge.difference import compare_predictions, describe_difference
from cpuft.judge.predictions import read_predictions
from cpuft.record import read_record
from cpuft.report.page import host_row, render_page
from cpuft.report.plots import COLOURS, Line, Panel, draw
from cpuft.report.significance import is_different, standard_error
from cpuft.sweep.search_space import SEED, OptionValues, describe_values
from cpuft.sweep.study import DONE, FAILED, PRUNED, Run, Sweep
from cpuft.terminal import format_table

_MINIMIZED = ("perplexity", "loss", "eval_loss")
"""Beginnings of the names of metrics of which less is better."""
_MOST_TICKS, _FEW_TICKS = 10, 5
"""Most values of an option that each have a tick of their own in a plot, and about how many ticks more values have."""
_SMALL_DIFFERENCE = 0.01
"""If validation rows can show such a difference, the best of many configurations is hardly better there by chance."""


def is_larger_better(metric: str) -> bool:
    """Return False for names that begin with perplexity, loss or eval_loss, else True."""
    return not metric.startswith(_MINIMIZED)


def choose_metric(sweep: Sweep, metric: str) -> None:
    """Set another metric of a sweep in memory, and `is_maximized` by its name. CpuftError: no run has reported it."""
    known = list(dict.fromkeys(name for run in sweep.runs for one in run.attempts for name in one.metrics))
    if metric not in known:
        raise CpuftError(
            f"no run of {sweep.folder} has reported --metric {metric:.60}: "
            + (suggest_names(metric, known) if known else "wait until one has ended")
        )
    if metric != sweep.metric:
        sweep.metric, sweep.is_maximized = metric, is_larger_better(metric)


@dataclass(frozen=True)
class Result:
    """What the runs of a configuration have reached."""

    values: OptionValues
    """Option and value, without the seed."""
    metrics: Mapping[str, float]
    """The metric that is compared, by seed; by the number of the run if the seed does not vary."""
    best_run: Run
    seconds: float
    """Mean of the runs."""

    @property
    def mean(self) -> float:
        """Mean of the metric over the runs."""
        return statistics.fmean(self.metrics.values())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN with one run, or if a value is not finite."""
        return standard_error([*self.metrics.values()]) if len(self.metrics) > 1 else math.nan


def list_results(sweep: Sweep) -> list[Result]:
    """Return the results of configurations with a "done" run that has the metric, the best mean first, NaN last."""
    sign, made = 1 if sweep.is_maximized else -1, list[Result]()
    for one in sweep.configurations:
        found = {
            run: run.attempts[-1].metrics[sweep.metric]
            for run in one.runs
            if run.status == DONE and sweep.metric in run.attempts[-1].metrics
        }
        if found:
            metrics = {run.values.get(SEED, f"run {run.number}"): value for run, value in found.items()}
            best = max(found, key=lambda run: _rank(sign * found[run]))
            made.append(Result(one.values, metrics, best, statistics.fmean(run.seconds for run in found)))
    return sorted(made, key=lambda one: _rank(sign * one.mean), reverse=True)


def _rank(value: float) -> float:
    """Return a number to sort by, where NaN is less than any other."""
    return -math.inf if math.isnan(value) else value


def describe_best(configurations: Sequence[Result]) -> str:
    """Return a clause, without a full stop, on whether the first of one or more results is surely the best."""
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
    which = "any of the others" if len(same) == len(others) else f"number {', '.join(map(str, same))}"
    return f"the best configuration is not distinguishable from {which} (t-test over seeds, 5 % level)"


def compare_best_two(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """Return up to two sentences on what predictions for the validation rows tell about the first two results.

    With several seeds the first is left out. [] for fewer than two results, without predictions of both for the same
    rows, or for a metric of which less is better.
    """
    if len(results) < 2:
        return []
    best, second = (one.best_run.folder for one in results[:2])
    try:
        told = compare_predictions(*(read_predictions(str(Path(sweep.folder, run))) for run in (second, best)))
    except CpuftError:
        return []
    found = next((one for one in told.found if one.metric == sweep.metric and sweep.is_maximized), None)
    if not found:
        return []
    notes, rows = list[str](), told.count(found.rows)
    if all(len(one.metrics) == 1 for one in results[:2]):
        verdict = describe_difference(told, f"number 2 ({second})", f"number 1 ({best})", found)
        notes.append(f"the models of {second} and {best}, row by row: {verdict}.")
    if found.smallest is None or found.smallest > _SMALL_DIFFERENCE:
        notes.append(
            f"the same {rows} have chosen the best of {len(results)} configurations and measured it, so its "
            f"{sweep.metric} is likely to be too good: measure the model on rows that have chosen nothing."
        )
    return notes


def format_sweep(sweep: Sweep) -> str:
    """Return the results of a sweep as a table with notes, the best configuration first; without any, it is empty."""
    results = list_results(sweep)
    notes = [f"{describe_best(results)}.", *compare_best_two(sweep, results)] if results else []
    arrow = "larger is better" if sweep.is_maximized else "less is better"
    title = f"{sweep.metric}: {arrow}" if results else "no run has reported a metric"
    return format_table(*_make_table(sweep, results), title, [*notes, *_list_notes(sweep)])


def _make_table(sweep: Sweep, results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    names, rows = _list_names(results), list[list[str]]()
    for number, one in enumerate(results, start=1):
        error = "-" if math.isnan(one.standard_error) else f"{one.standard_error:.4f}"
        figures = [f"{one.mean:.4f}", error, str(len(one.metrics)), f"{one.seconds / 60:.1f}"]
        rows.append([str(number), *(one.values.get(name, "-") for name in names), *figures, one.best_run.folder])
    flags = [format_flag(name)[2:] for name in names]
    return ["", *flags, f"mean {sweep.metric}", "+-", "runs", "minutes", "best run"], rows


def _list_names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for one in results for name in one.values))


def _list_notes(sweep: Sweep) -> list[str]:
    notes, settings = list[str](), sweep.settings
    for run in sweep.list_runs(DONE, FAILED):
        end, values = run.attempts[-1], describe_values(run.values)
        if run.status == FAILED:
            notes.append(f"failed: run {run.number} ({values}): {end.reason}")
        elif sweep.metric not in end.metrics:
            notes.append(f"run {run.number} ({values}) reports no {sweep.metric}, but {', '.join(end.metrics)}")
    if pruned := sweep.list_runs(PRUNED):
        numbers = ", ".join(str(run.number) for run in pruned)
        notes.append(f"{counted(len(pruned), 'run')} pruned, because their evaluations were worse: {numbers}")
    done, total = len(sweep.list_runs(DONE)), sweep.total
    cost = f", {sweep.host_hours * settings.price:.2f} dollars" if settings.price else ""
    return [*notes, f"{done} of {counted(total, 'run')} done, {sweep.host_hours:.2f} host-hours{cost}."]


def write_sweep_page(sweep: Sweep, path: Path) -> Path:
    """Write the results as HTML to `path`; return `path`. CpuftError: no results, no matplotlib, another file there."""
    if results := list_results(sweep):
        return render_page(path, _describe_page(sweep, results))
    raise CpuftError(f"no run of {sweep.folder} has reported a metric: wait until one has, or see the logs of its runs")


def _describe_page(sweep: Sweep, results: Sequence[Result]) -> dict[str, Any]:
    columns, rows = _make_table(sweep, results)
    best, sentence = results[0], describe_best(results)
    off = "" if math.isnan(best.standard_error) else f" ± {best.standard_error:.4f}"
    return {
        "title": f"Sweep {Path(sweep.folder).name}: {counted(len(results), 'configuration')}",
        "verdict": f"Best {sweep.metric}: {best.mean:.4f}{off} with {describe_values(best.values)}. "
        f"{sentence[0].upper()}{sentence[1:]}.",
        "columns": columns,
        "rows": rows,
        "legend": [],
        "figures": {f"{sweep.metric} by option": _draw_options(sweep, results)},
        "links": [],
        "hosts": _list_hosts(sweep),
        "settings": [("options of all runs", " ".join(sweep.settings.options))],
        "notes": [*compare_best_two(sweep, results), *_list_notes(sweep)],
    }


def _list_hosts(sweep: Sweep) -> list[list[str]]:
    first: dict[str, Run] = {}
    for run in sweep.list_runs(DONE):
        first.setdefault(run.attempts[-1].place, run)
    rows = list[list[str]]()
    for run in first.values():
        with suppress(CpuftError):  # the folder of a run may have been moved
            rows.append(host_row(read_record(str(Path(sweep.folder, run.folder)))))
    return rows


def _draw_options(sweep: Sweep, results: Sequence[Result]) -> list[tuple[str, str]]:
    drawn = list[tuple[str, str]]()
    for name in _list_names(results):
        places, ticks = _make_axis(sorted({one.values[name] for one in results if name in one.values}))
        if len(places) < 2:
            continue
        groups: dict[str, list[tuple[float, float, float]]] = {}
        for one in sorted(results, key=lambda one: one.best_run.number):  # so that the legend is in the order of values
            if name in one.values:
                others = describe_values({key: text for key, text in one.values.items() if key != name})
                error = 0.0 if math.isnan(one.standard_error) else one.standard_error
                groups.setdefault(others, []).append((places[one.values[name]], one.mean, error))
        curves = {others: sorted(points) for others, points in groups.items()}
        if len(curves) > COLOURS:  # they are drawn as one with gaps, because thousands take minutes
            gaps = ((*points, (points[0][0], math.nan, 0.0)) for points in curves.values())
            curves = {"": [*itertools.chain.from_iterable(gaps)]}
        lines = list[Line]()
        for others, points in curves.items():
            x, y, off = (list(column) for column in zip(*points, strict=True))
            lines.append(Line(others, x, y, off, colour=len(lines)))
        flag = format_flag(name)[2:]
        what, has_seeds = f"{sweep.metric} over {flag}", any(len(one.metrics) > 1 for one in results)
        caption = f"Mean {what}, with standard errors" if has_seeds else what
        caption += "; a line connects what differs in nothing else." if len(results) > len(groups) else "."
        drawn.append(draw(Panel(caption, what, (flag, sweep.metric), lines, "o", ticks=ticks)))
    return drawn


def _make_axis(texts: Sequence[str]) -> tuple[dict[str, float], dict[float, str]]:
    """Return (place of each value of an option on an axis, labels by their place): the values are equally far apart in
    their order, and each has a label, or if there are many about five of them.
    """
    numbers = dict[str, float]()
    for text in texts:
        with suppress(ValueError):
            numbers[text] = float(text)
    order = sorted(texts, key=lambda text: (numbers.get(text, math.inf), text))
    places = {text: float(place) for place, text in enumerate(order)}
    every = 1 if len(order) <= _MOST_TICKS else math.ceil(len(order) / _FEW_TICKS)
    return places, {places[text]: text for text in order[::every]}


def sweep_to_json(sweep: Sweep) -> dict[str, Any]:
    """Return for JSON: `metric`, `maximized`, `configurations` (those of `list_results`, the best first), `best_two`
    (sentences), `failed` and `pruned` (values of runs), `host_hours` and `price` (of all these hours; 0 if unknown).
    """
    results = list_results(sweep)
    return {
        "metric": sweep.metric,
        "maximized": sweep.is_maximized,
        "configurations": [
            {
                "options": one.values,
                "mean": one.mean,
                "standard_error": one.standard_error,
                "metrics": dict(one.metrics),
                "seconds": one.seconds,
                "best_run": one.best_run.folder,
            }
            for one in results
        ],
        "best_two": compare_best_two(sweep, results),
        "failed": [run.values for run in sweep.list_runs(FAILED)],
        "pruned": [run.values for run in sweep.list_runs(PRUNED)],
        "host_hours": sweep.host_hours,
        "price": sweep.host_hours * sweep.settings.price,
    }
