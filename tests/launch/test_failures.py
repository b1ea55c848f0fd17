"""Which rank failed first, what the user sees last, and when exit code 75 means that the run can be resumed."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config.train import TrainConfig
from cpuft.launch.failures import (
    Failure,
    describe_end,
    describe_failures,
    describe_lost,
    explain_exit,
    find_failures,
    worst_exit_code,
)
from cpuft.launch.rank_output import LogTail
from cpuft.plans import RunPlan
from cpuft.rank.process import RAISED_MARK, format_failure, format_steps, parse_failure, parse_missing_ranks
from cpuft.rank.world import World
from cpuft.record import InterruptedLine, Line, format_line
from tests.conftest import Golden
from tests.records import make_record, make_steps

RAISED = 'step 1\nTraceback (most recent call last):\n  File "train.py", line 5, in <module>\nValueError: odd data\n'
LOST_PEER = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:6330\n"
REFUSED = "cpuft: error: step 3: the loss is nan: lower --learning-rate\n"


def error_log(text: str, rank: int, code: int) -> str:
    """The standard error of a failed rank, with its mark."""
    return f"{text}{format_failure(World(rank, 2, rank, 2), f'host{rank}', code)}\n"


def waiting_log(rank: int, missed: int) -> str:
    """The standard error of a rank that has waited for another one in vain."""
    line = f"cpuft comm: rank {rank}: all_reduce #6 did not arrive: rank {missed} (no answer)\n"
    return f"step 1\n{line}{format_failure(World(rank, 3, 0, 1), f'host{rank}', 75, (missed,))}\n"


HYDRA = (
    "[mpiexec@vm] HYD_sock_write (../../../../../src/pm/i_hydra/libhydra/sock/hydra_sock_intel.c:360): write error\n"
    "[proxy:0:1@vm] HYDT_dmxu_poll_wait_for_event (lib/tools/demux/demux_poll.c:76): callback returned error status\n"
    "[mpiexec@vm] control_cb (mpiexec/pmiserv_cb.c:280): assert (!closed) failed\n"
)
MPIRUN_FAILED = "cpuft: mpirun failed, and no rank reported an error. Last lines of mpirun:"
DOWNSTREAM = "[mpiexec@vm] Error: Downstream from host node2 exited abnormally\n"
C10D = "[W1123 10:00:00.1 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"


@pytest.mark.parametrize(
    ("mpirun", "absent", "said"),
    [
        (HYDRA, ["host node2 does not answer"], "cpuft: host node2 does not answer"),
        (
            HYDRA + DOWNSTREAM,
            ["host node2 does not answer"],
            f"{MPIRUN_FAILED}\n{DOWNSTREAM}cpuft: host node2 does not answer",
        ),
        (HYDRA, [], f"{MPIRUN_FAILED}\n(it printed nothing)"),
    ],
    ids=["a lost host", "with a word on it", "without a word"],
)
def test_source_locations_of_mpirun_are_not_shown(mpirun: str, absent: list[str], said: str) -> None:
    assert describe_failures([], mpirun, absent) == said


def test_harmless_warnings_are_only_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "rank-0.err").write_text(f"{C10D}step 1\n[rank0]:{C10D}step 2\n")
    shown = io.StringIO()
    LogTail(tmp_path / "rank-0.err", shown).copy()
    assert shown.getvalue() == "step 1\nstep 2\n"
    failures = find_failures([error_log(f"{RAISED}{C10D}", 0, 1)], ("localhost",))
    assert "c10d" not in describe_failures(failures, "")


def test_the_output_of_a_rank_does_not_control_the_terminal() -> None:
    planted = RAISED.replace("odd data", "\x1b]0;odd\x07 data\x1b[2J\x9b1A\tü")
    failures = find_failures([error_log(planted, 0, 1)], ("node1",))
    last = describe_failures(failures, "").splitlines()[-2]
    assert last == r"ValueError: \x1b]0;odd\x07 data\x1b[2J\x9b1A" + "\tü"
    assert describe_failures([], "\x1b[31mmpirun: lost\n").splitlines()[-1] == r"\x1b[31mmpirun: lost"


@pytest.mark.parametrize(
    "name, errors",
    [
        ("cause", [error_log(LOST_PEER, 0, 1), error_log(RAISED, 1, 1)]),
        ("killed", [error_log("", 1, 137), "all well so far\n"]),
        ("refused", [error_log(REFUSED, 1, 2), error_log(REFUSED, 0, 2)]),
        ("mpirun", []),
        ("killed-missed", [waiting_log(0, 1), error_log("", 1, 137)]),
        ("waited", [waiting_log(0, 1), waiting_log(2, 1), "all well so far\n"]),
        ("apart", [waiting_log(0, 1), waiting_log(1, 0)]),
    ],
)
def test_the_first_cause_is_shown(name: str, errors: list[str], golden: Golden) -> None:
    hosts = ("node1", "node2", "node3")
    failures = find_failures(errors, hosts)
    absent = describe_lost(failures, hosts, set())
    golden(f"failure-{name}.txt", describe_failures(failures, "ssh: connection refused\n", absent))


@pytest.mark.parametrize("name, errors", [("silent", []), ("silent-waited", [waiting_log(0, 1), waiting_log(2, 1)])])
def test_a_lost_host_is_named_last(name: str, errors: list[str], golden: Golden) -> None:
    hosts = ("node1", "node2", "node3")
    failures = find_failures(errors, hosts)
    text = describe_failures(failures, "ssh: closed\n", describe_lost(failures, hosts, {"node2"}))
    golden(f"failure-{name}.txt", text)


def steps_line(rank: int, has_ended: bool, steps: int) -> str:
    return f"{format_steps(World(rank, 2, rank, 2), f'host{rank}', has_ended, steps)}\n"


@pytest.mark.parametrize(
    "waits, ends, said",
    [
        (
            error_log(LOST_PEER + steps_line(0, False, 5), 0, 1),
            steps_line(1, True, 5),
            "cpuft: the script of rank 1 on node2 ended normally after 5 optimizer steps, and rank 0 on node1 waited "
            "for it, in its step 6: give all ranks the same number of batches, as DistributedSampler does, or train "
            "inside the model's join()",
        ),
        (
            steps_line(0, False, 0) + waiting_log(0, 1),
            steps_line(1, True, 0),
            "cpuft: the script of rank 1 on node2 ended normally, and rank 0 on node1 waited for it: let all ranks "
            "call the same collective operations",
        ),
        (error_log(RAISED + steps_line(0, False, 5), 0, 1), steps_line(1, True, 5), "cpuft: rank 0 on node1 failed"),
        (
            error_log(LOST_PEER + steps_line(0, False, 5), 0, 1),
            error_log(RAISED + steps_line(1, False, 5), 1, 1),
            "cpuft: rank 1 on node2 failed",
        ),
    ],
)
def test_a_rank_whose_script_ended_before_the_others_is_named(waits: str, ends: str, said: str) -> None:
    hosts = ("node1", "node2")
    failures = find_failures([waits, ends], hosts)
    lines = describe_failures(failures, "", describe_lost(failures, hosts, set())).splitlines()
    assert lines[-1] == said
    assert not any("cpuft-rank" in line for line in lines)


def test_the_exception_of_a_function_is_left_to_its_caller() -> None:
    marked = "".join(f"{RAISED_MARK}{line}\n" for line in RAISED.splitlines()[1:])
    failures = find_failures([error_log(marked, 0, 1)], ("node1",))
    assert describe_failures(failures, "") == "cpuft: rank 0 on node1 failed (exit code 1)"
    assert failures[0].text == RAISED.removeprefix("step 1\n").rstrip()


@pytest.mark.parametrize(
    "text", ["Received data size doesn't match expected size. Is there", "prov_err: Truncation error(-265)"]
)
def test_what_libraries_say_about_different_sizes_is_explained(text: str) -> None:
    cause, advice = explain_exit(134, text)
    assert cause == "killed by signal 6, because ranks passed different sizes to a collective operation"
    assert advice.startswith("pass tensors of the same shape and type on all ranks")
    assert explain_exit(1, f"{text}\nretried{RAISED}") == ("exit code 1", "")
    assert explain_exit(255, text)[0].startswith("exit code 255, because")
    assert explain_exit(1, "Message truncated to 512 tokens") == ("exit code 1", "")


def test_ranks_that_only_waited_do_not_determine_the_exit_code() -> None:
    hosts = ("node1", "node2", "node3")
    waiting = [waiting_log(0, 1), waiting_log(2, 1)]
    assert worst_exit_code(find_failures([*waiting, error_log(RAISED, 1, 3)], hosts), 255) == 3
    assert worst_exit_code(find_failures(waiting, hosts), 255) == 75
    assert worst_exit_code([], 75) == 75


def test_the_mark_of_a_failed_rank_is_parsed() -> None:
    assert parse_failure(f"a\n{format_failure(World(3, 4, 1, 2), 'node-2', 139)}\nb\n") == (3, "node-2", 139)
    assert parse_failure("Traceback\n") is None
    assert parse_missing_ranks(f"a\n{format_failure(World(3, 4, 1, 2), 'node-2', 1, {0, 2})}\nb\n") == {0, 2}


@pytest.mark.parametrize(
    "code, cause, advice",
    [
        (3, "exit code 3", ""),
        (135, "killed by SIGBUS", "/dev/shm may be full: check it with cpuft doctor"),
        (
            137,
            "killed by SIGKILL",
            "if memory ran out, lower --batch-size or --max-length, add --gradient-checkpointing, or start fewer ranks "
            "on this host",
        ),
        (139, "killed by signal 11", ""),
        (255, "exit code 255", ""),
    ],
)
def test_exit_codes_are_explained(code: int, cause: str, advice: str) -> None:
    assert explain_exit(code) == (cause, advice)


@pytest.mark.parametrize(
    "codes, fallback, code",
    [([3], 255, 3), ([137, 3], 255, 3), ([134, 139], 255, 139), ([], 255, 255), ([1, 2], 1, 2)],
)
def test_worst_exit_code(codes: list[int], fallback: int, code: int) -> None:
    assert worst_exit_code([Failure(0, "node1", one, "") for one in codes], fallback) == code


HEADER = replace(make_record(2).header, options=dict(vars(TrainConfig())))
STEPS = make_steps(3, [0.1])
INTERRUPTED = InterruptedLine(3, 9, "SIGUSR1")
ENDED = format_failure(World(0, 2, 0, 2), "a", 75)
WAITED = format_failure(World(1, 2, 0, 2), "b", 75, [0])
WATCHED = f"cpuft comm: rank 0: ended because rank 1 gave up\n{ENDED}"


def end(folder: Path, code: int, lines: tuple[Line, ...], errors: str, script: list[str]) -> tuple[int, str]:
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.err").write_text(errors)
    record = folder / ("record.jsonl" if lines else "nothing")
    record.write_text("".join(format_line(line) + "\n" for line in lines))
    words = ("--", *script) if script else ()
    return describe_end(code, str(folder), ("a", "b"), RunPlan(script_words=words))


@pytest.mark.parametrize(
    "code, lines, errors, script, wanted, said",
    [
        (3, (HEADER,), "", [], 3, ""),
        (
            75,
            (HEADER, *STEPS, INTERRUPTED),
            ENDED,
            [],
            75,
            "the run was interrupted by SIGUSR1 after update 3 of 9",
        ),
        (75, (HEADER, *STEPS), WAITED, [], 75, ""),
        (75, (HEADER, *STEPS), WATCHED, [], 75, ""),
        (75, (HEADER, *STEPS), "", [], 75, ""),
        (75, (), "", [], 1, ""),
        (
            75,
            (),
            ENDED,
            ["train.py", "a b"],
            75,
            "the ranks ended with exit code 75",
        ),
        (75, (), WAITED, ["train.py"], 75, ""),
    ],
)
def test_exit_code_75_is_returned_only_for_runs_that_can_be_resumed(
    tmp_path: Path, code: int, lines: tuple[Line, ...], errors: str, script: list[str], wanted: int, said: str
) -> None:
    words = ["cpuft", "launch", "--resume", str(tmp_path), *(["--", *script] if script else [])]
    command = shlex.join(words)
    assert end(tmp_path, code, lines, errors, script) == (wanted, said and f"cpuft: {said}: continue with {command}")


def test_the_last_line_of_a_finished_run_is_its_folder(tmp_path: Path) -> None:
    assert end(tmp_path, 0, (HEADER, *STEPS), "", []) == (0, f"run: {tmp_path}")


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last):\nRuntimeError: can't start new thread\n",
        "libgomp: Thread creation failed: Resource temporarily unavailable\n",
        "sh: 1: Cannot fork: Resource temporarily unavailable\n",
    ],
)
def test_a_limit_of_processes_is_named(text: str) -> None:
    assert "ulimit -u" in explain_exit(1, text)[1]
