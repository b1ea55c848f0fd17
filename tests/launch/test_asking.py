"""What signals ask ranks to end after a checkpoint, and which end them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cpuft.errors import Interrupted
from cpuft.execute import run_step
from cpuft.launch.supervise import StopRequest
from cpuft.plan import Step

USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    "grace, signals, taken",
    [
        (0.0, [USR1, USR1, INT], [True, True, False]),
        (0.0, [TERM], [False]),
        (9.0, [TERM, TERM], [True, False]),
        (9.0, [USR1, TERM, INT], [True, True, False]),
        (9.0, [TERM, USR1, TERM], [True, True, False]),
    ],
)
def test_usr1_asks_and_so_does_the_first_term_with_grace(grace: float, signals: list[int], taken: list[bool]) -> None:
    asking = StopRequest("/run", "", {}, grace)
    assert [asking.takes(number) for number in signals] == taken


def test_the_first_ctrl_c_asks_and_the_second_ends() -> None:
    assert [StopRequest("/run", "", {}, 0.0, 9.0).takes(INT)] == [True]
    for signals, taken in (([INT, INT], [True, False]), ([USR1, INT], [True, False]), ([TERM, INT], [False, True])):
        request = StopRequest("/run", "", {}, 0.0, 9.0)
        assert [request.takes(number) for number in signals] == taken
    assert StopRequest("/run", "", {}, 9.0, 9.0).takes(TERM)


def test_what_the_ranks_are_asked_is_said_at_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    request = StopRequest(str(tmp_path), "", {}, 0.0, 120.0)
    request.takes(INT)
    request.check()
    assert (tmp_path / "logs/interrupt").read_text() == "SIGINT\n"
    told = "the ranks are asked to save a checkpoint and end, within 120 s; press Ctrl-C again to end them at once"
    assert capsys.readouterr().err == f"cpuft: {told}\n"


def test_ranks_are_told_by_a_file_beside_their_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    asking = StopRequest(str(tmp_path), "", {}, 0.0)
    asking.check()
    assert list((tmp_path / "logs").iterdir()) == []
    asking.takes(USR1)
    asking.check()
    assert [(path.name, path.read_text()) for path in (tmp_path / "logs").iterdir()] == [("interrupt", "SIGUSR1\n")]
    nowhere = StopRequest(str(tmp_path / "none"), "", {}, 0.0)
    nowhere.takes(USR1)
    nowhere.check()
    nowhere.check()
    assert capsys.readouterr().err.count("cpuft: ranks cannot be told of SIGUSR1 (") == 1


def test_a_master_elsewhere_is_told_by_its_way(tmp_path: Path) -> None:
    asking = StopRequest("/var/tmp/cpuft-0/x/run", "a", {"a": ("ssh", "a")}, 0.0)
    *way, line = asking.plan_telling("SIGUSR1").command
    assert way == ["ssh", "a"]
    assert line.endswith(" /var/tmp/cpuft-0/x/run/logs/interrupt SIGUSR1")


def test_after_the_grace_ranks_are_ended(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    asking = StopRequest(str(tmp_path), "", {}, 0.3)
    signals = iter([TERM])

    def watch() -> None:
        for number in signals:
            os.kill(os.getpid(), number)
        asking.check()

    begun = time.monotonic()
    with pytest.raises(Interrupted) as stopped:
        run_step(Step("ranks", ("sleep", "60")), os.environ, None, watch, takes=asking.takes)
    assert stopped.value.exit_code == 143
    assert 0.3 <= time.monotonic() - begun < 30
    assert (tmp_path / "logs/interrupt").read_text() == "SIGTERM\n"
