"""Runs against their ideals, and intervals over repeats."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cpuft.cli import cli
from cpuft.errors import CpuftError
from cpuft.record import BaselineLine, EvaluationLine, Line, Record, ResumedLine, StepLine, format_line
from cpuft.report.comparison import MISSING_TIME, compare, compare_with_ideal, count_common
from cpuft.report.comparison_tables import (
    format_markdown,
    format_text,
    format_title,
    format_verdict,
    make_table,
    to_json,
)
from cpuft.report.page import find_runs, host_row, write_page, write_report
from cpuft.report.significance import half_width
from tests.conftest import Golden
from tests.records import make_record, make_steps, with_rate

SECONDS = st.floats(0.01, 10)


def make_ideal(seconds: list[float], steps: int = 20, hosts: int = 2, **changes: Any) -> Record:
    """Ranks that each take so long for a step of 32 rows."""
    ranks = len(seconds)
    lines = make_steps(steps, [0.0], step_seconds=sum(seconds) / ranks, samples=32 * ranks)
    lines = [dataclasses.replace(line, compute_seconds=seconds) for line in lines]
    return dataclasses.replace(make_record(ranks, hosts, independent=True, **changes), path="runs/ideal", steps=lines)


def make_run(compute: list[float], waited: float, rest: float = 0.01, **changes: Any) -> Record:
    """Ranks that compute so long in a step; rank 0 waits `waited` seconds."""
    ranks = len(compute)
    lines = make_steps(20, compute, step_seconds=compute[0] + waited + rest, samples=32 * ranks, waited=waited)
    return dataclasses.replace(make_record(ranks, ranks, **changes), steps=lines)


def test_where_the_missing_share_went() -> None:
    # Rank 0 computes 1.2 s and waits 0.8, 0.2 of it for rank 1, which computes 1.4; alone each takes 1.
    found = compare_with_ideal(make_run([1.2, 1.4], 0.8, 0.05), make_ideal([1.0, 1.0]))
    assert found is not None
    assert found.samples_per_second == pytest.approx(64)
    assert found.efficiency == pytest.approx(1 / 2.05)
    wanted = {"waiting": 0.6, "slowed": 0.3, "uneven": 0.1, "rest": 0.05}
    assert found.parts == pytest.approx(wanted)
    assert list(found.parts) == list(MISSING_TIME)


def test_the_ideal_is_the_sum_of_its_ranks_rates() -> None:
    # 32 rows in 1 s and in 3 s: 32 + 32 / 3 samples/s.
    found = compare_with_ideal(make_run([1.0, 3.0], 2.0), make_ideal([1.0, 3.0]))
    assert found is not None
    assert found.samples_per_second == pytest.approx(32 + 32 / 3)


@given(st.lists(SECONDS, min_size=4, max_size=4), st.lists(SECONDS, min_size=2, max_size=2), SECONDS, SECONDS)
def test_the_parts_add_up(computes: list[float], alone: list[float], waited: float, rest: float) -> None:
    run = make_run(computes[:2], waited, rest)
    later = make_run(computes[2:], rest, waited).steps
    run = dataclasses.replace(run, steps=[*run.steps[:9], *later[9:]])
    found = compare_with_ideal(run, make_ideal(alone))
    assert found is not None
    missing = found.step_seconds - found.ideal_seconds
    assert sum(found.parts.values()) == pytest.approx(missing, rel=1e-6, abs=1e-9)
    assert 1 - found.efficiency == pytest.approx(missing / found.step_seconds, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "seconds, most, common",
    [([1.0, 1.0], 20, 20), ([1.0, 2.0], 20, 10), ([1.0, 2.0], 6, 6), ([1.0, 100.0], 20, 3), ([], 20, 0)],
)
def test_steps_in_which_all_of_the_ideal_ran(seconds: list[float], most: int, common: int) -> None:
    lines = make_ideal(seconds).steps if seconds else []
    assert count_common(lines, most) == (common if seconds else 3)


@pytest.mark.parametrize("every, uneven", [(1, 0.5), (2, 0.0), (3, 0.5 / 3)])
def test_ranks_that_meet_now_and_then_wait_for_the_slowest_sum(every: int, uneven: float) -> None:
    run = make_run([1.0, 2.0], 0.5, options={"sync_every": every})
    steps = [dataclasses.replace(one, compute_seconds=[2.0, 1.0]) if one.step % 2 else one for one in run.steps]
    found = compare_with_ideal(dataclasses.replace(run, steps=steps), make_ideal([1.0, 1.0]))
    assert found is not None
    assert found.parts["uneven"] == pytest.approx(uneven, abs=0.02)
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds - found.ideal_seconds)


def test_older_records_have_no_parts() -> None:
    run = make_run([1.2, 1.4], 0.8)
    old = dataclasses.replace(run, steps=[dataclasses.replace(line, compute_seconds=[]) for line in run.steps])
    found = compare_with_ideal(old, make_ideal([1.0, 1.0]))
    assert found is not None
    assert (round(found.efficiency, 2), found.parts) == (0.5, {})
    assert compare_with_ideal(run, dataclasses.replace(make_ideal([1.0, 1.0]), steps=old.steps)) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_times_that_are_none_are_not_compared(seconds: float) -> None:
    assert compare_with_ideal(make_run([1.2, 1.4], 0.8), make_ideal([seconds, 1.0])) is None


def test_the_report_says_it() -> None:
    one, two = make_run([1.0], 0.0), make_run([1.2, 1.4], 0.8, 0.05)
    comparison = compare([one, two, make_ideal([1.0, 1.0])])
    said = (
        "np 2 reached 49 % of the ideal (64.0 samples/s); of its steps' time 51.2 % is missing: waiting for gradients "
        "29.3 %, compute slowed by communication 14.6 %, uneven work 4.9 %, the rest 2.4 %."
    )
    assert said in comparison.notes
    assert f"- {said}\n" in format_markdown(comparison)
    assert [row.np for row in comparison.rows] == [1, 2]
    assert comparison.rows[0].ideal is None
    assert "of the\n" not in format_text(compare([one, two]))
    assert to_json(comparison)["runs"][1]["ideal"]["parts"]["uneven"] == pytest.approx(0.1)


def test_more_than_the_ideal_gets_a_word() -> None:
    said = "np 2 was faster than its ideal: another program used the hosts; measure both again."
    assert said in compare([make_run([0.8, 0.8], 0.0), make_ideal([1.0, 1.0])]).notes
    assert said not in compare([make_run([0.94, 0.94], 0.0), make_ideal([1.0, 1.0])]).notes


def test_an_ideal_of_other_hosts_is_none() -> None:
    rows = compare([make_run([1.0, 1.0], 0.5), make_ideal([1.0, 1.0], hosts=1)]).rows
    assert [row.ideal for row in rows] == [None]


def test_ideals_alone_are_no_report() -> None:
    with pytest.raises(CpuftError, match="there is no run except the ideal: give the folders of runs"):
        compare([make_ideal([1.0, 1.0])])


def test_repeats_are_one_row_with_intervals() -> None:
    pairs = [(10.0, 15.0), (12.0, 18.0), (11.0, 17.0)]
    records = [with_rate(make_record(np, np), rate) for pair in pairs for np, rate in zip((1, 2), pair)]
    one, two = compare(records).rows
    assert (one.repeats, two.repeats, round(two.samples_per_second, 2)) == (3, 3, 16.67)
    ratios = [15 / 10, 18 / 12, 17 / 11]
    assert two.speedup == pytest.approx(sum(ratios) / 3)
    assert two.intervals["speedup"] == pytest.approx(half_width(ratios))
    assert two.intervals["efficiency"] == pytest.approx(half_width(ratios) / 2)
    assert one.intervals["speedup"] == 0
    text = format_text(compare(records))
    assert "1.52 ±0.07x" in text
    assert "no clear difference" not in text


def test_no_difference_is_claimed_inside_the_interval() -> None:
    rates = [(10.0, 9.0), (10.0, 13.0), (10.0, 10.0)]
    records = [with_rate(make_record(np, np), rate) for pair in rates for np, rate in zip((1, 2), pair)]
    assert "np 2 and np 1: no clear difference in speed." in compare(records).notes
    close = [make_run([1.0, 1.0], waited, 0.0) for waited in (0.1, -0.1, 0.02)]
    notes = compare([*close, *(make_ideal([1.0, 1.0]) for _ in range(3))]).notes
    assert "np 2 and its ideal: no clear difference." in notes


def test_runs_that_differ_in_an_option_are_no_repeats() -> None:
    two = [make_record(2, 2, options={"backend": backend}) for backend in ("gloo", "ccl")]
    assert [row.repeats for row in compare(two).rows] == [1, 1]


def make_seeds(
    differences: list[float], name: str = "accuracy", first: int = 42, **changes: Any
) -> tuple[list[Record], list[Record]]:
    """Runs of one and of two ranks, each with so many seeds, and so much more of the metric with two ranks."""
    base = [0.80, 0.82, 0.81, 0.85, 0.79]
    made: tuple[list[Record], list[Record]] = ([], [])
    for number, more in enumerate(differences):
        for ranks, runs in zip((1, 2), made):
            value = base[number] + (more if ranks == 2 else 0.0)
            record = with_rate(
                make_record(ranks, ranks, **{"options": {"seed": first + number}} | changes), 10.0 * ranks
            )
            runs.append(dataclasses.replace(record, evaluations=[EvaluationLine(1, {name: value}, 408, 2.0)]))
    return made


def test_metrics_over_seeds_are_compared_seed_by_seed() -> None:
    one, two = make_seeds([0.01, 0.02, 0.01, 0.02, 0.015])
    # The order in which the runs are given does not matter.
    rows = compare([*two[::-1], *one]).rows
    assert [row.repeats for row in rows] == [5, 5]
    assert (rows[0].seeds["accuracy"].difference, rows[0].seeds["accuracy"].interval) == (0, None)
    found = rows[1].seeds["accuracy"]
    assert (found.seeds, found.common, found.is_different) == (5, 5, True)
    assert [found.mean, found.difference] == pytest.approx([0.829, 0.015])
    # The standard deviation of 1, 2, 1, 2 and 1.5 is 0.5, and the quantile 2.776.
    assert found.interval == pytest.approx(2.776 * 0.005 / math.sqrt(5))
    assert found.standard_error == pytest.approx(statistics.stdev([0.81, 0.84, 0.82, 0.87, 0.805]) / math.sqrt(5))
    assert format_verdict(compare([*one, *two])).endswith(
        " The accuracy of np 2 is larger than that of np 1 over 5 seeds."
    )


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        (
            [0.01, -0.02, 0.015, -0.01, 0.0],
            "np 2 and np 1 are not distinguishable in accuracy over 5 seeds, which does not",
        ),
        ([0.0, 0.0, 0.0], "np 2 and np 1 have the same accuracy with each of 3 seeds."),
        ([-0.02, -0.03, -0.02], "the accuracy of np 2 is smaller than that of np 1 over 3 seeds."),
        # One more example is right with both seeds: the difference does not vary, and so the test cannot be made.
        ([0.0025, 0.0025], "whether np 2 and np 1 differ in accuracy cannot be told from 2 common seeds: compare with"),
    ],
)
def test_what_is_said_about_seeds(differences: list[float], sentence: str) -> None:
    one, two = make_seeds(differences)
    assert any(note.startswith(sentence) for note in compare([*one, *two]).notes)


def test_the_speed_is_compared_seed_by_seed_also_if_a_seed_is_missing() -> None:
    one, two = make_seeds([0.0, 0.0, 0.0])
    one = [with_rate(record, rate) for record, rate in zip(one, (10.0, 20.0, 40.0))]
    two = [with_rate(record, rate) for record, rate in zip(two, (15.0, 30.0, 60.0))]
    comparison = compare([*one, two[0], two[2]])
    assert comparison.rows[1].speedup == pytest.approx(1.5)
    assert comparison.rows[1].intervals["speedup"] == pytest.approx(0)
    assert comparison.rows[1].seeds["accuracy"].common == 2


def test_only_the_examples_of_the_demo_depend_on_the_seed() -> None:
    (one, _), (two, _) = make_seeds([0.0, 0.0], task="demo")
    other = make_seeds([0.0, 0.0], task="demo", data="x", options={"seed": 7})
    assert compare([one, two, other[0][0], other[1][0]]).rows[1].seeds["accuracy"].common == 2
    with pytest.raises(CpuftError, match=r"they differ in data \(0123456789abcdef and x\)"):
        compare([one, two, *make_seeds([0.0], data="x", task="demo")[0]])
    with pytest.raises(CpuftError, match="they differ in data"):
        compare([*make_seeds([0.0])[0], *make_seeds([0.0], data="x", options={"seed": 7})[0]])


def test_a_report_over_seeds_has_a_table_of_metrics(golden: Golden, tmp_path: Path) -> None:
    one, two = make_seeds([0.01, -0.02, 0.015, -0.01, 0.0])
    comparison = compare([*one, *two])
    golden("report-seeds.txt", format_text(comparison))
    golden("report-seeds.md", format_markdown(comparison))
    assert to_json(comparison)["runs"][1]["seeds"]["accuracy"]["is_different"] is False
    page = write_page([*one, *two], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Metrics over seeds</h2>" in page
    assert "<td>not distinguishable</td>" in page


def test_a_step_is_read_without_what_is_new() -> None:
    assert StepLine(1, 0.7, 2e-5, 32, 1700, 0.001, 0.1, 0.2, 0.01, 0.02, 0.331).compute_seconds == []


# The recipe's own times for MRPC on one, two and four hosts: 7:46, 4:39 and 2:36.
RECIPE = [make_record(4, 4, 156), make_record(1, 1, 466), make_record(2, 2, 279)]


def test_the_recipes_speedups() -> None:
    rows = compare(RECIPE).rows
    assert [row.np for row in rows] == [1, 2, 4]
    assert [round(row.speedup, 2) for row in rows] == [1.0, 1.67, 2.99]
    assert [round(row.efficiency, 2) for row in rows] == [1.0, 0.84, 0.75]


def test_runs_of_some_updates_are_compared_by_their_rate() -> None:
    # Weak scaling: two ranks train on twice the rows in as many updates.
    one, two = (make_record(np, np, 10.0, options={"max_steps": 20}) for np in (1, 2))
    assert one.footer
    footer = dataclasses.replace(one.footer, samples=2 * one.footer.samples, steady_samples_per_second=2 * 1100.4)
    comparison = compare([one, dataclasses.replace(two, footer=footer)])
    assert [round(row.speedup, 2) for row in comparison.rows] == [1.0, 2.0]
    assert "20 updates" in format_text(comparison)
    assert any("different numbers of examples" in note for note in comparison.notes)


def test_a_slow_first_step_does_not_decide_the_speedup() -> None:
    # The first step of np 1 took 4.1 s longer, because kernels were compiled in it: 100 samples/s were 119 steady ones.
    one, two = with_rate(make_record(1), 100.0), with_rate(make_record(2, 1), 119.0)
    assert one.footer
    (_, row) = compare(
        [dataclasses.replace(one, footer=dataclasses.replace(one.footer, samples_per_second=75.0)), two]
    ).rows
    assert round(row.speedup, 2) == 1.19


def test_tables(golden: Golden) -> None:
    comparison = compare(RECIPE)
    golden("report.txt", format_text(comparison))
    golden("report.md", format_markdown(comparison))
    golden("report.json", json.dumps(to_json(comparison), indent=2) + "\n")


def test_a_baseline_is_the_last_row() -> None:
    line = BaselineLine("BM25", {"f1": 0.5}, 1.23, 10, 40)
    comparison = compare([RECIPE[0], dataclasses.replace(RECIPE[1], baseline=line)])
    assert make_table(comparison)[1][-1] == ["baseline", *["-"] * 9, "0.5000"]
    assert len(make_table(comparison)[1]) == 3
    assert comparison.notes[-1] == ("the baseline is what can be had without a model: BM25, 10 of 40 examples, 1.2 s.")
    assert to_json(comparison)["baseline"]["metrics"] == {"f1": 0.5}


def test_json_has_what_programs_read() -> None:
    runs = to_json(compare(RECIPE))["runs"]
    needed = {"np", "hosts", "train_seconds", "samples_per_second", "speedup", "efficiency", "metrics"}
    assert all(needed <= run.keys() for run in runs)
    assert runs[2]["metrics"] == {"accuracy": 0.79, "f1": 0.84}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"task": "rte"}, "task (mrpc and rte)"),
        ({"model": "bert"}, "model (minilm and bert)"),
        ({"data": "x"}, "data (0123456789abcdef and x)"),
        ({"precision": "fp32"}, "precision (bf16 and fp32)"),
        ({"options": {"epochs": 1.0}}, "epochs (3.0 and 1.0)"),
        ({"options": {"weight_decay": 0.1}}, "weight_decay (0 and 0.1)"),
        ({"options": {"lr_schedule": "cosine"}}, "lr_schedule (0 and cosine)"),
        ({"task": "rte", "options": {"seed": 1}}, "task (mrpc and rte), seed (42 and 1)"),
    ],
)
def test_different_jobs_are_refused_by_name_of_what_differs(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CpuftError) as error:
        compare([make_record(1), make_record(2, **changes)])
    assert str(error.value) == (
        f"runs/np-1 and runs/np-2 are not the same job: they differ in {named}; "
        f"compare runs that differ in ranks and hosts only"
    )


@pytest.mark.parametrize(
    "part, changes, message",
    [
        ("header", {"world_size": 0}, "runs/np-1 trained on no examples: leave it out of the report"),
        ("header", {"options": {}}, "runs/np-1: its epochs is None, and must be a number: give a run of this version"),
        ("header", {"options": {"epochs": "3"}}, "runs/np-1: its epochs is '3', and must be a number: give a run of"),
        ("header", {"options": {"epochs": 1, "max_steps": 1.5}}, "its max_steps is 1.5, and must be a whole number"),
        ("footer", {"steady_samples_per_second": 0.0}, "runs/np-1 trained on no examples: leave it out of the report"),
        (
            "footer",
            {"steady_samples_per_second": math.nan},
            "runs/np-1 trained on no examples: leave it out of the report",
        ),
    ],
)
def test_a_run_that_cannot_be_compared_is_refused(part: str, changes: dict[str, Any], message: str) -> None:
    record = make_record(1)
    changed = dataclasses.replace(record, **{part: dataclasses.replace(getattr(record, part), **changes)})
    with pytest.raises(CpuftError, match=re.escape(message)):
        compare([changed])


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e308, -1e308])
@pytest.mark.parametrize("name", ["step_seconds", "communication_seconds"])
def test_seconds_of_no_step_are_refused(name: str, seconds: float) -> None:
    record = make_record(1)
    changes: dict[str, Any] = {name: seconds}
    steps = [dataclasses.replace(record.steps[0], **changes)]
    with pytest.raises(
        CpuftError, match="runs/np-1, step 1: the time of this step is impossible: leave the run out of the report"
    ):
        compare([dataclasses.replace(record, steps=steps)])


def test_a_run_that_was_started_again_says_what_that_took() -> None:
    record = make_record(4)
    line = ResumedLine(12, 3, 3, record.header.ranks[:3], "ccl", "bf16", "", "2026-01-01T00:00:00+00:00")
    again = [
        dataclasses.replace(line, lost_seconds=21.4, restart_reason="host node2 was lost"),
        dataclasses.replace(line, repeated=1, world_size=4, lost_seconds=10.2, restart_reason="the master was lost"),
    ]
    same = dataclasses.replace(line, world_size=4)
    assert compare([dataclasses.replace(record, resumptions=[same])]).notes == compare([record]).notes
    note = compare([dataclasses.replace(record, resumptions=[line, *again])]).notes[-1]
    assert note == (
        "np 4 was restarted 2 times, on 3 and 4 ranks, which took 32 s and repeated 4 updates (host node2 was "
        "lost; the master was lost): its times are not those of an undisturbed run."
    )


def test_a_run_that_was_resumed_on_other_ranks_says_that_its_times_are_not_those_of_its_ranks() -> None:
    """The header holds the first number of ranks only, and the row has that number."""
    record = make_record(1)
    line = ResumedLine(12, 0, 4, record.header.ranks * 4, "ccl", "bf16", "", "2026-01-01T00:00:00+00:00")
    notes = compare([dataclasses.replace(record, resumptions=[line])]).notes
    assert notes[-1] == (
        "np 1 was resumed on 4 ranks after update 12: its times, its speedup and its efficiency are not those of "
        "1 rank, so leave it out where they matter."
    )


def test_names_are_no_markup() -> None:
    record = make_record(1, model="[/bold] [red]x", task="[")
    comparison = compare([dataclasses.replace(record, evaluations=[EvaluationLine(1, {"[/]": 0.5}, 1, 1.0)])])
    assert format_text(comparison).startswith("[ with [/bold] [red]x, 3 epochs, bf16\n")
    assert "[/]" in format_text(comparison)


def test_names_are_neither_cells_nor_html_in_markdown() -> None:
    record = make_record(1, model="<b>a|b</b>\nx")
    record = dataclasses.replace(record, evaluations=[EvaluationLine(1, {"<i>|": 0.5}, 1, 1.0)])
    text = format_markdown(compare([record]))
    assert text.startswith("## mrpc with &lt;b&gt;a\\|b&lt;/b&gt; x, 3 epochs, bf16\n")
    assert "&lt;i&gt;\\|" in text
    assert "<" not in text
    heading, line, row = (text.splitlines()[at].replace("\\|", "").count("|") for at in (4, 5, 6))
    assert heading == line == row


def test_an_unfinished_run_is_refused() -> None:
    with pytest.raises(CpuftError, match=r"runs/np-2 is not complete \(1 step recorded\)"):
        compare([make_record(1), dataclasses.replace(make_record(2), footer=None)])


@pytest.mark.parametrize("batches, scaling", [((32, 64), "weak"), ((32, 32), "strong"), ((32, 48), "mixed")])
def test_kinds_of_scaling(batches: tuple[int, int], scaling: str) -> None:
    records = [make_record(ranks, ranks, global_batch=batch) for ranks, batch in zip((1, 2), batches)]
    assert compare(records).scaling == scaling


def test_ranks_that_share_the_baselines_cores_are_told() -> None:
    notes = compare([make_record(1), make_record(2, 1)]).notes
    assert notes[-1] == (
        "np 2 did not run on more cores than np 1 (16 cores): the speedup shows what splitting the work gains or "
        "costs, "
        "not what more hosts gain."
    )


def test_more_than_the_ranks_explain_gets_a_word() -> None:
    slow, fast, fair = make_record(1, 1, 300.0), make_record(2, 2, 100.0), make_record(4, 4, 70.0)
    suspicious = [note for note in compare([slow, fast, fair]).notes if "more than its ranks explain" in note]
    assert [note.split(",")[0] for note in suspicious] == ["np 2 is 3.00 times as fast as np 1"]


def test_updates_get_fewer_only_where_epochs_are_whole() -> None:
    whole = [make_record(1, 1), make_record(2, 2)]
    limited = [make_record(np, np, options={"max_steps": 20}) for np in (1, 2)]
    assert any("there are fewer updates" in note for note in compare(whole).notes)
    assert not any("there are fewer updates" in note for note in compare(limited).notes)


def write_record(record: Record, folder: Path) -> None:
    folder.mkdir(parents=True)
    lines: list[Line] = [record.header, *record.steps, *record.evaluations]
    lines += [record.footer] if record.footer else []
    (folder / "record.jsonl").write_text("".join(format_line(line) + "\n" for line in lines))


def test_what_is_no_run_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell's `runs/*` names it."""
    monkeypatch.chdir(tmp_path)
    for ranks in (1, 2):
        write_record(make_record(ranks, ranks), Path(f"runs/np-{ranks}"))
    Path("runs/empty").mkdir()
    Path("runs/report.html").write_text("")
    names = sorted(str(path) for path in Path("runs").iterdir())
    done = CliRunner().invoke(cli, ["report", *names])
    assert done.exit_code == 0, done.output
    assert "1.00" in done.stdout
    told = "skipped, because there is no record.jsonl in them: runs/empty, runs/report.html\n"
    assert done.stderr == told
    missing = CliRunner().invoke(cli, ["report", "runs/np-1", "runs/np-3"])
    assert (
        str(missing.exception)
        == "there is no folder runs/np-3: give the folder of an earlier run, for example runs/mrpc-np2"
    )
    alone = CliRunner().invoke(cli, ["report", "runs/empty"])
    assert (
        str(alone.exception)
        == "runs/empty holds no record.jsonl: give the folder of an earlier run, for example runs/mrpc-np2"
    )


def test_a_folder_of_many_runs_is_a_table_for_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(make_record(1), Path("runs/a"))
    write_record(make_record(2), Path("runs/b"))
    write_record(make_record(1, task="cola"), Path("runs/c"))
    write_record(dataclasses.replace(make_record(1), footer=None), Path("runs/unfinished"))
    done = CliRunner().invoke(cli, ["report", "runs"])
    assert done.exit_code == 0, done.output
    first, second = done.stdout.split("\ncola with")
    assert first == format_text(compare([make_record(1), make_record(2)]))
    assert len(re.findall("^ +1 ", second, re.MULTILINE)) == 1
    assert done.stderr == "skipped, because these runs are not finished: runs/unfinished\n"
    page = CliRunner().invoke(cli, ["report", "runs", "--html"])
    assert "runs/a/record.jsonl and runs/c/record.jsonl are not the same job" in str(page.exception)
    shutil.rmtree("runs/c")
    page = CliRunner().invoke(cli, ["report", "runs", "--html"])
    assert page.exit_code == 0, page.output
    told = "<li>left out, because these runs are not finished: unfinished (1 step recorded).</li>"
    assert told in Path("runs/report.html").read_text(encoding="utf-8")
    named = CliRunner().invoke(cli, ["report", "runs/a", "runs/unfinished"])
    assert "runs/unfinished/record.jsonl is not complete" in str(named.exception)


def test_files(tmp_path: Path) -> None:
    write_record(make_record(1), tmp_path / "np-1")
    write_record(make_record(2, 2), tmp_path / "np-2")
    runs = [str(tmp_path / "np-1"), str(tmp_path / "np-2")]
    assert find_runs([str(tmp_path)]) == (runs, [])
    assert find_runs([*runs, runs[0] + "/", *runs]) == (runs, [])
    assert find_runs([str(tmp_path / "none")]) == ([str(tmp_path / "none")], [])
    assert write_report(compare(RECIPE), str(tmp_path)) == tmp_path / "report.md"
    assert sorted(path.name for path in tmp_path.glob("report.*")) == ["report.json", "report.md", "report.txt"]


def test_simulated_hosts_are_called_so_everywhere() -> None:
    """Their cores are those of one machine, and each is counted once."""
    runs = [make_record(hosts, hosts, simulated=True) for hosts in (1, 2)]
    comparison = compare(runs)
    assert [(row.simulated, row.cores) for row in comparison.rows] == [(True, 16), (True, 16)]
    assert [cells[1:3] for cells in make_table(comparison)[1]] == [["1 simulated", "16"], ["2 simulated", "16"]]
    assert format_title(comparison).endswith(", simulated hosts")
    assert "2 ranks on 2 simulated hosts" in format_verdict(comparison)
    assert [note for note in comparison.notes if note.startswith("simulated hosts are parts of one machine")]
    assert "node1: 1, node2: 1 (simulated)" in host_row(runs[1])
    real = compare([make_record(hosts, hosts) for hosts in (1, 2)])
    assert "simulated hosts" not in format_text(real) + format_verdict(real)


def test_other_programs_on_the_cores_of_a_rank_are_told() -> None:
    one, two = make_record(1), make_record(2, seconds=60.0)
    assert one.footer
    assert two.footer
    loads = [
        dataclasses.replace(one, footer=dataclasses.replace(one.footer, other_load=0.04)),
        dataclasses.replace(two, footer=dataclasses.replace(two.footer, other_load=0.45)),
    ]
    told = [note for note in compare(loads).notes if "other programs" in note]
    assert told == [
        "other programs, or other guests of the machine, took a part of a rank's cores (45 % in np 2): all ranks wait "
        "for the slowest one, so repeat the comparison on idle hosts."
    ]
    # Ranks on the same cores are each other's load.
    places = [dataclasses.replace(place, cpus=[0]) for place in two.header.ranks]
    shared = dataclasses.replace(loads[1], header=dataclasses.replace(two.header, ranks=places))
    assert not [note for note in compare([loads[0], shared]).notes if "other programs" in note]
