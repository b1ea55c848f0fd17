"""How the head host prepares a run, starts its ranks and ends them, and how steps are executed."""

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
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpuft import execute
from cpuft.errors import CpuftError, Interrupted
from cpuft.execute import run_stages, run_step
from cpuft.hosts import ssh_config
from cpuft.hosts.transport import SshTransport
from cpuft.launch import run_monitor, supervise
from cpuft.launch.attempt import AttemptOrder
from cpuft.launch.rank_output import LogTail
from cpuft.launch.resume import remove_empty_run
from cpuft.launch.run_monitor import StuckError
from cpuft.launch.run_state import FAILED, INTERRUPTED, LATER_START, LaterStartError, read_state, write_state
from cpuft.launch.supervise import run_as_head_host
from cpuft.plans import Plan, RunPlan, Setting, Step
from cpuft.rank import kill
from cpuft.rank.process import ENDED_MARK, STARTED_MARK, format_failure
from cpuft.rank.world import World
from cpuft.transfer import open_locked
from tests.records import make_state

TERM = signal.SIGTERM


class Lost(SshTransport):
    """A transport to hosts of which one, b, does not answer."""

    def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
        return {"b"}.intersection(names)


def test_a_killed_rank_is_no_success_whatever_mpirun_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    begun, ended = f"{STARTED_MARK} rank N on a", f"{ENDED_MARK} rank N on a"
    write = (
        f"cd {run}/logs; (echo '{begun}'; seq 9999; echo '{ended}'; seq 9999) >rank-0.err; echo '{begun}' >rank-1.err"
    )
    plan = RunPlan(((make,),), ranks=((Step("train", ("sh", "-c", write)),),))
    assert run_as_head_host(plan, str(run), make_state("localhost", "localhost"), 0.0, SshTransport()) == 1
    said = "cpuft: mpirun reports success, and 1 of 2 ranks were killed before their end: see "
    assert capfd.readouterr().err.splitlines()[-1] == f"{said}{run}/logs/rank-1.err"


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
    assert (ended.phase, ended.exit_code, ended.unreachable) == (INTERRUPTED, 75, ("b",))
    remove_empty_run(str(run))
    assert not run.exists()
    with pytest.raises(RuntimeError, match="copy the prepared examples to b: exit code 255"):
        run_as_head_host(plan, str(run), make_state("a", "c"), 0.0, Lost())


def test_the_steps_of_a_stage_of_the_preparation_run_at_the_same_time(tmp_path: Path) -> None:
    """As copies of the prepared examples to many hosts. Each waits for the other."""
    run = tmp_path / "run"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    script = 'touch "$0"; for _ in $(seq 300); do [ ! -e "$1" ] || exit 0; sleep 0.1; done; exit 1'
    copies = tuple(Step("copy", ("sh", "-c", script, f"{run}/{one}", f"{run}/{two}")) for one, two in ("ab", "ba"))
    plan = RunPlan(((make,),), prepare=(copies,), ranks=((Step("train", ("true",)),),))
    assert run_as_head_host(plan, str(run), make_state("a"), 0.0, SshTransport()) == 0


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


def test_a_character_that_is_written_in_two_parts_is_shown_as_it_is(tmp_path: Path) -> None:
    log, shown = tmp_path / "rank-0.out", io.StringIO()
    tail = LogTail(log, shown)
    for part in (b"caf\xc3", b"\xa9 \xff\n"):
        with log.open("ab") as file:
            file.write(part)
        tail.copy()
    assert shown.getvalue() == "caf\u00e9 \ufffd\n"


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
    monkeypatch.setattr(run_monitor, limit, 1.0)
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


def test_mpirun_is_ended_if_no_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A foreign connection to its port may block all ranks."""
    monkeypatch.setattr(supervise, "_START_LIMIT", 0.2)
    monkeypatch.setattr(run_monitor, "_CHECK_SECONDS", 0.05)
    run = tmp_path / "run"
    make = Step("make the run folder", ("mkdir", "-p", f"{run}/logs"))
    plan = RunPlan(((make,),), ranks=((Step("train", ("sleep", "60")),),))
    state = make_state("localhost", "127.0.0.1")
    assert run_as_head_host(plan, str(run), state, 0.0, SshTransport()) == 1
    assert re.search(r"no rank started within 1 s: another program may be connecting to", capfd.readouterr().err)
    ended = read_state(str(run))
    assert ended
    assert (ended.phase, ended.exit_code) == (FAILED, 1)


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


@pytest.mark.parametrize("runs_stages", [False, True], ids=["step", "stages"])
def test_a_signal_while_a_process_starts_leaves_none(runs_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step, started, start = Step("wait", ("sleep", "60")), list[execute.Process](), execute._open_process

    def start_and_interrupt(*given: Any, **options: Any) -> execute.Process:
        started.append(start(*given, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(execute, "_open_process", start_and_interrupt)
    steps = Plan(stages=((step, step),))
    run = partial(run_stages, steps, 0.0, print, "") if runs_stages else partial(run_step, step, {})
    with pytest.raises(Interrupted):
        run()
    assert [process.poll() is None for process in started] == [False] * (1 + runs_stages)


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


def run_supervisor(order: AttemptOrder, change: str) -> subprocess.CompletedProcess[str]:
    program = f"from cpuft.launch import attempt; {change}\nattempt.main()"
    given = json.dumps(dataclasses.asdict(order))
    return subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_supervisor_does_not_wait_for_ever_for_an_earlier_one(tmp_path: Path) -> None:
    order = AttemptOrder(RunPlan(), str(tmp_path / "run"), make_state(), 0.0, "")
    lock = open_locked(f"{order.run_dir}.lock")
    done = run_supervisor(order, "attempt._LOCK_SECONDS = 0.2")
    os.close(lock)
    assert done.returncode == 75
    assert re.fullmatch(r"cpuft: error: an earlier start of the run.* has held \S+/run\.lock .*\n", done.stderr), done


def test_a_script_may_exit_with_the_code_of_a_later_start(tmp_path: Path) -> None:
    """Its results are fetched all the same."""
    (tmp_path / "run/logs").mkdir(parents=True)
    plan = RunPlan(ranks=((Step("train", ("sh", "-c", f"exit {LATER_START}")),),), resumed=True)
    order = AttemptOrder(plan, str(tmp_path / "run"), make_state("localhost"), 0.0, "")
    assert run_supervisor(order, "").returncode == 1
