"""The lines with which rank 0 tells the launcher its progress."""

from __future__ import annotations

import pytest

from cpuft.rank.progress import (
    PROGRESS_MARK,
    ProgressEvent,
    format_evaluation,
    format_event,
    parse_evaluation,
    parse_event,
)

EVENT = ProgressEvent(3, 60, 0.53, 64.2, 12.5, "accuracy 0.8603", True)


def test_a_line_has_the_whole_event() -> None:
    line = format_event(EVENT)
    assert "\n" not in line
    assert parse_event(line) == EVENT
    assert parse_event(f"{line}\n") == EVENT


@pytest.mark.parametrize(
    "line",
    [
        "step 3/60  loss 0.5312",
        f" {format_event(EVENT)}",
        PROGRESS_MARK,
        f"{PROGRESS_MARK} 3",
        f'{PROGRESS_MARK} {{"update": "three"}}',
        f"{format_event(EVENT)[:-1]}",
    ],
)
def test_any_other_line_is_none(line: str) -> None:
    assert parse_event(line) is None


def test_an_evaluation_is_read_back_with_four_decimal_places() -> None:
    line = format_evaluation(40, {"accuracy": 0.86274, "ndcg@10": float("inf")})
    assert line == "evaluation after update 40: accuracy 0.8627  ndcg@10 inf"
    assert parse_evaluation(f"{line}\n") == (40, {"accuracy": 0.8627, "ndcg@10": float("inf")})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "evaluation after update 40:",
        "evaluation after update x: accuracy 0.5",
        "evaluation after update 40: accuracy",
        "evaluation after update 40: accuracy high",
        "evaluation after update 40: accuracy 0.5 f1 0.6",
        " evaluation after update 40: accuracy 0.5",
        f"evaluation after update {10**20}: accuracy 0.5",
    ],
)
def test_any_other_line_is_no_evaluation(line: str) -> None:
    assert parse_evaluation(line) is None
