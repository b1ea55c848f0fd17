"""Searches whose runs are made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cpuft.rank.progress import format_evaluation
from cpuft.sweep.pruning import MedianPruner
from cpuft.sweep.search_space import OptionValues
from cpuft.sweep.study import DONE, FAILED, PRUNED, Attempt, Run, Sweep, SweepSettings, make_sweep

SETTINGS = SweepSettings(
    ["--max-steps=30"], 60, search="tpe", search_seed=1, pruner="median", spaces=[{"learning_rate": "1e-6..1e-2"}]
)
GRID = [{"learning_rate": rate, "seed": seed} for rate in ("1e-4", "3e-4") for seed in ("1", "2")]
EVALUATIONS = 3


def metric_of(run: OptionValues) -> float:
    """A metric that is best at a learning rate of 1e-4; it loses 0.1 for each factor of 10 away from that."""
    return 0.9 - 0.1 * abs(math.log10(float(run["learning_rate"])) + 4)


def begin(sweep: Sweep, run: Run, folder: str = "") -> None:
    sweep.note(run, Attempt("node1", folder or f"run-{run.number}", 0.0))


def end(sweep: Sweep, run: Run, status: str, metric: float = math.nan) -> None:
    metrics = {} if math.isnan(metric) else {"accuracy": metric}
    sweep.note(run, replace(run.attempts[-1], status=status, seconds=1.0, metrics=metrics))


def write_log(sweep: Sweep, run: Run, *lines: str) -> None:
    log = Path(sweep.folder, "logs", f"{run.folder}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def train(sweep: Sweep, pruner: MedianPruner, metric: Callable[[OptionValues], float] = metric_of) -> None:
    """Train the next configuration, one seed after another."""
    one = sweep.choose_next()
    for run in one.runs:
        begin(sweep, run)
        value = metric(run.values)
        for number in range(1, EVALUATIONS + 1):
            reached = value - 0.01 * (EVALUATIONS - number)
            write_log(sweep, run, format_evaluation(10 * number, {"accuracy": reached}))
            if reason := pruner.find_reason(run):
                sweep.prune(one, reason)
                end(sweep, run, PRUNED)
                break
        if one.pruned:
            break
        end(sweep, run, FAILED if math.isnan(value) else DONE, value)
    pruner.finish(one)
    sweep.conclude(one)


def make_search(
    folder: Path, settings: SweepSettings = SETTINGS, is_maximized: bool = True
) -> tuple[Sweep, MedianPruner]:
    sweep = make_sweep(str(folder), settings, is_maximized)
    return sweep, MedianPruner(sweep)


def find_rates(sweep: Sweep) -> list[float]:
    return [float(run.values["learning_rate"]) for run in sweep.runs]
