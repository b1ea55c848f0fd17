"""What is said about the results of a sweep: table, JSON and page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.report.plots import Line, Panel
from cpuft.serialization import format_json
from cpuft.sweep import results
from cpuft.sweep.results import (
    choose_metric,
    compare_best_two,
    describe_best,
    format_sweep,
    list_results,
    sweep_to_json,
    write_sweep_page,
)
from cpuft.sweep.search_space import OptionValues, make_key
from cpuft.sweep.study import DONE, FAILED, PRUNED, Attempt, Run, Sweep, SweepSettings, make_sweep
from tests.conftest import Golden
from tests.judge.predicted import write_classes
from tests.records import make_record
from tests.report.test_comparison import write_record

RUNS = [{"learning_rate": rate, "seed": seed} for rate in ("1e-5", "3e-5", "1e-4") for seed in ("1", "2", "3")]
METRICS = (0.80, 0.81, 0.82, 0.85, 0.85, 0.87, 0.851, 0.849, 0.868)


def make(
    metrics: Sequence[float] = METRICS,
    runs: Sequence[OptionValues] = RUNS,
    is_maximized: bool = True,
    folder: str = "sweeps/a",
    **changes: Any,
) -> Sweep:
    """A sweep in which the first runs have ended, with these accuracies."""
    settings = replace(SweepSettings(["--task=mrpc"], len({*map(make_key, runs)}), price=2.0), **changes)
    sweep = make_sweep(folder, settings, is_maximized, runs)
    for run, metric in zip(sweep.runs, metrics, strict=False):
        end(sweep, run, accuracy=metric, f1=metric + 0.1)
    return sweep


def end(sweep: Sweep, run: Run, share: float = 1.0, **metrics: float) -> None:
    start = Attempt("node1", f"run-{run.number}", 1000.0 * run.number, share)
    sweep.note(run, start)
    sweep.note(run, replace(start, status=DONE, seconds=600.0, metrics=metrics))


def test_host_hours_count_the_share_of_a_host_that_each_attempt_had() -> None:
    """A sweep that divided one machine, and was continued on other hosts from its fourth run on."""
    sweep = make(())
    for run in sweep.runs:
        end(sweep, run, 0.25 if run.number <= 3 else 1.0, accuracy=0.5)
    assert sweep.host_hours == pytest.approx((3 / 4 + 6) * 600 / 3600)


def test_runs_that_differ_in_the_seed_only_are_one_configuration() -> None:
    sweep = make()
    found = list_results(sweep)
    assert [one.values for one in found] == [{"learning_rate": rate} for rate in ("3e-5", "1e-4", "1e-5")]
    assert found[0].metrics == {"1": 0.85, "2": 0.85, "3": 0.87}
    assert found[0].standard_error == pytest.approx(0.02 / 3)
    assert [one.best_run.number for one in found] == [6, 9, 3]
    assert (sweep.metric, sweep.is_maximized) == ("accuracy", True)
    assert sweep.host_hours == pytest.approx(1.5)


def test_a_smaller_metric_can_be_better() -> None:
    sweep = make((), is_maximized=False)
    for run in sweep.runs:
        end(sweep, run, perplexity=9.0 - run.number)
    assert [one.best_run.number for one in list_results(sweep)] == [9, 6, 3]


@pytest.mark.parametrize("is_maximized", [True, False])
def test_a_metric_that_is_not_a_number_is_the_worst(is_maximized: bool) -> None:
    sweep = make((math.nan, 0.8, 0.7, 0.5, math.nan, 0.6), [*RUNS[::3], *RUNS[1::3]], is_maximized)
    assert math.isnan(list_results(sweep)[-1].mean)
    assert list_results(sweep)[0].best_run.folder == ("run-3" if is_maximized else "run-4")
    one = make((math.nan, 0.5, 0.6), RUNS[:3], is_maximized)
    assert list_results(one)[0].best_run.number == (3 if is_maximized else 2)
    told = json.loads(format_json(sweep_to_json(one)))["configurations"][0]
    assert (told["mean"], told["metrics"]) == (None, {"1": None, "2": 0.5, "3": 0.6})


def test_what_is_said_about_the_best() -> None:
    found = list_results(make())
    assert describe_best(found).startswith("the best configuration is not distinguishable from number 2 (")
    assert describe_best(found[:1]) == "there is one configuration, so there is nothing to compare"
    assert describe_best([found[0], found[2]]).startswith("the best configuration is better than each of")
    single = list_results(make((0.8, 0.9), [RUNS[0], RUNS[3]]))
    assert "cannot be told, because a configuration has too few runs" in describe_best(single)


def test_the_table_of_a_sweep(golden: Golden) -> None:
    sweep = make(METRICS[:-1])
    last, start = sweep.runs[-1], Attempt("node1", "run-9", 0.0)
    sweep.note(last, start)
    reason = "the loss is nan at update 3: lower --learning-rate"
    sweep.note(last, replace(start, status=FAILED, seconds=20.0, reason=reason))
    golden("sweep.txt", format_sweep(sweep))


def test_a_report_can_compare_another_metric() -> None:
    sweep = make((), metric="accuracy", is_maximized=False)
    for run, metric in zip(sweep.runs, METRICS, strict=True):
        end(sweep, run, accuracy=metric, f1=metric + 0.1, loss=float(run.number))
    assert list_results(sweep)[0].best_run.number == 1
    # The direction is that of the sweep's own metric.
    choose_metric(sweep, "accuracy")
    assert list_results(sweep)[0].best_run.number == 1
    choose_metric(sweep, "f1")
    assert list_results(sweep)[0].best_run.number == 6
    choose_metric(sweep, "loss")
    assert list_results(sweep)[0].best_run.number == 1
    assert format_sweep(sweep).startswith("loss: less is better")
    with pytest.raises(CpuftError, match=r"has reported --metric f2: did you mean f1\?"):
        choose_metric(sweep, "f2")
    with pytest.raises(CpuftError, match="wait until one has ended"):
        choose_metric(make(()), "f1")


def test_the_report_says_what_was_pruned() -> None:
    sweep = make((0.5, 0.6))
    start = Attempt("node1", "run-4", 0.0)
    sweep.note(sweep.runs[3], start)
    sweep.prune(sweep.configurations[1], "worse")
    sweep.note(sweep.runs[3], replace(start, status=PRUNED, seconds=60.0))
    text = " ".join(format_sweep(sweep).split())
    # The other seeds of a configuration that was pruned are not trained.
    assert "3 runs pruned, because their evaluations were worse: 4, 5, 6" in text
    assert sweep_to_json(sweep)["pruned"] == RUNS[3:6]


def test_the_json_of_a_sweep_is_complete() -> None:
    told = json.loads(json.dumps(sweep_to_json(make())))
    assert (told["metric"], told["maximized"], told["failed"], told["price"]) == ("accuracy", True, [], 3.0)
    first = told["configurations"][0]
    assert first["options"] == {"learning_rate": "3e-5"}
    assert (first["best_run"], first["metrics"]["3"]) == ("run-6", 0.87)
    lone = json.loads(format_json(sweep_to_json(make((0.8,)))))
    assert lone["configurations"][0]["standard_error"] is None
    assert not math.isnan(lone["configurations"][0]["mean"])


def test_a_sweep_that_has_only_begun(tmp_path: Path) -> None:
    assert "no run has reported a metric" in format_sweep(make(()))
    with pytest.raises(CpuftError, match="has reported a metric: wait until one has"):
        write_sweep_page(make(()), tmp_path / "none.html")


def test_the_page_of_a_sweep_says_the_result_and_the_hosts(tmp_path: Path) -> None:
    write_record(make_record(), tmp_path / "run-1")
    page = write_sweep_page(make(folder=str(tmp_path)), tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "Mean accuracy over learning-rate, with standard errors; a line connects what" in page
    best = "Best accuracy: 0.8567 ± 0.0067 with learning-rate 3e-5. The best configuration is not distinguishable"
    assert page.count(f'<p class="verdict">{best}') == 1
    assert f"<td>{make_record().header.cpu_model}</td>" in page


def test_the_plots_of_a_page_name_the_values_of_their_options(tmp_path: Path) -> None:
    runs = [{"learning_rate": rate, "lr_schedule": kind} for rate in ("5e-5", "1e-4") for kind in ("linear", "cosine")]
    page = write_sweep_page(make(METRICS[:4], runs), tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "<figcaption>accuracy over learning-rate; a line connects what differs in nothing else." in page
    first, second = page.split("<svg")[1:]
    assert [text in first for text in (">5e-5<", ">1e-4<", ">learning-rate<", ">accuracy<")] == [True] * 4
    # Each line has a name.
    assert [text in first for text in ("lr-schedule linear", "lr-schedule cosine")] == [True, True]
    assert [text in second for text in (">linear<", ">cosine<")] == [True, True]


def test_many_numbers_have_a_scale_whose_labels_do_not_overlap() -> None:
    rates = [f"{number}e-{power}" for power in (4, 5) for number in (1, 2, 3, 4, 6, 8)]
    places, ticks = results._make_axis(rates)
    assert (places["1e-5"], places["8e-4"]) == (0.0, 11.0)
    assert [*ticks.values()] == ["1e-5", "4e-5", "1e-4", "4e-4"]


def test_many_configurations_are_drawn_as_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = list[Sequence[Line]]()

    def keep(panel: Panel) -> tuple[str, str]:
        drawn.append(panel.lines)
        return panel.caption, "<svg/>"

    monkeypatch.setattr(results, "draw", keep)
    runs = [{"learning_rate": f"{number}e-6", "lora_rank": rank} for number in range(1, 31) for rank in ("4", "8")]
    write_sweep_page(make([number / 100 for number in range(60)], runs), tmp_path / "a.html")
    rates, (ranks,) = drawn
    assert [(line.label, len(line.x)) for line in rates] == [("lora-rank 4", 30), ("lora-rank 8", 30)]
    # Each learning rate has two points, and a gap behind them.
    assert (len(ranks.x), sum(map(math.isnan, ranks.y))) == (90, 30)


@pytest.mark.parametrize(
    "counts, verdict", [((300, 10, 25, 73), "number 1 (run-2) is better"), ((300, 15, 20, 73), "No")]
)
def test_the_best_two_are_compared_row_by_row(tmp_path: Path, counts: tuple[int, ...], verdict: str) -> None:
    folders = (tmp_path / "run-1", tmp_path / "run-2")
    for folder in folders:
        folder.mkdir()
    metrics = [one["accuracy"] for one in write_classes(folders, counts)]
    single = make(metrics, [RUNS[0], RUNS[3]], folder=str(tmp_path))
    told = compare_best_two(single, list_results(single))
    assert told[0].startswith(f"the models of run-1 and run-2, row by row: {verdict}")
    assert told[1].startswith("the same 408 rows have chosen the best of 2 configurations and measured it")
    assert sweep_to_json(single)["best_two"] == told
    assert " ".join(told[0].split()) in " ".join(format_sweep(single).split())
    # Several seeds tell more than one run of each; the metric is as optimistic.
    seeds = make([metrics[0], metrics[1], 0.5, 0.5], [RUNS[0], RUNS[3], RUNS[1], RUNS[4]], folder=str(tmp_path))
    assert len(compare_best_two(seeds, list_results(seeds))) < 2
    # Without predictions nothing is said, and neither of one configuration.
    assert compare_best_two(make(), list_results(make())) == []
    assert compare_best_two(single, list_results(single)[:1]) == []
