"""The replay of a search on the records of a grid."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.record import FILE_NAME, EvaluationLine, Line, format_line
from cpuft.sweep.study import DONE, Attempt, SweepSettings, make_sweep
from scripts.benchmarks.check_optuna import (
    GRID,
    SEEDS,
    Key,
    RecordedRun,
    Replay,
    describe,
    make_key,
    read_grid,
    replay_search,
)
from tests.records import make_record, make_steps


def make_grid() -> dict[Key, RecordedRun]:
    """A grid whose best learning rate is 1e-4, with evaluations that tell early how good a run is."""
    lists = [[(name, text) for text in texts.split(",")] for name, texts in GRID.items()]
    found = {}
    for pairs in itertools.product(*lists):
        values = dict(pairs)
        metric = 0.9 - 0.1 * abs(math.log10(float(values["learning_rate"])) + 4) - float(values["batch_size"]) / 1e4
        metric += 0.001 * (values["warmup_ratio"] == "0.1") + 0.001 * (values["lr_schedule"] == "cosine")
        evaluations = [(step, metric - 0.1 + step / 1000, 10.0 * step) for step in (10, 20, 30)]
        found[make_key(values)] = RecordedRun(evaluations, metric, 400.0)
    return found


def test_a_pruned_configuration_costs_what_it_took_until_then() -> None:
    runs = make_grid()
    assert len(runs) == 96
    found = [replay_search(runs, [GRID], seed) for seed in SEEDS]
    assert found == [replay_search(runs, [GRID], seed) for seed in SEEDS]
    assert any(one.pruned for one in found)
    for one in found:
        whole = 400.0 * (one.trials - one.pruned)
        assert whole + 100.0 * one.pruned <= one.seconds <= whole + 300.0 * one.pruned
        assert one.is_found or one.trials == 40
    few = replay_search(runs, [GRID], 0, trials=2)
    assert (few.trials, few.pruned, few.seconds) == (2, 0, 800.0)


def test_the_median_over_seeds_decides() -> None:
    fast, slow = Replay(10, 3, 3600.0, True, 0.9), Replay(40, 20, 9000.0, True, 0.9)
    text, is_good = describe({0: fast, 1: slow, 2: fast}, 10_000.0, 0.9)
    assert is_good
    assert "grid: 2.78 host-hours, best accuracy 0.9000" in text
    assert "median: 0.36 of the grid's host-hours; at most 0.5 of the grid's host-hours is good" in " ".join(
        text.split()
    )
    assert not describe({0: fast, 1: slow, 2: slow}, 10_000.0, 0.9)[1]
    lost = Replay(40, 20, 1000.0, False, 0.8)
    text, is_good = describe({0: fast, 1: lost, 2: lost}, 10_000.0, 0.9)
    assert (is_good, "the best configuration is not found" in text) == (False, True)


def test_the_seconds_of_an_evaluation_are_those_of_the_launch_and_of_the_updates_before_it(tmp_path: Path) -> None:
    evaluations = [EvaluationLine(step, {"accuracy": step / 10}, 400, 2.0) for step in (2, 4, 8)]
    record = replace(make_record(), steps=make_steps(8, [0.3]), evaluations=evaluations)
    assert record.footer
    lines: list[Line] = [record.header, *record.steps, *record.evaluations, record.footer]
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / FILE_NAME).write_text("".join(format_line(line) + "\n" for line in lines))
    sweep = make_sweep(str(tmp_path), SweepSettings([], 1, "accuracy"), True, [{"learning_rate": "1e-4"}])
    start = Attempt("", "run-1", 0.0)
    for attempt in (start, replace(start, status=DONE, seconds=500.0, metrics=dict(record.metrics))):
        sweep.note(sweep.runs[0], attempt)
    run = read_grid(sweep)[make_key({"learning_rate": "1e-4"})]
    assert (run.seconds, run.metric) == (500.0, 0.8)
    assert [(step, metric) for step, metric, _ in run.evaluations] == [(2, 0.2), (4, 0.4)]
    for step, _, seconds in run.evaluations:
        later = sum(one.step_seconds for one in record.steps if one.step > step)
        later += sum(one.seconds for one in evaluations if one.step > step)
        assert later > 2.0
        assert seconds == pytest.approx(500.0 - later)
