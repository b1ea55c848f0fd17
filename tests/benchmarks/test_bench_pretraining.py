"""What scripts/bench-pretraining makes of its runs."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest

from scripts.benchmarks.bench_pretraining import (
    Point,
    derive,
    format_depths,
    format_hosts,
    parse,
    plan_launch,
    read_point,
)
from tests.conftest import Golden
from tests.records import make_record, make_steps

TWO, FOUR = Point(2, 1.1e8, 16, 3.0, 3e9), Point(4, 1.7e8, 16, 5.0, 4.5e9)


def test_a_line_through_two_depths() -> None:
    told = derive(TWO, FOUR, 48)
    assert astuple(told) == pytest.approx((48, 1.49e9, 16, 49.0, 37.5e9))
    assert derive(TWO, FOUR, 2) == TWO
    assert derive(TWO, FOUR, 4) == FOUR


def test_tables(golden: Golden) -> None:
    hosts = [Point(1, 3.4e8, 16, 8.0, 7.7e9), Point(2, 3.4e8, 32, 8.5, 5.2e9), Point(4, 3.4e8, 64, 10.0, 3.9e9)]
    golden("pretraining.txt", format_hosts(hosts) + format_depths([TWO, FOUR], 48))


def test_a_run_s_point_leaves_its_first_update_out() -> None:
    record = make_record(2)
    steps = make_steps(5, [0.1, 0.1], step_seconds=2.0, samples=64)
    record = replace(record, steps=[replace(steps[0], step_seconds=50.0), *steps[1:]])
    point = read_point(2, record)
    assert point == Point(2, 22_713_986, 64, 2.0, 1 << 30)
    assert point.rate == 32.0


def test_options_that_are_not_its_own_are_the_launch_s() -> None:
    words = plan_launch(parse(["--precision", "fp32", "--length", "64"]), "bert-large", ("corpus", "few"), Path("run"))
    assert words[-2:] == ["--precision", "fp32"]
    assert words[words.index("--max-length") + 1] == "64"
