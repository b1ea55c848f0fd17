"""Run by scripts/check-optuna: whether Optuna finds the best configuration of a grid in half of the grid's host-hours.

The whole grid is trained once, with evaluations while training. Then the sampler and the pruner are replayed on the
records: a configuration that they choose costs the seconds that were recorded, up to the evaluation after which it is
pruned.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft.config.fields import format_flag
from cpuft.rank.progress import format_evaluation
from cpuft.record import read_record
from cpuft.sweep.pruning import MedianPruner
from cpuft.sweep.study import DONE, FILE_NAME, PRUNED, Attempt, Run, Sweep, SweepSettings, make_sweep, read_sweep
from cpuft.terminal import format_table

GRID = {
    "learning_rate": "1e-5,2e-5,5e-5,1e-4,2e-4,5e-4",
    "batch_size": "8,16,32,64",
    "warmup_ratio": "0,0.1",
    "lr_schedule": "linear,cosine",
}
METRIC = "accuracy"
TRIALS = 40
SEEDS = (0, 1, 2)
MOST_SHARE = 0.5
"""Largest share of the host-hours of the grid that the search may need."""


@dataclass(frozen=True)
class RecordedRun:
    """What a run of the grid has reached, and what that took."""

    evaluations: list[tuple[int, float, float]]
    """For each evaluation while training: number of updates, metric, and seconds from the start of the launch."""
    metric: float
    """At the end."""
    seconds: float
    """Of the whole launch."""


@dataclass(frozen=True)
class Replay:
    """A search until it found the best configuration of the grid."""

    trials: int
    """Number of configurations until then; all of them if it was not found."""
    pruned: int
    """Number of those that were pruned."""
    seconds: float
    """Host-seconds until then."""
    is_found: bool
    metric: float
    """The best of its configurations that were trained to their end."""


Key = tuple[tuple[str, str], ...]


def make_key(values: Mapping[str, str]) -> Key:
    """Return the values of a configuration in an order that does not depend on how they were written."""
    return tuple(sorted(values.items()))


def train_grid(arguments: Sequence[str], folder: Path) -> Sweep:
    """Train the whole grid into a folder, or what is missing there, and return the sweep."""
    if (folder / FILE_NAME).exists():
        words = ["--resume", str(folder)]
    else:
        lists = [f"{format_flag(name)}={text}" for name, text in GRID.items()]
        words = ["--run-dir", str(folder), "--metric", METRIC, "--no-save-model", *lists, *arguments]
    subprocess.run([sys.executable, "-m", "cpuft", "sweep", *words], check=True, stdout=subprocess.DEVNULL)
    return read_sweep(str(folder))


def read_grid(sweep: Sweep) -> dict[Key, RecordedRun]:
    """Return the runs of a grid by their values.

    The launch and the end of a run count as if they came before its first update, so that a pruned run costs rather too
    much than too little.
    """
    found = {}
    for run in sweep.list_runs(DONE):
        record = read_record(str(Path(sweep.folder, run.folder)))
        seconds, last = run.seconds, record.steps[-1].step
        training = sum(step.step_seconds for step in record.steps) + sum(one.seconds for one in record.evaluations)
        other = max(0.0, seconds - training)
        evaluations = [
            (
                line.step,
                line.metrics[sweep.metric],
                other
                + sum(step.step_seconds for step in record.steps if step.step <= line.step)
                + sum(one.seconds for one in record.evaluations if one.step <= line.step),
            )
            for line in record.evaluations
            if line.step < last
        ]
        found[make_key(run.values)] = RecordedRun(evaluations, record.metrics[sweep.metric], seconds)
    return found


def replay_search(
    runs: Mapping[Key, RecordedRun], spaces: list[dict[str, str]], seed: int, trials: int = TRIALS
) -> Replay:
    """Return how Optuna's sampler and pruner find the best configuration of a grid, on one host.

    Parameters
    ----------
    runs: all configurations of the grid.
    spaces: the values of each option.
    seed: of the sampler.
    """
    best, reached, seconds = max(run.metric for run in runs.values()), -math.inf, 0.0
    settings = SweepSettings([], trials, METRIC, search="tpe", search_seed=seed, pruner="median", spaces=spaces)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "logs").mkdir()
        sweep = make_sweep(folder, settings, True)
        pruner = MedianPruner(sweep)
        while len(sweep.configurations) < trials and reached < best:
            (run,) = sweep.choose_next().runs
            end = _replay_run(sweep, pruner, run, runs[make_key(run.values)])
            seconds += end.seconds
            reached = max(reached, end.metrics.get(METRIC, reached))
        pruned = len(sweep.list_runs(PRUNED))
        return Replay(len(sweep.configurations), pruned, seconds, reached >= best, reached)


def _replay_run(sweep: Sweep, pruner: MedianPruner, run: Run, recorded: RecordedRun) -> Attempt:
    """Let a run make its recorded evaluations until it is pruned, and return how it ended."""
    start = Attempt("", f"run-{run.number}", 0.0)
    sweep.note(run, start)
    end = replace(start, status=DONE, seconds=recorded.seconds, metrics={METRIC: recorded.metric})
    with Path(sweep.folder, "logs", f"{run.folder}.log").open("w", encoding="utf-8") as log:
        for update, metric, passed in recorded.evaluations:
            print(format_evaluation(update, {METRIC: metric}), file=log, flush=True)
            if reason := pruner.find_reason(run):
                sweep.prune(run.configuration, reason)
                end = replace(start, status=PRUNED, seconds=passed)
                break
    sweep.note(run, end)
    pruner.finish(run.configuration)
    sweep.conclude(run.configuration)
    return end


def describe(replays: Mapping[int, Replay], grid_seconds: float, best: float) -> tuple[str, bool]:
    """Return (a table of the replays by their seed, whether the median of their shares is small enough).

    Parameters
    ----------
    grid_seconds: host-seconds of the whole grid.
    best: the best metric of the grid.
    """
    shares = [one.seconds / grid_seconds if one.is_found else math.inf for one in replays.values()]
    rows = [
        [
            str(seed),
            "yes" if one.is_found else "no",
            str(one.trials),
            str(one.pruned),
            f"{one.seconds / 3600:.2f}",
            f"{one.seconds / grid_seconds:.2f}",
            f"{one.metric:.4f}",
        ]
        for seed, one in replays.items()
    ]
    columns = ["seed", "found", "trials", "pruned", "host-hours", "of the grid's", METRIC]
    title = f"grid: {grid_seconds / 3600:.2f} host-hours, best {METRIC} {best:.4f}"
    middle = statistics.median(shares)
    found = f"median: {middle:.2f} of the grid's host-hours"
    if math.isinf(middle):
        found = "the best configuration is not found by most searches"
    return format_table(
        columns, rows, title, [f"{found}; at most {MOST_SHARE} of the grid's host-hours is good."]
    ), middle <= MOST_SHARE


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/check-optuna", description=__doc__)
    parser.add_argument("glue", type=Path, help="folder of the GLUE download, of which MRPC is used")
    parser.add_argument("records", type=Path, help="folder for the runs of the grid; those that are there stay")
    parser.add_argument(
        "options", nargs="*", help="more options of cpuft sweep, after --, such as -- --cluster lab --epochs 2"
    )
    given = parser.parse_args()
    words = ["--task", "mrpc", "--data-dir", str(given.glue), "--eval-every", "25", "--epochs", "3", *given.options]
    sweep = train_grid(words, given.records)
    runs = read_grid(sweep)
    if len(runs) < len(sweep.runs):
        sys.exit(f"{len(sweep.runs) - len(runs)} runs of the grid in {given.records} failed: start again")
    replays = {seed: replay_search(runs, [GRID], seed) for seed in SEEDS}
    best = max(run.metric for run in runs.values())
    text, is_good = describe(replays, sum(run.seconds for run in runs.values()), best)
    print(text, end="")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
