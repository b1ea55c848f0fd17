"""How a rank learns that its run must stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
HANDLES_LATER = """
import sys, time
from cpuft.rank.interruption import is_interrupted, handle_interruption
print("here", flush=True)
sys.stdin.readline()
handle_interruption()
print("handles it", flush=True)
while not is_interrupted():
    time.sleep(0.01)
print("interrupted", flush=True)
"""


def test_a_notice_has_arrived_once_its_file_exists(tmp_path: Path) -> None:
    notice = InterruptionNotice(str(tmp_path / "notice"))
    assert not notice.has_arrived()
    (tmp_path / "notice").touch()
    assert notice.has_arrived()


def test_a_notice_has_arrived_once_its_url_answers_with_status_200(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metadata(404, 404, 200) as metadata:
        notice = InterruptionNotice(metadata.url)
        assert [notice.has_arrived() for _ in range(3)] == [False, False, True]
    assert metadata.asked == ["PUT /latest/api/token", f"GET {PATH}"] * 3
    assert capfd.readouterr().err == ""


def test_a_url_that_does_not_answer_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metadata(500) as metadata:
        notice = InterruptionNotice(metadata.url)
        assert [notice.has_arrived() for _ in range(2)] == [False, False]
    problem = f"the interruption notice at {metadata.url} cannot be read (HTTP Error 500: Internal Server Error)"
    assert capfd.readouterr().err == f"cpuft: {problem}, so interruptions of this host go unnoticed\n"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert not InterruptionNotice(f"http://127.0.0.1:{mute.getsockname()[1]}/gone").has_arrived()
    assert "timed out" in capfd.readouterr().err


def start(text: str) -> subprocess.Popen[str]:
    """Start a Python process that runs this text and has printed "here"."""
    process = subprocess.Popen([sys.executable, "-c", text], stdin=-1, stdout=-1, text=True)
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    return process


@contextmanager
def watched(text: str, world: World, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with start(text) as process:
        ended = start_host_watch(process.pid, world, environ)
        yield process
    ended.set()


def test_a_process_gets_the_signal_once_it_catches_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with watched(HANDLES_LATER, World(1, 2, 1, 2), {"CPUFT_RUN_DIR": str(tmp_path)}) as process:
        (tmp_path / "logs/interrupt").write_text("SIGUSR1\n")
        assert not catches_signal(process.pid)
        assert process.communicate("go on\n", timeout=60)[0] == "handles it\ninterrupted\n"


def test_a_process_that_never_catches_the_signal_continues(tmp_path: Path) -> None:
    (tmp_path / "notice").touch()
    with watched(SLEEPS, World(0, 1, 0, 1), {NOTICE_VARIABLE: str(tmp_path / "notice")}) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        process.kill()


def test_only_the_first_rank_of_a_host_checks_for_a_notice() -> None:
    with (
        serve_metadata(404) as metadata,
        watched(SLEEPS, World(3, 4, 1, 2), {NOTICE_VARIABLE: metadata.url}) as process,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.kill()
    assert metadata.asked == []


@pytest.mark.parametrize("local_rank, touches", [(0, True), (1, False)])
def test_the_first_rank_of_a_host_touches_the_heartbeat_file(local_rank: int, touches: bool, tmp_path: Path) -> None:
    heartbeat = tmp_path / HEARTBEAT_FILE
    heartbeat.parent.mkdir()
    heartbeat.touch()
    os.utime(heartbeat, (1.0, 1.0))
    with watched(SLEEPS, World(2, 4, local_rank, 2), {"CPUFT_RUN_DIR": str(tmp_path)}) as process:
        time.sleep(0.5)
        process.kill()
    assert (heartbeat.stat().st_mtime > 1.0) == touches


def test_a_process_that_blocks_the_signal_will_handle_it() -> None:
    assert not catches_signal(os.getpid())
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        assert catches_signal(os.getpid())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    assert not catches_signal(1 << 30)


def test_the_cause_is_the_launchers_signal_or_else_the_notice(tmp_path: Path) -> None:
    host = socket.gethostname()
    environ = {"CPUFT_RUN_DIR": str(tmp_path), NOTICE_VARIABLE: "/run/leaving"}
    assert describe_cause({}) == f"SIGUSR1 on {host}"
    assert describe_cause(environ) == f"the notice /run/leaving on {host}"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/interrupt").write_text("SIGTERM\n")
    assert describe_cause(environ) == "SIGTERM"
