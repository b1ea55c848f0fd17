"""What a user sees last when a rank fails."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.launch import supervise
from cpuft.launch.supervise import Tail, describe_exit, describe_failures, find_failures, run_plan, worst_exit_code
from cpuft.plan import RunPlan, Step
from cpuft.rank.process import format_failure, parse_cores, parse_failure
from cpuft.rank.world import World
from tests.conftest import Golden

RAISED = 'step 1\nTraceback (most recent call last):\n  File "train.py", line 5, in <module>\nValueError: odd data\n'
LOST_PEER = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:6330\n"
REFUSED = "cpuft: error: step 3: the loss is nan: lower --learning-rate\n"


def ended(text: str, rank: int, code: int) -> str:
    """A rank's standard error with the mark of its end."""
    return f"{text}{format_failure(World(rank, 2, rank, 2), f'host{rank}', code)}\n"


@pytest.mark.parametrize(
    "name, errors",
    [
        ("cause", [ended(LOST_PEER, 0, 1), ended(RAISED, 1, 1)]),
        ("killed", [ended("", 1, 137), "all well so far\n"]),
        ("refused", [ended(REFUSED, 1, 2), ended(REFUSED, 0, 2)]),
        ("mpirun", []),
    ],
)
def test_the_first_cause_is_shown(name: str, errors: list[str], golden: Golden) -> None:
    failures = find_failures(errors, ("node1", "node2"))
    golden(f"failure-{name}.txt", describe_failures(failures, "ssh: connection refused\n"))


def test_a_failures_mark_reads_back() -> None:
    assert parse_failure(f"a\n{format_failure(World(3, 4, 1, 2), 'node-2', 139)}\nb\n") == (3, "node-2", 139)
    assert parse_failure("Traceback\n") is None


@pytest.mark.parametrize("text, rank, cores", [("", 0, ()), ("0,1;2", 0, (0, 1)), ("0,1;2", 1, (2,)), ("0,1;2", 2, ())])
def test_cores_of_a_rank(text: str, rank: int, cores: tuple[int, ...]) -> None:
    assert parse_cores(text, rank) == cores


@pytest.mark.parametrize(
    "code, words",
    [(3, "exit code 3"), (139, "killed by signal 11"), (137, "killed by SIGKILL (out of memory? lower --batch-size)")],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    "codes, fallback, code",
    [([3], 255, 3), ([137, 3], 255, 3), ([134, 139], 255, 139), ([], 255, 255), ([1, 2], 1, 2)],
)
def test_worst_exit_code(codes: list[int], fallback: int, code: int) -> None:
    assert worst_exit_code(codes, fallback) == code


def test_of_two_launches_into_one_directory_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found it free; the first has made it since."""
    monkeypatch.chdir(tmp_path)
    make = Step("make the run's directory", ("mkdir", "run", "run/logs"))
    plan = RunPlan(((make,),), ranks=((Step("train", ("true",)),),))
    assert run_plan(plan, "run", (), os.environ, 0.0) == 0
    with pytest.raises(CpuftError, match=r"File exists.*name a new place with --run-dir"):
        run_plan(plan, "run", (), os.environ, 0.0)
    assert (tmp_path / "run" / "logs").is_dir()


def test_what_is_not_the_users_affair_stays_in_the_log(tmp_path: Path) -> None:
    log, shown = tmp_path / "rank-0.err", io.StringIO()
    warning = "2026:11:21-11:00:00:(123) |CCL_WARN| value of CCL_LOG_LEVEL changed to be error (default:warn)\n"
    tail = Tail(log, shown)
    tail.copy()
    log.write_text(f"step 1\n{warning}{format_failure(World(0, 2, 0, 2), 'node1', 1)}\n", encoding="utf-8")
    tail.copy()
    with log.open("a", encoding="utf-8") as file:
        file.write("|CCL_WARN| something else\n")
    tail.copy()
    assert shown.getvalue() == "step 1\n|CCL_WARN| something else\n"


def test_mpirun_that_waits_for_a_lost_host_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has said whom it missed and ended; the host of rank 1 is frozen, and mpirun would wait for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "_END_SECONDS", 1.0)
    make = Step("make the run's directory", ("mkdir", "run", "run/logs"))
    said = f"did not arrive: rank 1\n{format_failure(World(0, 2, 0, 1), 'vm', 75)}\n"
    wait = Step("train", ("sh", "-c", 'printf "$1" >run/logs/rank-0.err; exec sleep 100', "train", said))
    start = time.monotonic()
    assert run_plan(RunPlan(((make,),), ranks=((wait,),)), "run", ("node1", "node2"), os.environ, 0.0) == 75
    assert time.monotonic() - start < 30
    errors = capfd.readouterr().err
    assert "mpirun did not end within 1 s of a rank's failure" in errors
    assert errors.rstrip().endswith("cpuft: rank 0 on node1 failed")
