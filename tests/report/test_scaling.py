"""The table and the page of `cpuft bench scaling`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.record import Interval, ScalingLine
from cpuft.report.scaling import format_scaling, format_verdict, scaling_row, write_scaling_page
from tests.records import make_record

LINE = ScalingLine(
    ranks=4,
    bits_per_second=3 * 10**8,
    compression="int8",
    sync_every=1,
    slowdown=6.0,
    updates=6,
    cores=0.5,
    ideal_seconds=0.76,
    step_seconds=0.90,
    taken_seconds=0.10,
    cpu_seconds=0.05,
    bytes_per_step=11.98e6,
    machine_busy=0.1,
    intervals=[Interval("forward", 0.0, 0.2), Interval("all_to_all", 0.3, 0.5, 10**6), Interval("backward", 0.2, 0.7)],
)


def test_a_row_tells_what_is_left_of_the_ideal_and_where_the_rest_went() -> None:
    assert scaling_row(LINE) == [
        *("4", "300", "int8", "11.98", "50.0", "760.0", "1000.0", "14.0%", "10.0%", "76.0%"),
    ]
    assert scaling_row(replace(LINE, sync_every=8))[2] == "int8, every 8"


def test_the_table_names_the_job_and_what_is_not_simulated() -> None:
    text = format_scaling([LINE, replace(LINE, ranks=8)], make_record())
    assert text.startswith("mrpc, minilm\n")
    assert "76.0%" in text
    assert "latency" in text


def test_the_verdict_is_about_the_most_hosts() -> None:
    lines = [LINE, replace(LINE, ranks=16, step_seconds=1.42), replace(LINE, ranks=8)]
    assert format_verdict(lines) == "16 hosts with 300 Mbit/s reach 50% of the speed of as many independent hosts."


def test_the_page_has_a_timeline_of_each_case(tmp_path: Path) -> None:
    path = write_scaling_page([LINE, replace(LINE, ranks=8)], make_record(), tmp_path / "scaling.html")
    text = path.read_text()
    assert text.count("<svg") == 3
    assert "8 hosts, 300 Mbit/s, int8" in text
    assert "all_to_all" in text
    (tmp_path / "other.html").write_text("a page of somebody else")
    with pytest.raises(CpuftError, match="is not a page of cpuft"):
        write_scaling_page([LINE], make_record(), tmp_path / "other.html")
