"""Pending operations and the explanation of a hang, without ranks."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any, cast

import pytest

from cpuft.comm.liveness import _LINE_BYTES
from cpuft.comm.watchdog import (
    GONE_GRACE_SECONDS,
    CollectiveWatchdog,
    Operation,
    OperationRegister,
    describe_failure,
    find_missing_ranks,
    find_overdue,
)


def waiting(channel: str = "the world", started: float = 100.0, timeout: float = 30.0) -> Operation:
    return Operation(channel, 17, "all_reduce", 4000, (0, 1, 2), timeout, started)


@pytest.mark.parametrize(
    "now, gone, overdue",
    (
        (129.9, {}, False),
        (130.1, {}, True),
        (101.0, {1: 50.0}, False),
        (100.1 + GONE_GRACE_SECONDS, {1: 50.0}, True),
        (110.0, {1: 109.0}, False),
        (109.1 + GONE_GRACE_SECONDS, {1: 109.0}, True),
        (120.0, {7: 0.0}, False),
    ),
)
def test_an_operation_is_given_up_past_its_deadline_or_some_time_after_a_loss(
    now: float, gone: dict[int, float], overdue: bool
) -> None:
    assert (find_overdue([waiting()], gone, now) is not None) == overdue


def test_the_oldest_overdue_operation_comes_first() -> None:
    old, new = waiting(started=10.0), waiting(started=20.0)
    assert find_overdue([new, old], {}, 100.0) is old


@pytest.mark.parametrize(
    "answers, gone, absent",
    (
        ({1: {"the world": (17, "all_reduce")}, 2: {"the world": (18, "broadcast")}}, {}, {}),
        ({1: {"the world": (16, "broadcast")}, 2: {"the world": (17, "x")}}, {}, {1: "last at broadcast #16"}),
        ({1: {}, 2: {"the world": (17, "x")}}, {}, {1: "has not begun"}),
        ({2: {"the world": (17, "x")}}, {}, {1: "no answer: stopped, or its host is lost"}),
        ({2: {"the world": (17, "x")}}, {1: 5.0}, {1: "ended, or cut off"}),
        # Rank 2 is behind because it waits itself, for a lost rank or for one that is further behind.
        ({2: {"the world": (16, "broadcast")}}, {}, {1: "no answer: stopped, or its host is lost"}),
        ({2: {"the world": (16, "broadcast")}}, {1: 5.0}, {1: "ended, or cut off"}),
        (
            {1: {"the world": (15, "x")}, 2: {"the world": (16, "broadcast")}},
            {},
            {1: "last at x #15"},
        ),
    ),
)
def test_ranks_that_did_not_arrive(
    answers: dict[int, dict[str, tuple[int, str]]], gone: dict[int, float], absent: dict[int, str]
) -> None:
    assert find_missing_ranks(waiting(), 0, answers, gone) == absent


@pytest.mark.parametrize(
    "gone, absent", [({}, {0: "no answer: stopped, or its host is lost"}), ({0: 5.0}, {0: "ended, or cut off"})]
)
def test_if_nothing_is_relayed_only_rank_0_is_missing(gone: dict[int, float], absent: dict[int, str]) -> None:
    """Rank 1 is silent, too, but only because rank 0 relays nothing, not even rank 2's own answer."""
    assert find_missing_ranks(waiting(), 2, {}, gone) == absent


def test_the_line_names_operation_number_size_wait_and_ranks() -> None:
    line = describe_failure(waiting(), 0, {2: "ended"}, 131.0, {})
    assert line == (
        "cpuft comm: rank 0: all_reduce #17 of the world (4000 bytes) waited 31.0 s of at most 30; "
        "did not arrive: rank 2 (ended). "
        "Next: look at the log of that rank, or allow more time with --comm-timeout."
    )


@pytest.mark.parametrize(
    "other, arrived, remedy",
    [
        (
            ("all_reduce", 4004),
            "all ranks arrived, but with different sizes: ranks 0, 2 in all_reduce of 4000 bytes, rank 1 in all_reduce "
            "of 4004 bytes",
            "pass tensors of the same shape and type on all ranks",
        ),
        (
            ("broadcast", 4000),
            "all ranks arrived, but with different operations: ranks 0, 2 in all_reduce of 4000 bytes, rank 1 in "
            "broadcast of 4000 bytes",
            "let all ranks call the same operations in the same order",
        ),
        (
            ("all_reduce", 4000),
            "all ranks arrived, so the network or a library hangs",
            "check the interface and the network between the hosts",
        ),
    ],
)
def test_the_line_says_which_rank_has_which_size(other: tuple[str, int], arrived: str, remedy: str) -> None:
    calls = {0: ("all_reduce", 4000), 1: other, 2: ("all_reduce", 4000)}
    line = describe_failure(waiting(), 0, {}, 131.0, calls)
    assert f"; {arrived}. Next: {remedy}, or allow more time" in line


def test_watchdogs_tell_each_other_their_sizes() -> None:
    registers = [OperationRegister(), OperationRegister()]
    watchdog = CollectiveWatchdog(registers[0])
    for rank, register in enumerate(registers):
        register.begin("the world", "broadcast", 8, (0, 1), 60.0)
        operation = register.begin("the world", "all_reduce", 4000 + rank, (0, 1), 60.0)
        if rank:
            register.begin("the world", "barrier", 0, (0, 1), 60.0)  # it has gone on
        watchdog._handle_message(json.loads(json.dumps({"answer": rank, **register.copy_progress()})))
    text, missing = watchdog._explain(operation, silent=(0, 1))
    assert not missing
    assert "different sizes: rank 0 in all_reduce of 4000 bytes, rank 1 in all_reduce of 4001 bytes" in text


def test_a_rank_that_ends_with_another_asks_for_its_own_operation_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 gave up an operation with rank 3 alone, so that nobody has told rank 1 yet how far the others are."""
    register = OperationRegister()
    register.begin("hosts", "mean", 0, (0, 1, 2, 3), 60.0)
    watchdog = CollectiveWatchdog(register)
    watchdog._rank = 1

    class Hub:
        def send(self, message: dict[str, Any]) -> None:
            for rank in (0, 1, 2) if "ask" in message else ():
                answer = {"answer": rank, **register.copy_progress()}
                threading.Timer(0.1, watchdog._handle_message, [answer]).start()

    watchdog._connection = cast(Any, Hub())
    named: queue.Queue[object] = queue.Queue()
    monkeypatch.setattr("cpuft.comm.watchdog._write_and_exit", lambda text, missing, is_hang: named.put(missing))
    watchdog._handle_message({"gone": 3})
    watchdog._handle_message({"end": 2, "why": "reduce #1", "missed": [3]})
    assert named.get(timeout=10) == {3: "ended, or cut off"}


def test_a_register_numbers_each_channel_and_counts_payload() -> None:
    register = OperationRegister()
    first = register.begin("a", "all_reduce", 10, (0, 1), 1.0)
    second = register.begin("a", "broadcast", 5, (0, 1), 1.0)
    other = register.begin("b", "all_reduce", 1, (0, 1), 1.0)
    assert [first.sequence, second.sequence, other.sequence] == [1, 2, 1]
    register.end(first)
    assert {operation.name for operation in register.list_pending()} == {"broadcast", "all_reduce"}
    assert register.take_traffic() == 16
    assert register.take_traffic() == 0
    register.forget_group("a")
    assert register.copy_progress()["progress"] == {"b": (1, "all_reduce")}


def test_the_progress_of_many_channels_fits_into_a_message() -> None:
    register = OperationRegister()
    register.begin("the world", "all_reduce", 10, (0, 1), 1.0)
    for tag in range(5000):
        register.begin(f"the world from 0 to 1 (tag {tag})", "send", 10, (0, 1), 1.0)
    register.begin("the world", "all_reduce", 10, (0, 1), 1.0)
    answer = register.copy_progress()
    assert answer["progress"]["the world"] == (2, "all_reduce")
    assert len(json.dumps({"answer": 1, **answer})) < _LINE_BYTES


def test_operations_within_a_host_are_watched_but_their_bytes_do_not_count() -> None:
    register = OperationRegister()
    register.ignore_traffic([0, 1])
    register.begin("group 1", "reduce", 1000, (0, 1), 1.0)
    register.begin("group 2", "all_reduce", 10, (0, 2), 1.0)
    register.begin("the world", "all_reduce", 5, (0, 1, 2, 3), 1.0)
    assert len(register.list_pending()) == 3
    assert register.take_traffic() == 15
