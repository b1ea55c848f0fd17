"""What signals ask of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cpuft.errors import Interrupted
from cpuft.execute import run_step
from cpuft.launch.stop_request import StopRequest
from cpuft.plans import Step

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
def test_sigusr1_and_the_first_sigterm_with_grace_request_a_stop(
    grace: float, signals: list[int], taken: list[bool]
) -> None:
    request = StopRequest(grace, run_dir="/run")
    assert [request.handle_signal(number) for number in signals] == taken


def test_the_first_ctrl_c_requests_a_stop_and_the_second_kills() -> None:
    assert [StopRequest(0.0, 9.0, "/run").handle_signal(INT)] == [True]
    for signals, taken in (([INT, INT], [True, False]), ([USR1, INT], [True, False]), ([TERM, INT], [False, True])):
        request = StopRequest(0.0, 9.0, "/run")
        assert [request.handle_signal(number) for number in signals] == taken
    assert StopRequest(9.0, 9.0, "/run").handle_signal(TERM)


def test_ctrl_c_prints_what_the_ranks_are_asked_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    request = StopRequest(0.0, 120.0, str(tmp_path))
    request.handle_signal(INT)
    request.check()
    assert (tmp_path / "logs/interrupt").read_text() == "SIGINT\n"
    told = "asked the ranks to save a checkpoint and end within 120 s; a second Ctrl-C or cpuft stop ends them at once"
    assert capsys.readouterr().err == f"cpuft: {told}\n"


def test_a_stop_request_is_a_file_beside_the_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    request = StopRequest(0.0, run_dir=str(tmp_path))
    request.check()
    assert list((tmp_path / "logs").iterdir()) == []
    request.handle_signal(USR1)
    request.check()
    assert [(path.name, path.read_text()) for path in (tmp_path / "logs").iterdir()] == [("interrupt", "SIGUSR1\n")]
    nowhere = StopRequest(0.0, run_dir=str(tmp_path / "none"))
    nowhere.handle_signal(USR1)
    nowhere.check()
    nowhere.check()
    assert capsys.readouterr().err.count("cpuft: SIGUSR1 could not be passed on to the ranks (") == 1


@pytest.mark.parametrize("failures", [2, 3])
def test_a_stop_request_is_sent_again_if_the_connection_fails(
    failures: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the ranks would be ended without a checkpoint."""
    (tmp_path / "logs").mkdir()
    tries = tmp_path / "tries"
    script = f'echo >>{tries}; [ "$(wc -l <{tries})" -gt {failures} ] || exit 255; eval "$1"'
    request = StopRequest(0.0, 60.0, str(tmp_path), ("sh", "-c", script, "ssh"))
    request.handle_signal(signal.SIGINT)
    request.check()
    request.check()
    assert (tmp_path / "logs/interrupt").exists() == (failures < 3)
    assert ("could not be passed on" in capsys.readouterr().err) == (failures == 3)


def test_a_stop_request_reaches_a_remote_head_host_over_ssh(tmp_path: Path) -> None:
    request = StopRequest(0.0, 0.0, "/var/tmp/cpuft-0/x/run", ("ssh", "a"))
    *way, line = request.plan_command("SIGUSR1")
    assert way == ["ssh", "a"]
    assert line.endswith(" /var/tmp/cpuft-0/x/run/logs/interrupt SIGUSR1")


def test_after_the_grace_period_the_ranks_are_ended(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    request = StopRequest(0.3, run_dir=str(tmp_path))
    signals = iter([TERM])

    def watch() -> None:
        for number in signals:
            os.kill(os.getpid(), number)
        request.check()

    begun = time.monotonic()
    with pytest.raises(Interrupted) as stopped:
        run_step(Step("ranks", ("sleep", "60")), os.environ, None, watch, takes=request.handle_signal)
    assert stopped.value.exit_code == 143
    assert 0.3 <= time.monotonic() - begun < 30
    assert (tmp_path / "logs/interrupt").read_text() == "SIGTERM\n"
