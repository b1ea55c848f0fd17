"""What signals ask of ranks, how lost hosts are noticed while ranks run, and how leases are renewed."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpuft.errors import CpuftError, Interrupted
from cpuft.execute import run_stages, run_step
from cpuft.hosts import ssh_config
from cpuft.hosts.transport import SshTransport
from cpuft.launch import supervise
from cpuft.launch.attempt import AttemptOrder
from cpuft.launch.resume import remove_empty_run
from cpuft.launch.run_state import FAILED, FINISHED, INTERRUPTED, LaterStartError, read_state, write_state
from cpuft.launch.supervise import (
    LogTail,
    NotStartedError,
    RunMonitor,
    StopRequest,
    StuckError,
    run_as_head_host,
)
from cpuft.plans import Plan, RunPlan, Setting, Step
from cpuft.rank import kill
from cpuft.rank.diagnostics import HANG_MARK
from cpuft.rank.interruption import HEARTBEAT_FILE
from cpuft.rank.process import ENDED_MARK, STARTED_MARK, WAITS_MARK, format_failure
from cpuft.rank.world import World
from cpuft.transfer import open_locked
from tests.launch.test_failures import error_log
from tests.records import make_state

USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


class Lost(SshTransport):
    """A transport to hosts of which one, b, does not answer."""

    def find_unresponsive(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
        return {"b"}.intersection(names)


@dataclass(frozen=True)
class Asked(SshTransport):
    """A transport to hosts that a function asks."""

    ask: Callable[[], set[str]] = set

    def find_unresponsive(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
        return self.ask()


def test_a_host_that_is_lost_before_ranks_start_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The head host cannot copy the prepared examples to it."""
    run = tmp_path / "run"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    give = Step("copy the prepared examples to b", ("sh", "-c", "echo Connection timed out; exit 255"))
    plan = RunPlan(((make,),), prepare=((give,),), ranks=((Step("train", ("true",)),),))
    assert run_as_head_host(plan, str(run), make_state("a", "b"), 0.0, Lost()) == 75
    assert capfd.readouterr().err.splitlines() == [
        "cpuft: copy the prepared examples to b: exit code 255",
        "cpuft: host b does not answer, so rank 1 was lost: check the host with cpuft doctor",
    ]
    ended = read_state(str(run))
    assert ended
    assert (ended.phase, ended.exit_code, ended.silent) == (INTERRUPTED, 75, ("b",))
    remove_empty_run(str(run))
    assert not run.exists()
    with pytest.raises(RuntimeError, match="copy the prepared examples to b: exit code 255"):
        run_as_head_host(plan, str(run), make_state("a", "c"), 0.0, Lost())


def test_the_second_of_two_launches_into_one_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found that it does not exist, and the first has made it since."""
    monkeypatch.chdir(tmp_path)
    make = Step("make the run folder", ("mkdir", "run", "run/logs"))
    plan = RunPlan(((make,),), ranks=((Step("train", ("true",)),),))
    assert run_as_head_host(plan, "run", make_state(), 0.0, SshTransport()) == 0
    with pytest.raises(CpuftError, match=r"File exists.*give a new folder with --run-dir"):
        run_as_head_host(plan, "run", make_state(), 0.0, SshTransport())
    assert (tmp_path / "run" / "logs").is_dir()


@pytest.mark.parametrize("has_record, left", [(True, ["model.mine.tmp"]), (False, ["model.12.tmp", "model.mine.tmp"])])
def test_a_half_written_model_of_a_killed_start_goes_and_no_file_of_a_script(
    has_record: bool, left: list[str], tmp_path: Path
) -> None:
    for name in ("logs", "model.12.tmp", "model.mine.tmp"):
        (tmp_path / name).mkdir()
    if has_record:
        (tmp_path / "record.jsonl").touch()
    plan = RunPlan(ranks=((Step("train", ("true",)),),), resumed=True)
    assert run_as_head_host(plan, str(tmp_path), make_state(), 0.0, SshTransport()) == 0
    assert sorted(path.name for path in tmp_path.glob("model.*")) == left


def test_marks_and_known_warnings_are_not_shown(tmp_path: Path) -> None:
    log, shown = tmp_path / "rank-0.err", io.StringIO()
    warning = "2026:11:21-11:00:00:(123) |CCL_WARN| value of CCL_LOG_LEVEL changed to be error (default:warn)\n"
    tail = LogTail(log, shown)
    tail.copy()
    log.write_text(f"step 1\n{warning}{format_failure(World(0, 2, 0, 2), 'node1', 1)}\n", encoding="utf-8")
    tail.copy()
    with log.open("a", encoding="utf-8") as file:
        file.write("|CCL_WARN| something else\n")
    tail.copy()
    assert shown.getvalue() == "step 1\n|CCL_WARN| something else\n"


@pytest.mark.parametrize(
    "host, limit, blame",
    [
        ("localhost", "_END_SECONDS", "rank 0 on localhost failed"),
        (
            "frozen",
            "_FAILURE_SECONDS",
            "host frozen does not answer, so rank 1 was lost: check the host with cpuft doctor",
        ),
    ],
)
def test_mpirun_that_waits_for_a_lost_host_is_ended(
    host: str, limit: str, blame: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has ended because it missed rank 1; mpirun would wait for the host of rank 1."""
    monkeypatch.setattr(supervise, limit, 1.0)
    monkeypatch.setattr(ssh_config, "CONNECT_SECONDS", 1.0)
    make = Step("make the run folder", ("mkdir", "run", "run/logs"))
    said = f"did not arrive: rank 1\n{format_failure(World(0, 2, 0, 1), 'vm', 75)}\n"
    wait = Step("train", ("sh", "-c", 'printf "$1" >run/logs/rank-0.err; exec sleep 100', "train", said))
    plan = RunPlan(((make,),), ranks=((wait,),))
    start, state = time.monotonic(), make_state("localhost", host)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        Path("config").write_text(f"Host frozen\n  HostName 127.0.0.1\n  Port {frozen.getsockname()[1]}\n")
        assert run_as_head_host(plan, "run", state, 0.0, SshTransport("config")) == 75
    assert time.monotonic() - start < 30
    errors = capfd.readouterr().err
    assert re.search(r"ended mpirun, which was still running \d s after a rank had failed", errors)
    assert errors.rstrip().endswith(f"cpuft: {blame}")


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

    monkeypatch.setattr(supervise, "diagnose_run", look)
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
    assert monitor.find_lost_hosts() == {"node1"}


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
    with pytest.raises(NotStartedError, match="no rank started within 45 s"):
        check_after(monitor, 10.0)
    (tmp_path / "logs/rank-0.err").write_text(f"{STARTED_MARK} rank 0 on a\n")
    check_after(monitor, 100.0)


@pytest.mark.parametrize(
    "script, code, starts",
    [
        ('echo x >>"$0/starts"; [ "$(wc -l <"$0/starts")" = 3 ] || sleep 60', 0, 3),
        ('echo x >>"$0/starts"; sleep 60', 1, 3),
        ('echo x >>"$0/starts"; [ "$(wc -l <"$0/starts")" = 2 ] || exit 255', 0, 2),
        ('echo x >>"$0/starts"; exit 127', 127, 1),
        ('echo x >>"$0/starts"; echo said >"$0/logs/rank-1.err"; exit 3', 3, 1),
    ],
    ids=["third start", "never", "closed connection", "no mpirun", "a rank failed"],
)
def test_mpirun_is_started_again_if_no_rank_starts(
    script: str, code: int, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign connection to its port may block all ranks, or end mpirun."""
    monkeypatch.setattr(supervise, "_START_LIMIT", 0.2)
    monkeypatch.setattr(supervise, "_CHECK_SECONDS", 0.05)
    run = tmp_path / "run"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    plan = RunPlan(((make,),), ranks=((Step("train", ("sh", "-c", script, str(run))),),))
    state = make_state("localhost", "127.0.0.1")
    assert run_as_head_host(plan, str(run), state, 0.0, SshTransport()) == code
    assert len((run / "starts").read_text().split()) == starts
    ended = read_state(str(run))
    assert ended
    assert (ended.phase, ended.exit_code) == (FAILED if code else FINISHED, code)


def test_ranks_are_ended_when_another_launcher_has_started_the_run_again(tmp_path: Path) -> None:
    """This head host was cut off from the launcher only."""
    run = tmp_path / "run"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    (tmp_path / "later").mkdir()
    write_state(str(tmp_path / "later"), make_state("localhost", owner=2))
    script = 'echo "$CPUFT_OWNER $CPUFT_RUN_DIR" >"$0/told"; cp "$0/../later/state.json" "$0/.."; exec sleep 60'
    plan = RunPlan(((make,),), ranks=((Step("train", ("sh", "-c", script, str(run))),),))
    begun = time.monotonic()
    with pytest.raises(LaterStartError, match=r"has begun start 2 of the run, so this one, start 1, was ended"):
        run_as_head_host(plan, str(run), make_state("localhost"), 0.0, SshTransport())
    assert time.monotonic() - begun < 30
    assert (run / "told").read_text() == f"1 {run}\n"
    with pytest.raises(LaterStartError):
        run_as_head_host(plan, str(run), make_state("localhost"), 0.0, SshTransport())


@pytest.mark.parametrize("name", ["I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC", ""])
@pytest.mark.parametrize("is_on_host_disk", [False, True])
def test_what_mpirun_starts_on_other_hosts_is_marked(is_on_host_disk: bool, name: str, tmp_path: Path) -> None:
    """Not in a Slurm job, where srun starts it, nor with a program of the user's."""
    run, marked = tmp_path / "run", f"{tmp_path}/{kill.SSH_NAME}1"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    if is_on_host_disk:
        write_state(str(tmp_path), make_state("localhost"))
    script = 'echo "$I_MPI_HYDRA_BOOTSTRAP_EXEC" >"$0/told"; [ ! -L "$1" ] || "$1" -V'
    settings = (Setting(name, "mine", ""),) if name else ()
    plan = RunPlan(((make,),), ranks=((Step("train", ("sh", "-c", script, str(run), marked), settings),),))
    assert run_as_head_host(plan, str(run), make_state("localhost"), 0.0, SshTransport()) == 0
    mine = "mine" if name.endswith("EXEC") else ""
    assert (run / "told").read_text() == f"{marked if is_on_host_disk and not name else mine}\n"
    assert ("OpenSSH" in (run / "logs/mpirun.log").read_text()) == (is_on_host_disk and not name)
    assert not os.path.lexists(marked)


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
    assert monitor.find_lost_hosts() == {"node1"}
    monitor.unreachable, monitor.host_check = None, None
    monitor.checked_at = monitor.failed_at = time.monotonic() - 1.0
    monitor.check()
    assert monitor.find_lost_hosts() == {"node2"}


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


@pytest.mark.parametrize("first, last", [(TERM, 0), (0, TERM)], ids=["then stuck", "stuck before"])
def test_a_signal_counts_more_than_what_is_found_while_the_ranks_are_ended(first: int, last: int) -> None:
    """It may come while the stacks of ranks that hang are gathered. The run would be restarted otherwise."""
    signals = iter([first, last])

    def watch() -> None:
        if number := next(signals):
            os.kill(os.getpid(), number)
        raise StuckError("ranks wait in vain")

    with pytest.raises(Interrupted) as stopped:
        run_step(Step("ranks", ("sleep", "60")), os.environ, None, watch)
    assert stopped.value.exit_code == 143
    assert list(signals) == []


@pytest.mark.parametrize("name, why", [("missing", "No such file or directory"), ("plain", "Permission denied")])
def test_a_step_whose_program_cannot_be_run_ends_the_plan_with_one_line(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    plan = Plan(((Step("train", (f"{tmp_path}/{name}",)),),))
    with pytest.raises(CpuftError, match=rf"^train: failed \(.*{why}.*\): look$"):
        run_stages(plan, 0.0, lambda line: None, "look")


def test_a_supervisor_does_not_wait_for_ever_for_an_earlier_one(tmp_path: Path) -> None:
    order = AttemptOrder(RunPlan(), str(tmp_path / "run"), make_state(), 0.0, "")
    program = "from cpuft.launch import attempt; attempt._LOCK_SECONDS = 0.2; attempt.main()"
    lock = open_locked(f"{order.run_dir}.lock")
    given = json.dumps(dataclasses.asdict(order))
    done = subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, text=True, timeout=60, check=False
    )
    os.close(lock)
    assert done.returncode == 75
    assert re.fullmatch(r"cpuft: error: an earlier start of the run.* has held \S+/run\.lock .*\n", done.stderr), done
