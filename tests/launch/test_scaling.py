"""The cases of `cpuft bench scaling`, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cpuft.config import ScalingConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.launch.scaling import list_cases, plan_case, run_cases
from cpuft.record import ScalingLine, format_line
from tests.records import LAYER_TIMES, make_record

RECORD = replace(make_record(), layer_times=LAYER_TIMES)
LINE = ScalingLine(4, 10**9, "bf16", 1, 4.0, 6, 0.5, 0.76, 0.80, 0.05, 0.025, 23.6e6, 0.1)


def test_every_link_and_compression_is_measured_with_every_number_of_hosts() -> None:
    config = ScalingConfig("2,4", "1gbit, 300mbit", 0.963, 0.5, "auto,int8")
    cases = list_cases(config, RECORD, 16.0)
    assert [(case.ranks, case.bits_per_second, case.grad_compression) for case in cases] == [
        *((2, 10**9, "auto"), (4, 10**9, "auto"), (2, 10**9, "int8"), (4, 10**9, "int8")),
        *((2, 3 * 10**8, "auto"), (4, 3 * 10**8, "auto"), (2, 3 * 10**8, "int8"), (4, 3 * 10**8, "int8")),
    ]
    assert {(case.cores, round(case.compute_scale, 9)) for case in cases} == {(0.5, 3.0)}
    assert list_cases(ScalingConfig(), RECORD, 16.0)[0].cores == 16.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"np": "1,2"}, "--np '1,2' is not a list of whole numbers from 2 to 256"),
        ({"np": "2,,4"}, "--np"),
        ({"bandwidth": "1gbit,fast"}, "--bandwidth 'fast' is not a bit rate"),
        ({"bandwidth": ""}, "--bandwidth"),
        ({"grad_compression": "int9"}, "--grad-compression"),
        ({"grad_compression": "late"}, "was removed"),
    ],
)
def test_wrong_lists_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        list_cases(ScalingConfig(**changes), RECORD, 16.0)


def test_a_record_without_times_is_refused_with_the_option() -> None:
    with pytest.raises(CpuftError, match="train one rank again with --record-layer-times"):
        list_cases(ScalingConfig(), make_record(), 16.0)


def test_a_record_of_several_ranks_is_refused() -> None:
    with pytest.raises(CpuftError, match="ran on 2 ranks: train one rank with --record-layer-times"):
        list_cases(ScalingConfig(), replace(make_record(2), layer_times=LAYER_TIMES), 16.0)


def test_a_case_that_fails_says_why_and_ends_the_measurement() -> None:
    steps = [plan_case("record.jsonl", case, True) for case in list_cases(ScalingConfig("2,4"), RECORD, 1.0)]
    answers = [
        Answer(0, f"{format_line(LINE)}\n"),
        Answer(2, "", "warning\ncpuft: error: the link is gone: start again\n"),
    ]
    asked = []

    def run(command: Sequence[str], seconds: float) -> Answer:
        asked.append(command)
        return answers[len(asked) - 1]

    cases = run_cases(steps, run)
    assert next(cases) == LINE
    with pytest.raises(CpuftError, match=r"^the link is gone: start again$") as caught:
        next(cases)
    assert caught.value.exit_code == 2
    assert asked == [step.command for step in steps]
