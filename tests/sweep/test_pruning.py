"""Which configurations are pruned, from evaluations that are made up."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

from cpuft.rank.progress import FINAL_EVALUATION_MARK, format_evaluation
from cpuft.sweep.pruning import MedianPruner
from cpuft.sweep.search_space import OptionValues
from cpuft.sweep.study import DONE, PRUNED, make_sweep
from tests.sweep.searches import GRID, SETTINGS, begin, end, find_rates, make_search, metric_of, train, write_log


def test_the_search_comes_near_the_best_and_prunes_what_is_worse_than_the_median(tmp_path: Path) -> None:
    sweep, pruner = make_search(tmp_path)
    for _ in range(30):
        train(sweep, pruner)
    distances = [abs(math.log10(rate) + 4) for rate in find_rates(sweep)]
    assert sum(distances[20:]) < 0.6 * sum(distances[:10])
    pruned = [run.number for run in sweep.list_runs(PRUNED)]
    assert pruned
    # Nothing is pruned before five configurations are complete.
    assert min(pruned) > 5
    for run in pruned:
        done = [one.number for one in sweep.list_runs(DONE) if one.number < run]
        better = [one for one in done if distances[one - 1] < distances[run - 1]]
        assert len(better) >= len(done) / 2
    assert min(distances) == min(distances[run.number - 1] for run in sweep.list_runs(DONE))


def test_a_smaller_metric_can_be_better(tmp_path: Path) -> None:
    sweep, pruner = make_search(tmp_path, is_maximized=False)
    for _ in range(30):
        train(sweep, pruner, lambda run: 1 - metric_of(run))
    distances = [abs(math.log10(rate) + 4) for rate in find_rates(sweep)]
    assert sum(distances[20:]) < 0.6 * sum(distances[:10])
    assert sweep.list_runs(PRUNED)


def test_evaluations_are_compared_after_the_same_share_of_the_training(tmp_path: Path) -> None:
    """Runs with a batch of 8 make eight times as many updates, and have learned less at the first evaluations."""
    spaces = [{"batch_size": "8,64", "epochs": "1,2", "learning_rate": "1e-6..1e-2"}]
    sweep, pruner = make_search(tmp_path, replace(SETTINGS, options=[], spaces=spaces))
    seen = Counter[tuple[str, bool]]()

    def count_updates(values: OptionValues) -> int:
        return 640 * int(values["epochs"]) // int(values["batch_size"])

    for _ in range(30):
        one = sweep.choose_next()
        (run,) = one.runs
        updates, quality = count_updates(run.values), metric_of(run.values)
        begin(sweep, run)
        for update in range(5, updates, 5):
            reached = quality - 0.5 * (1 - update / updates)
            write_log(sweep, run, format_evaluation(update, {"accuracy": reached}))
            if reason := pruner.find_reason(run):
                sweep.prune(one, reason)
                done = [other.values for other in sweep.list_runs(DONE)]
                known = [other for other in done if 5 / count_updates(other) <= update / updates]
                assert quality < statistics.median(map(metric_of, known)) + 1e-3
                break
        seen[run.values["batch_size"], bool(one.pruned)] += 1
        end(sweep, run, PRUNED if one.pruned else DONE, math.nan if one.pruned else quality)
        pruner.finish(one)
        sweep.conclude(one)
    assert seen["8", True]
    assert seen["8", False]


def test_a_curve_is_read_from_the_log_of_the_last_folder(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), replace(SETTINGS, search="grid", trials=1), True, GRID[:1])
    (run,), pruner = sweep.runs, MedianPruner(sweep)
    begin(sweep, run)
    write_log(sweep, run, format_evaluation(10, {"accuracy": 0.5}))
    assert pruner.find_reason(run) == ""
    begin(sweep, run, "run-1-attempt-2")
    final = (FINAL_EVALUATION_MARK + "4 examples", format_evaluation(30, {"accuracy": 0.1}))
    write_log(sweep, run, "step 9/30", format_evaluation(10, {"accuracy": 0.6}), *final)
    # It was interrupted in its last evaluation, and resumed from an older checkpoint.
    write_log(sweep, run, "step 9/30", format_evaluation(10, {"accuracy": 0.7}), format_evaluation(20, {"loss": 1.0}))
    after = MedianPruner(sweep)
    assert after._average(run.configuration) == [(10, 0.7)]


def test_what_a_run_reaches_that_begins_anew_replaces_what_it_had_reached(tmp_path: Path) -> None:
    sweep = make_sweep(str(tmp_path), replace(SETTINGS, search="grid", trials=1), True, GRID[:1])
    (run,), pruner = sweep.runs, MedianPruner(sweep)
    for folder, reached in (("run-1", (0.1, 0.2, math.nan)), ("run-1-attempt-2", (0.5, 0.6, 0.7))):
        begin(sweep, run, folder)
        for number, value in enumerate(reached, start=1):
            write_log(sweep, run, format_evaluation(10 * number, {"accuracy": value}))
            assert pruner.find_reason(run) == ""
        assert str([*sweep.configurations[0].curve.values()]) == str([*reached])


def test_the_seeds_of_a_pruned_configuration_that_were_not_trained_are_pruned_too(tmp_path: Path) -> None:
    spaces = [{"learning_rate": "1e-6..1e-2", "seed": "1,2"}]
    sweep, pruner = make_search(tmp_path, replace(SETTINGS, spaces=spaces, seeds=2))
    while not sweep.list_runs(PRUNED):
        train(sweep, pruner)
    assert sweep.list_runs(PRUNED) == sweep.configurations[-1].runs
    assert sweep.study.trials[-1].state.name == "PRUNED"
