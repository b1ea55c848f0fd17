"""The journal of a sweep, and what is said about its results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.report.sweep import (
    DONE,
    FAILED,
    PRUNED,
    VERSION,
    AttemptEnd,
    AttemptStart,
    Evaluation,
    JournalLine,
    SearchSettings,
    Sweep,
    SweepHeader,
    Trial,
    choose_metric,
    describe_best,
    format_journal_line,
    format_sweep,
    list_configurations,
    parse_journal,
    read_sweep,
    sweep_to_json,
    write_sweep_page,
)
from tests.conftest import Golden

RUNS = [{"learning_rate": rate, "seed": seed} for rate in ("1e-5", "3e-5", "1e-4") for seed in ("1", "2", "3")]
HEADER = SweepHeader(VERSION, ["--task=mrpc"], RUNS, "", "auto", 1, 2.0, [1.0] * 9)
METRICS = (0.80, 0.81, 0.82, 0.85, 0.85, 0.87, 0.851, 0.849, 0.868)


def make_lines(metrics: tuple[float, ...] = METRICS) -> list[JournalLine]:
    """A journal in which all runs have ended, one after another."""
    lines: list[JournalLine] = [HEADER]
    for run, metric in enumerate(metrics, start=1):
        lines.append(AttemptStart(run, 1, "node1", f"run-{run}", 1000.0 * run))
        lines.append(AttemptEnd(run, 1, DONE, 0, 600.0, {"accuracy": metric, "f1": metric + 0.1}))
    return lines


def make_sweep(lines: list[JournalLine] | None = None) -> Sweep:
    return parse_journal("".join(format_journal_line(line) + "\n" for line in lines or make_lines()), "sweeps/a")


def test_host_hours_count_the_share_of_a_host_that_each_attempt_had() -> None:
    """A sweep that divided one machine, and was continued on other hosts from its fourth run on."""
    older = [replace(HEADER, host_share=0.25), *make_lines()[1:]]
    assert make_sweep(older).host_hours == pytest.approx(9 * 600 / 3600 / 4)
    lines = [replace(one, host_share=1.0) if isinstance(one, AttemptStart) and one.run > 3 else one for one in older]
    assert make_sweep(lines).host_hours == pytest.approx((3 / 4 + 6) * 600 / 3600)


def test_a_journal_is_read_back_also_with_a_last_line_that_was_cut_off() -> None:
    lines = make_lines()
    text = "".join(format_journal_line(line) + "\n" for line in lines)
    sweep = parse_journal(text, "sweeps/a")
    assert (sweep.header, len(sweep.starts), len(sweep.ends)) == (HEADER, 9, 9)
    cut = parse_journal(text[:-20], "sweeps/a")
    assert (len(cut.starts), len(cut.ends)) == (9, 8)
    assert cut.find_end(9) is None
    assert cut.list_with_status(DONE) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no header of this version"),
        (format_journal_line(make_lines()[1]) + "\n", "has no header of this version"),
        (format_journal_line(replace(HEADER, version=99)) + "\n", "has no header of this version"),
        (format_journal_line(HEADER) + '\n{"kind": "start"}\n', "line 2 is not a line of a sweep"),
        (format_journal_line(HEADER) + '\n{"kind": "x"}\n', "line 2 is not a line of a sweep"),
    ],
)
def test_a_broken_journal_is_refused(text: str, problem: str) -> None:
    with pytest.raises(CpuftError, match=problem):
        parse_journal(text, "sweeps/a")


@pytest.mark.parametrize(
    "changes",
    [
        {"options": ["--", "planted.py"]},
        {"options": ["planted.py"]},
        {"options": ["--mpirun=/tmp/planted"]},
        {"launch": ["--mpirun=/tmp/planted"]},
        {"launch": ["--ssh-config", "/tmp/planted"]},
        {"launch": ["--ssh-config=/tmp/planted"]},
        {"runs": [{"run_dir": "/tmp/planted"}], "lengths": [1.0]},
    ],
)
def test_arguments_that_no_sweep_writes_are_not_passed_to_a_launch(changes: dict[str, Any]) -> None:
    with pytest.raises(CpuftError, match="which no sweep writes"):
        make_sweep([replace(HEADER, **changes)])
    good = replace(HEADER, options=["--task=mrpc", "--no-fast-path", "--np=2"], launch=["--cluster=lab", "--no-check"])
    assert make_sweep([good]).header == good


def test_a_run_is_in_the_folder_of_its_sweep() -> None:
    with pytest.raises(CpuftError, match="which no sweep writes"):
        make_sweep([HEADER, AttemptStart(1, 1, "node1", "../other", 0.0)])


def test_a_journal_of_version_1_is_read() -> None:
    first, *others = [json.loads(format_journal_line(line)) for line in make_lines()]
    del first["search"]
    lines = [first | {"version": 1}, *others]
    sweep = parse_journal("".join(json.dumps(line) + "\n" for line in lines), "sweeps/a")
    assert (sweep.total, sweep.list_with_status(DONE), sweep.trials) == (9, [*range(1, 10)], ())
    assert sweep.find_trial(3) == 0


SEARCH = SearchSettings(3, 2, spaces=[{"lora_rank": "4,8,16", "seed": "1,2"}])
SEARCHED = replace(HEADER, runs=[], lengths=[], search=SEARCH)
TRIALS = [
    Trial(number, {"lora_rank": rank}, [{"lora_rank": rank, "seed": seed} for seed in ("1", "2")], [1.0, 1.0])
    for number, rank in enumerate(("8", "4"), start=1)
]


def test_configurations_that_were_chosen_while_the_sweep_ran_are_read_back() -> None:
    lines: list[JournalLine] = [
        SEARCHED,
        TRIALS[0],
        AttemptStart(1, 1, "a", "run-1", 0.0),
        Evaluation(1, 1, 5, {"accuracy": 0.5}),
        TRIALS[1],
    ]
    sweep = make_sweep([*lines, AttemptEnd(1, 1, PRUNED, 143, 60.0, {}, "worse")])
    assert [run["lora_rank"] for run in sweep.header.runs] == ["8", "8", "4", "4"]
    assert (sweep.total, sweep.trials, sweep.metric) == (6, tuple(TRIALS), "accuracy")
    assert (sweep.list_runs(2), [sweep.find_trial(run) for run in sweep.numbers]) == (range(3, 5), [1, 1, 2, 2])
    # The second seed of a configuration that was pruned is not trained.
    assert sweep.list_with_status(PRUNED) == [1, 2]
    assert "2 runs pruned, because their evaluations were worse: 1, 2" in format_sweep(sweep)
    assert sweep_to_json(sweep)["pruned"] == TRIALS[0].runs
    assert sweep.host_hours == pytest.approx(1 / 60)


@pytest.mark.parametrize(
    "lines",
    [
        [SEARCHED, TRIALS[1]],
        [SEARCHED, TRIALS[0], replace(TRIALS[1], lengths=[1.0])],
        [SEARCHED, replace(TRIALS[0], runs=[], lengths=[])],
        [replace(SEARCHED, search=replace(SEARCH, trials=1)), *TRIALS],
        [replace(SEARCHED, search=replace(SEARCH, pruner="own"))],
        [replace(SEARCHED, search=replace(SEARCH, sampler="own"))],
        [replace(SEARCHED, search=replace(SEARCH, spaces=[]))],
        [replace(HEADER, search=SEARCH)],
        [HEADER, TRIALS[0]],
        [SEARCHED, replace(TRIALS[0], runs=[{"mpirun": "/tmp/planted"}], lengths=[1.0])],
        [replace(SEARCHED, search=replace(SEARCH, spaces=[{"run_dir": "/tmp/planted"}]))],
        [SEARCHED, TRIALS[0], AttemptStart(3, 1, "node1", "run-3", 0.0)],
    ],
)
def test_configurations_that_no_sweep_writes_are_refused(lines: list[JournalLine]) -> None:
    with pytest.raises(CpuftError, match=r"start the sweep anew|which no sweep writes"):
        make_sweep(lines)


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=r"there is no sweep in .*, because it has no file sweep.jsonl"):
        read_sweep(str(tmp_path))


def test_runs_that_differ_in_the_seed_only_are_one_configuration() -> None:
    sweep = make_sweep()
    found = list_configurations(sweep)
    assert [dict(one.values) for one in found] == [{"learning_rate": rate} for rate in ("3e-5", "1e-4", "1e-5")]
    assert found[0].metrics == {"1": 0.85, "2": 0.85, "3": 0.87}
    assert found[0].standard_error == pytest.approx(0.02 / 3)
    assert [one.best_run for one in found] == [6, 9, 3]
    assert (sweep.metric, sweep.is_maximized) == ("accuracy", True)
    assert sweep.host_hours == pytest.approx(1.5)


def test_a_smaller_perplexity_is_better() -> None:
    lines = [
        replace(line, metrics={"perplexity": 9.0 - line.run}) if isinstance(line, AttemptEnd) else line
        for line in make_lines()
    ]
    sweep = make_sweep(lines)
    assert [one.best_run for one in list_configurations(sweep)] == [9, 6, 3]
    other = make_sweep([replace(HEADER, direction="maximize"), *lines[1:]])
    assert list_configurations(other)[0].best_run == 1


def test_what_is_said_about_the_best() -> None:
    sweep = make_sweep()
    found = list_configurations(sweep)
    assert describe_best(found).startswith("the best configuration is not distinguishable from the next one (")
    assert describe_best(found[:1]) == "there is one configuration, so there is nothing to compare"
    assert describe_best([found[0], found[2]]).startswith("the best configuration is better than each of")
    single = make_sweep(make_lines((0.8,))[:3] + make_lines()[7:9])
    assert "cannot be told, because a configuration has too few runs" in describe_best(list_configurations(single))


def test_the_table_of_a_sweep(golden: Golden) -> None:
    lines = make_lines()
    failed = AttemptEnd(9, 1, FAILED, 1, 20.0, {}, "the loss is nan at update 3: lower --learning-rate")
    golden("sweep.txt", format_sweep(make_sweep([*lines[:-1], failed])))


def test_a_report_can_compare_another_metric() -> None:
    lines = [
        replace(line, metrics=line.metrics | {"loss": float(line.run)}) if isinstance(line, AttemptEnd) else line
        for line in make_lines()
    ]
    sweep = make_sweep([replace(HEADER, metric="accuracy", direction="minimize"), *lines[1:]])
    assert list_configurations(sweep)[0].best_run == 1
    # The direction is that of the sweep's own metric.
    assert list_configurations(choose_metric(sweep, "f1"))[0].best_run == 6
    assert list_configurations(choose_metric(sweep, "loss"))[0].best_run == 1
    assert choose_metric(sweep, "accuracy") == sweep
    assert format_sweep(choose_metric(sweep, "loss")).startswith("loss: less is better")
    with pytest.raises(CpuftError, match=r"has reported --metric f2: did you mean f1\?"):
        choose_metric(sweep, "f2")
    with pytest.raises(CpuftError, match="wait until one has ended"):
        choose_metric(make_sweep([HEADER]), "f1")


def test_the_report_says_what_was_measured() -> None:
    header = replace(HEADER, measurement="--parallel auto: 2 at a time")
    assert "* --parallel auto: 2 at a time." in format_sweep(make_sweep([header, *make_lines()[1:]]))


def test_the_json_of_a_sweep_is_complete() -> None:
    told = json.loads(json.dumps(sweep_to_json(make_sweep())))
    assert (told["metric"], told["maximized"], told["failed"], told["price"]) == ("accuracy", True, [], 3.0)
    first = told["configurations"][0]
    assert first["options"] == {"learning_rate": "3e-5"}
    assert (first["best_run"], first["metrics"]["3"]) == ("run-6", 0.87)
    lone = sweep_to_json(make_sweep(make_lines((0.8,))))
    assert lone["configurations"][0]["standard_error"] is None
    assert not math.isnan(lone["configurations"][0]["mean"])


def test_a_sweep_that_has_only_begun() -> None:
    assert "no run has reported a metric" in format_sweep(make_sweep([HEADER]))


def test_the_page_of_a_sweep_has_a_plot_for_each_number(tmp_path: Path) -> None:
    page = write_sweep_page(make_sweep(), tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "Best accuracy: 0.8567 with learning-rate 3e-5. The best configuration is not distinguishable" in page
    assert "logarithm (base 10) of learning-rate" in page
    runs = [{"lora_rank": rank, "lr_schedule": kind} for rank in ("4", "8") for kind in ("linear", "cosine")]
    lines = make_lines()[1:9]
    two = make_sweep([replace(HEADER, runs=runs, lengths=[1.0] * len(runs)), *lines])
    page = write_sweep_page(two, tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "1 lora-rank, 2 lr-schedule, 3 accuracy" in page
    with pytest.raises(CpuftError, match="has reported a metric: wait until one has ended"):
        write_sweep_page(make_sweep([HEADER]), tmp_path / "none.html")
