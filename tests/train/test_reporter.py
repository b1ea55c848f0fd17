"""What rank 0 shows while it trains."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cpuft.rank.progress import parse_event
from cpuft.train.reporter import Progress
from tests.records import make_steps


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def show(seconds: list[float], style: str, monkeypatch: pytest.MonkeyPatch, at_once: int = 1) -> None:
    """Show steps of 32 samples that took so many seconds each; as many lines as `at_once` come at the same time."""
    clock = Clock()
    monkeypatch.setattr("cpuft.train.reporter.time", clock)
    shown = Progress(style, rank=0)
    for number, (taken, line) in enumerate(zip(seconds, make_steps(len(seconds), [0.1], samples=32))):
        clock.now += sum(seconds[number : number + at_once]) if number % at_once == 0 else 0.0
        shown.show_step(replace(line, step_seconds=taken), len(seconds))
    shown.show_evaluation_start(10)


def test_speed_and_time_left_leave_out_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show([30.0, 10.0, *[0.5] * 28], "lines", monkeypatch)
    lines = capsys.readouterr().err.splitlines()[:-1]
    assert [line.partition("  ")[0] for line in lines] == [f"step {step}/30" for step in range(3, 31, 3)]
    assert [line.partition("  loss ")[2][8:] for line in lines] == [
        f"64.0 samples/s  {0.5 * (30 - step):.0f} s left" for step in range(3, 31, 3)
    ]


def test_the_speed_of_lines_that_come_many_at_once_is_that_of_their_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several ranks complete the lines of a second together, which are more than those whose mean is shown."""
    show([0.02] * 400, "lines", monkeypatch, at_once=50)
    rates = re.findall(r"([0-9.]+) samples/s  (\d+) s left", capsys.readouterr().err)
    assert rates == [("1600.0", f"{0.02 * (400 - step):.0f}") for step in range(40, 401, 40)]


def test_speed_is_that_of_the_last_twenty_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show([1.0] * 80 + [0.25] * 20, "lines", monkeypatch)
    rates = re.findall(r"([0-9.]+) samples/s  (\d+) s left", capsys.readouterr().err)
    # After step 90, ten of the last twenty steps took 1 s and ten 0.25 s.
    assert rates[7:] == [("32.0", "20"), ("51.2", "6"), ("128.0", "0")]


def test_no_speed_is_shown_before_a_step_is_warm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show([9.0, 3.0, 0.5], "lines", monkeypatch)
    lines = capsys.readouterr().err.splitlines()[:-1]
    assert [re.sub(r"loss [0-9.]+", "loss", line) for line in lines] == [
        "step 1/3  loss",
        "step 2/3  loss",
        "step 3/3  loss  64.0 samples/s  0 s left",
    ]


def test_the_bar_gets_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show([30.0, 10.0, *[0.5] * 8], "bar", monkeypatch)
    *lines, said = capsys.readouterr().err.splitlines()
    events = [event for line in lines if (event := parse_event(line))]
    assert [event.update for event in events] == [*range(1, 11), 10]
    assert [(event.samples_per_second, event.seconds_left) for event in events[2:5]] == [(64, 3.5), (64, 3), (64, 2.5)]
    assert [event.is_last for event in events] == [False] * 10 + [True]
    assert said == "evaluating on 10 examples"


def test_quick_steps_send_few_events(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show([0.01] * 100, "bar", monkeypatch)
    events = [event for line in capsys.readouterr().err.splitlines() if (event := parse_event(line))]
    assert len(events) < 14
    assert events[0].update == 1
    assert events[-1].update == 100
