"""Who is told that a run is to stop, by what, and when."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpuft.rank.interruption import (
    HEARTBEAT_FILE,
    NOTICE_VARIABLE,
    InterruptionNotice,
    catches_signal,
    describe_cause,
    start_host_watch,
)
from cpuft.rank.world import World
from tests.rank.metadata import PATH, serve_metadata

SLEEPS = "import time; print('here', flush=True); time.sleep(60)"
LISTENS_LATE = """
import sys, time
from cpuft.rank.interruption import is_interrupted, handle_interruption
print("here", flush=True)
sys.stdin.readline()
handle_interruption()
print("listens", flush=True)
while not is_interrupted():
    time.sleep(0.01)
print("told", flush=True)
"""


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path) -> None:
    notice = InterruptionNotice(str(tmp_path / "notice"))
    assert not notice.has_arrived()
    (tmp_path / "notice").touch()
    assert notice.has_arrived()


def test_an_address_is_one_once_it_answers_with_200(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metadata(404, 404, 200) as metadata:
        notice = InterruptionNotice(metadata.url)
        assert [notice.has_arrived() for _ in range(3)] == [False, False, True]
    assert metadata.asked == ["PUT /latest/api/token", f"GET {PATH}"] * 3
    assert capfd.readouterr().err == ""


def test_an_address_that_cannot_be_asked_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metadata(500) as metadata:
        notice = InterruptionNotice(metadata.url)
        assert [notice.has_arrived() for _ in range(2)] == [False, False]
    problem = f"the interruption notice at {metadata.url} cannot be read (HTTP Error 500: Internal Server Error)"
    assert capfd.readouterr().err == f"cpuft: {problem}, so interruptions of this host go unnoticed\n"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert not InterruptionNotice(f"http://127.0.0.1:{mute.getsockname()[1]}/gone").has_arrived()
    assert "timed out" in capfd.readouterr().err


def start(text: str) -> subprocess.Popen[str]:
    """A Python that runs this text, and has said that it is here."""
    process = subprocess.Popen([sys.executable, "-c", text], stdin=-1, stdout=-1, text=True)
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    return process


def test_a_process_is_told_once_it_listens(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with start(LISTENS_LATE) as process:
        start_host_watch(process.pid, World(1, 2, 1, 2), {"CPUFT_RUN_DIR": str(tmp_path)})
        (tmp_path / "logs/interrupt").write_text("SIGUSR1\n")
        assert not catches_signal(process.pid)
        assert process.communicate("go on\n", timeout=60)[0] == "listens\ntold\n"


def test_a_process_that_never_listens_goes_on(tmp_path: Path) -> None:
    (tmp_path / "notice").touch()
    with start(SLEEPS) as process:
        start_host_watch(process.pid, World(0, 1, 0, 1), {NOTICE_VARIABLE: str(tmp_path / "notice")})
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        process.kill()


def test_only_the_first_rank_of_a_host_looks_for_its_notice() -> None:
    with serve_metadata(404) as metadata, start(SLEEPS) as process:
        start_host_watch(process.pid, World(3, 4, 1, 2), {NOTICE_VARIABLE: metadata.url})
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.kill()
    assert metadata.asked == []


@pytest.mark.parametrize("local_rank, signs", [(0, True), (1, False)])
def test_the_first_rank_of_a_host_gives_signs_of_life(local_rank: int, signs: bool, tmp_path: Path) -> None:
    sign = tmp_path / HEARTBEAT_FILE
    sign.parent.mkdir()
    sign.touch()
    os.utime(sign, (1.0, 1.0))
    with start(SLEEPS) as process:
        start_host_watch(process.pid, World(2, 4, local_rank, 2), {"CPUFT_RUN_DIR": str(tmp_path)})
        time.sleep(0.5)
        process.kill()
    assert (sign.stat().st_mtime > 1.0) == signs


def test_who_catches_or_holds_back_the_signal_listens() -> None:
    assert not catches_signal(os.getpid())
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        assert catches_signal(os.getpid())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    assert not catches_signal(1 << 30)


def test_the_cause_is_what_the_launch_said_else_the_notice(tmp_path: Path) -> None:
    host = socket.gethostname()
    environ = {"CPUFT_RUN_DIR": str(tmp_path), NOTICE_VARIABLE: "/run/going"}
    assert describe_cause({}) == f"SIGUSR1 on {host}"
    assert describe_cause(environ) == f"the notice /run/going on {host}"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/interrupt").write_text("SIGTERM\n")
    assert describe_cause(environ) == "SIGTERM"
