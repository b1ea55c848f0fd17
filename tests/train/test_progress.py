"""What rank 0 shows while it trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpuft.train.progress import Progress
from tests.records import make_steps


def show(losses: list[float], capsys: pytest.CaptureFixture[str], style: str = "lines", rank: int = 0) -> str:
    (line,) = make_steps(1, [1.0])
    with Progress(style, rank) as progress:
        for number, loss in enumerate(losses, start=1):
            progress.step(replace(line, step=number, loss=loss, learning_rate=10.0), len(losses))
    return capsys.readouterr().err


@pytest.mark.parametrize("style", ["lines", "bar"])
def test_a_loss_that_explodes_is_said_once(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = show([0.69, 0.8, 995.0, 800.0, 900.0], capsys, style)
    assert said.count("cpuft: warning: the loss has grown from 0.69 to 995 at update 3: the training diverges") == 1
    assert said.count("lower --learning-rate (it is 10 here)") == 1


@pytest.mark.parametrize("losses", [[0.01, 2.0, 9.0], [1e6, 9e6, 1e5], [10.3, 11.0]])
def test_noise_is_no_divergence(losses: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert "warning" not in show(losses, capsys)


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert show([0.69, 995.0], capsys, rank=1) == ""
