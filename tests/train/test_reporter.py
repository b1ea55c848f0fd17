"""What rank 0 shows while it trains."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cpuft.train.reporter import Progress
from tests.records import make_steps


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def show(seconds: list[float], style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show steps of 32 samples that took so many seconds each."""
    clock = Clock()
    monkeypatch.setattr("cpuft.train.reporter.time", clock)
    with Progress(style, rank=0) as shown:
        for taken, line in zip(seconds, make_steps(len(seconds), [0.1], samples=32)):
            clock.now += taken
            shown.show_step(replace(line, step_seconds=taken), len(seconds))


def test_speed_and_time_left_leave_out_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show([30.0, 10.0, *[0.5] * 28], "lines", monkeypatch)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [f"step {step}/30" for step in range(3, 31, 3)]
    assert [line.partition("  loss ")[2][8:] for line in lines] == [
        f"64.0 samples/s  {0.5 * (30 - step):.0f} s left" for step in range(3, 31, 3)
    ]


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
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"loss [0-9.]+", "loss", line) for line in lines] == [
        "step 1/3  loss",
        "step 2/3  loss",
        "step 3/3  loss  64.0 samples/s  0 s left",
    ]


def test_the_bar_shows_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show([30.0, 10.0, *[0.5] * 8], "bar", monkeypatch)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "10/10" in last
    assert "64.0 samples/s, 0 s left" in last
