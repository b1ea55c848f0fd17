"""How lost hosts, long waits and ranks that do not start are noticed while a run is watched."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpuft.errors import Interrupted
from cpuft.hosts.transport import SshTransport
from cpuft.launch import run_monitor
from cpuft.launch.rank_output import LogTail
from cpuft.launch.run_monitor import RunMonitor, StuckError
from cpuft.rank.diagnostics import HANG_MARK
from cpuft.rank.interruption import HEARTBEAT_FILE
from cpuft.rank.process import ENDED_MARK, STARTED_MARK, WAITS_MARK
from tests.launch.test_failures import error_log

TERM = signal.SIGTERM


@dataclass(frozen=True)
class Asked(SshTransport):
    """A transport to hosts that a function asks."""

    ask: Callable[[], set[str]] = set

    def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
        return self.ask()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_hang_is_diagnosed_once_and_hosts_that_answered_are_not_asked_again(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank-1.err").write_text(f"{error_log('', 1, 75)}{HANG_MARK}\n", encoding="utf-8")
    asked: list[str] = []
    verdict = "rank 0 on node1 blocks the others"

    def look(*place: object) -> tuple[str, set[str]]:
        asked.append("stacks")
        if is_interrupted:
            raise Interrupted(TERM)
        return verdict, {"node1"}

    def find_silent() -> set[str]:
        asked.append("hosts")
        return set()

    monkeypatch.setattr(run_monitor, "diagnose_run", look)
    monitor = RunMonitor(tmp_path, (), Asked(ask=find_silent))
    with pytest.raises(Interrupted if is_interrupted else StuckError, match=r"SIGTERM|waited in vain for others"):
        monitor.check()
    monitor.checked_at = monitor.failed_at = -100.0
    monitor.check()  # as once more when all has ended
    found = ("", None) if is_interrupted else (verdict, {"node1"})
    assert (asked, (monitor.diagnosis, monitor.unreachable)) == (["stacks"], found)


@pytest.mark.parametrize(
    "said, ends",
    [
        ("[mpiexec@a] Error: Downstream from host b exited abnormally\n[mpiexec@a] Trying to close others\n", True),
        ("[mpiexec@a] control_cb (pm/pmiserv/pmiserv_cb.c:208): assert (!closed) failed\n", True),
        ("srun: cluster configuration lacks support for cpu binding\n", False),
    ],
    ids=("Intel MPI", "MPICH", "neither"),
)
def test_the_messages_of_an_mpirun_that_lost_a_host_count_as_a_failure(said: str, ends: bool, tmp_path: Path) -> None:
    """In a Slurm job it would wait until Slurm notices the loss."""
    (tmp_path / "logs").mkdir()
    (tmp_path / HEARTBEAT_FILE).write_text(said, encoding="utf-8")
    monitor = RunMonitor(tmp_path / "logs", (), Asked())
    monitor.check()
    assert bool(monitor.failed_at) == ends


def test_hosts_are_asked_if_no_rank_gives_a_heartbeat(tmp_path: Path) -> None:
    """mpirun would wait without limit if all hosts are lost. A run that is only quiet continues."""
    logs, sign, asked = tmp_path / "logs", tmp_path / HEARTBEAT_FILE, list[str]()
    logs.mkdir()
    sign.touch()

    def find_silent() -> set[str]:
        asked.append("hosts")
        return set()

    monitor = RunMonitor(logs, (), Asked(ask=find_silent))

    def look(quiet: float) -> None:
        monitor.checked_at, monitor.heartbeat_seen_at = 0.0, time.monotonic() - quiet
        monitor.check()
        while monitor.host_check and not monitor.host_check.done():
            time.sleep(0.01)

    look(0.0)  # the first sign
    look(20.0)
    os.utime(sign, (1.0, 1.0))  # another one
    look(1000.0)
    assert asked == []
    look(1000.0)
    look(0.0)
    assert (asked, monitor.host_check, monitor.unreachable) == (["hosts"], None, None)
    monitor.host_check, monitor.suspicion = Future(), "no rank gives a heartbeat"
    monitor.host_check.set_result({"node1"})
    with pytest.raises(StuckError, match="ended mpirun, which was still running although no rank gives a heartbeat"):
        look(0.0)
    assert monitor.find_unreachable() == {"node1"}


def make_monitor(logs: Path, silent: set[str], asked: list[str]) -> RunMonitor:
    """The monitor of two ranks, which asks their hosts at once if something looks wrong."""
    logs.mkdir()

    def find_silent() -> set[str]:
        asked.append("hosts")
        return silent

    return RunMonitor(logs, ("a", "b"), Asked(ask=find_silent), 45.0)


def check_after(monitor: RunMonitor, seconds: float) -> None:
    """Check as if this time had passed, and again when all hosts have answered."""
    monitor.begun -= seconds
    monitor.ended_at -= seconds * bool(monitor.ended_at)
    for _ in range(2):
        monitor.checked_at = monitor.next_host_check = 0.0
        monitor.check()
        if monitor.host_check:
            monitor.host_check.result(30)


def test_a_host_that_is_lost_before_its_rank_starts_is_detected(tmp_path: Path) -> None:
    asked = list[str]()
    monitor = make_monitor(tmp_path / "logs", {"b"}, asked)
    (tmp_path / "logs/rank-0.err").write_text(f"{STARTED_MARK} rank 0 on a\n")
    check_after(monitor, 5.0)
    assert asked == []
    with pytest.raises(StuckError, match="although 1 of 2 ranks have not started"):
        check_after(monitor, 6.0)


def test_a_host_that_is_lost_while_the_run_is_saved_is_detected(tmp_path: Path) -> None:
    """The other ranks have ended, and mpirun waits for the rank of this host."""
    asked = list[str]()
    monitor = make_monitor(tmp_path / "logs", {"b"}, asked)
    for rank in range(2):
        (tmp_path / f"logs/rank-{rank}.err").write_text(f"{STARTED_MARK} rank {rank} on {'ab'[rank]}\n")
    check_after(monitor, 100.0)
    with (tmp_path / "logs/rank-0.err").open("a") as file:
        file.write(f"step 9\n{ENDED_MARK} rank 0 on a\n")
    check_after(monitor, 1.0)
    assert asked == []
    with pytest.raises(StuckError, match="although 1 of 2 ranks have not ended"):
        check_after(monitor, 6.0)


def test_long_waits_are_reported_once_while_the_ranks_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, reported = make_monitor(tmp_path / "logs", set(), []), threading.Event()
    monkeypatch.setattr(monitor, "report_wait", reported.set)
    log = tmp_path / "logs/rank-1.err"
    log.write_text(f"{STARTED_MARK} rank 1 on b\n")
    check_after(monitor, 0.0)
    assert not monitor.waits
    log.write_text(f"{STARTED_MARK} rank 1 on b\n 5%|# {WAITS_MARK} barrier #6\n")
    check_after(monitor, 0.0)
    assert reported.wait(30)
    reported.clear()
    check_after(monitor, 0.0)
    assert monitor.waits == {f"{WAITS_MARK} barrier #6".encode()}
    assert not reported.wait(0.2)
    shown = io.StringIO()
    LogTail(log, shown).copy()
    assert shown.getvalue() == ""


def test_ranks_have_to_start_in_time_even_if_all_hosts_answer(tmp_path: Path) -> None:
    asked = list[str]()
    monitor = make_monitor(tmp_path / "logs", set(), asked)
    check_after(monitor, 40.0)
    assert asked
    (tmp_path / "logs/rank-0.err").touch()
    with pytest.raises(StuckError, match="no rank started within 45 s"):
        check_after(monitor, 10.0)
    (tmp_path / "logs/rank-0.err").write_text(f"{STARTED_MARK} rank 0 on a\n")
    check_after(monitor, 100.0)


def test_hosts_are_asked_while_mpirun_may_still_end_by_itself(tmp_path: Path) -> None:
    """Nothing waits for their answers. Hosts that answered are asked again at the end."""
    (tmp_path / "rank-1.err").write_text(error_log("", 1, 75), encoding="utf-8")
    answers, told = iter([{"node1"}, set[str](), {"node2"}]), threading.Event()

    def find_silent() -> set[str]:
        told.wait(30)
        return next(answers)

    monitor = RunMonitor(tmp_path, (), Asked(ask=find_silent))
    monitor.check()
    monitor.checked_at = monitor.failed_at = time.monotonic() - 1.0
    monitor.check()
    assert monitor.host_check
    assert not monitor.host_check.done()
    told.set()
    assert monitor.host_check.result(30) == {"node1"}
    monitor.checked_at = 0.0
    with pytest.raises(StuckError, match="still running 1 s after a rank"):
        monitor.check()
    assert monitor.find_unreachable() == {"node1"}
    monitor.unreachable, monitor.host_check = None, None
    monitor.checked_at = monitor.failed_at = time.monotonic() - 1.0
    monitor.check()
    assert monitor.find_unreachable() == {"node2"}
