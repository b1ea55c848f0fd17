"""What a user sees last when a rank fails."""

from __future__ import annotations

import pytest

from cpuft.environment import World
from cpuft.rank import format_failure, parse_cores, parse_failure
from cpuft.supervise import describe_exit, describe_failures, find_failures, worst_exit_code
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
