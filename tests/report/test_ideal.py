"""Runs against their ideals, and intervals over repeats."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from cpuft.record import Record, StepLine
from cpuft.report.comparison import PARTS, compare, count_common, half_width, measure_against
from cpuft.report.table import format_markdown, format_text, to_json
from tests.records import make_record, make_steps, with_rate

SECONDS = st.floats(0.01, 10)


def make_ideal(seconds: list[float], steps: int = 20, hosts: int = 2, **changes: Any) -> Record:
    """Ranks that each take so long for a step of 32 rows."""
    ranks = len(seconds)
    lines = make_steps(steps, [0.0], step_seconds=sum(seconds) / ranks, samples=32 * ranks)
    lines = [dataclasses.replace(line, compute_seconds=seconds) for line in lines]
    return dataclasses.replace(make_record(ranks, hosts, apart=True, **changes), path="runs/ideal", steps=lines)


def make_run(compute: list[float], waited: float, rest: float = 0.01, **changes: Any) -> Record:
    """Ranks that compute so long in a step; rank 0 waits `waited` seconds."""
    ranks = len(compute)
    lines = make_steps(20, compute, step_seconds=compute[0] + waited + rest, samples=32 * ranks, waited=waited)
    return dataclasses.replace(make_record(ranks, ranks, **changes), steps=lines)


def test_where_the_missing_share_went() -> None:
    # Rank 0 computes 1.2 s and waits 0.8, 0.2 of it for rank 1, which computes 1.4; alone each takes 1.
    found = measure_against(make_run([1.2, 1.4], 0.8, 0.05), make_ideal([1.0, 1.0]))
    assert found is not None
    assert found.samples_per_second == pytest.approx(64)
    assert found.efficiency == pytest.approx(1 / 2.05)
    wanted = {"waiting": 0.6, "slowed": 0.3, "uneven": 0.1, "rest": 0.05}
    assert found.parts == pytest.approx(wanted)
    assert list(found.parts) == list(PARTS)


def test_the_ideal_is_the_sum_of_its_ranks_rates() -> None:
    # 32 rows in 1 s and in 3 s: 32 + 32 / 3 samples/s.
    found = measure_against(make_run([1.0, 3.0], 2.0), make_ideal([1.0, 3.0]))
    assert found is not None
    assert found.samples_per_second == pytest.approx(32 + 32 / 3)


@given(st.lists(SECONDS, min_size=4, max_size=4), st.lists(SECONDS, min_size=2, max_size=2), SECONDS, SECONDS)
def test_the_parts_add_up(computes: list[float], alone: list[float], waited: float, rest: float) -> None:
    run = make_run(computes[:2], waited, rest)
    later = make_run(computes[2:], rest, waited).steps
    run = dataclasses.replace(run, steps=[*run.steps[:9], *later[9:]])
    found = measure_against(run, make_ideal(alone))
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
    found = measure_against(dataclasses.replace(run, steps=steps), make_ideal([1.0, 1.0]))
    assert found is not None
    assert found.parts["uneven"] == pytest.approx(uneven, abs=0.02)
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds - found.ideal_seconds)


def test_older_records_have_no_parts() -> None:
    run = make_run([1.2, 1.4], 0.8)
    old = dataclasses.replace(run, steps=[dataclasses.replace(line, compute_seconds=[]) for line in run.steps])
    found = measure_against(old, make_ideal([1.0, 1.0]))
    assert found is not None
    assert (round(found.efficiency, 2), found.parts) == (0.5, {})
    assert measure_against(run, dataclasses.replace(make_ideal([1.0, 1.0]), steps=old.steps)) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_times_that_are_none_are_not_compared(seconds: float) -> None:
    assert measure_against(make_run([1.2, 1.4], 0.8), make_ideal([seconds, 1.0])) is None


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
    said = "np 2 was faster than its ideal: something else kept the hosts busy meanwhile; run both again."
    assert said in compare([make_run([0.8, 0.8], 0.0), make_ideal([1.0, 1.0])]).notes
    assert said not in compare([make_run([0.94, 0.94], 0.0), make_ideal([1.0, 1.0])]).notes


def test_an_ideal_of_other_hosts_is_none() -> None:
    rows = compare([make_run([1.0, 1.0], 0.5), make_ideal([1.0, 1.0], hosts=1)]).rows
    assert [row.ideal for row in rows] == [None]


def test_ideals_alone_are_no_report() -> None:
    with pytest.raises(CpuftError, match="there is no run beside the ideal to report on: name run directories"):
        compare([make_ideal([1.0, 1.0])])


def test_intervals_are_students() -> None:
    from scipy.stats import t

    for count in (2, 3, 5, 11, 31):
        values = [float(value * value) for value in range(count)]
        mean = sum(values) / count
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
        wanted = t.ppf(0.975, count - 1) * deviation / math.sqrt(count)
        assert half_width(values) == pytest.approx(wanted, rel=1e-3)
    assert half_width([3.0, 3.0, 3.0]) == 0


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


def test_a_step_is_read_without_what_is_new() -> None:
    assert StepLine(1, 0.7, 2e-5, 32, 1700, 0.001, 0.1, 0.2, 0.01, 0.02, 0.331).compute_seconds == []
