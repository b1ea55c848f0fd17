"""Whether a run that broke off is started again, and where."""

from __future__ import annotations

import pytest

from cpuft.hosts.hostfile import Host
from cpuft.launch.failures import Failure
from cpuft.launch.restart import Ended, Verdict, choose_hosts, count_restarts, describe_restart, judge
from cpuft.rank.process import FOREIGN, OUT_OF_MEMORY

RAISED = 'step 1\nTraceback (most recent call last):\n  File "train.py", line 5\nValueError: odd <at 0x{}>\n'
LOST_PEER = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:6330\n"
WAITED = "cpuft comm: rank 0: all_reduce #6 did not arrive: rank 1 (no answer)\n"


def failed(code: int, text: str = "", *missed: int) -> tuple[Failure, ...]:
    return (Failure(2, "node3", code, text, frozenset(missed)), Failure(0, "node1", 1, LOST_PEER))


@pytest.mark.parametrize(
    "ended, verdict",
    [
        (Ended(75, silent=frozenset({"node2"})), Verdict(True, "host node2 was lost")),
        (Ended(75, failed(2), frozenset({"node3", "node2"})), Verdict(True, "hosts node2, node3 were lost")),
        (Ended(75, failed(75), leaving=frozenset({"node3"})), Verdict(True, "host node3 was told to go")),
        (Ended(75, cut=True), Verdict(True, "the connection to the master was lost")),
        (Ended(137, failed(137)), Verdict(True, "rank 2 on node3 was killed by SIGKILL")),
        (Ended(143, failed(143)), Verdict(True, "rank 2 on node3 was killed by signal 15")),
        (Ended(75, failed(75)), Verdict(False, "rank 2 on node3 was interrupted")),
        (Ended(1, failed(1, LOST_PEER)), Verdict(True, "rank 2 on node3 lost another rank")),
        (Ended(1, failed(1, f"cpuft: error: {FOREIGN}: wait")), Verdict(True, "rank 2 on node3 lost another rank")),
        (Ended(2), Verdict(False, "its options or data were refused")),
        (Ended(74), Verdict(False, "a disk was full")),
        (Ended(74, failed(74)), Verdict(False, "rank 2 on node3 found a full disk")),
        (Ended(2, failed(2)), Verdict(False, "rank 2 on node3 refused its options or data")),
    ],
)
def test_what_was_lost_comes_again_and_what_was_refused_does_not(ended: Ended, verdict: Verdict) -> None:
    assert judge(ended, {""}) == verdict


@pytest.mark.parametrize(
    "first, again, why",
    [
        (Ended(1, failed(1, RAISED.format("7f01")), update=5), RAISED.format("7f02"), "node3 failed (exit code 1)"),
        (Ended(139, failed(139), update=5), "", "node3 failed (killed by signal 11)"),
        (Ended(75, failed(75, WAITED, 1), update=5, hosts=("a", "b")), WAITED, "rank 1 on b did not answer the others"),
        (Ended(255, update=5), "", "mpirun failed"),
    ],
)
def test_the_same_error_at_the_same_update_comes_once(first: Ended, again: str, why: str) -> None:
    verdict = judge(first, ())
    assert verdict.again
    failures = tuple(Failure(one.rank, one.host, one.code, again, one.missed) for one in first.failures)
    second = judge(Ended(first.code, failures, update=5, hosts=first.hosts), {verdict.mark})
    assert not second.again
    assert second.why.endswith(f"{why}, as it had before at update 5")
    assert judge(Ended(first.code, failures, update=6), {verdict.mark}).again


def test_out_of_memory_at_the_same_update_is_tried_once_more_only() -> None:
    """Killed by the kernel, or an allocation that failed."""
    python = 'Traceback (most recent call last):\n  File "train.py", line 5\nMemoryError\n'
    torch = "Traceback (most recent call last):\nRuntimeError: DefaultCPUAllocator: can't allocate memory\n"
    for code, text in ((137, f"{OUT_OF_MEMORY}\n"), (1, python), (1, torch)):
        first = judge(Ended(code, failed(code, text), update=5), ())
        assert (first.again, first.why) == (True, "rank 2 on node3 ran out of memory")
        second = judge(Ended(code, failed(code, text), update=5), {first.mark})
        assert (second.again, second.why) == (False, "rank 2 on node3 ran out of memory, as it had before at update 5")
        assert judge(Ended(code, failed(code, text), update=6), {first.mark}).again


def test_another_error_at_the_same_update_is_tried_again() -> None:
    verdict = judge(Ended(1, failed(1, RAISED)), ())
    assert judge(Ended(1, failed(1, RAISED.replace("ValueError", "KeyError"))), {verdict.mark}).again


@pytest.mark.parametrize("asked, hosts, count", [(-1, 1, 0), (-1, 2, 3), (0, 4, 0), (2, 1, 2)])
def test_on_several_hosts_it_is_tried_again_unless_asked_otherwise(asked: int, hosts: int, count: int) -> None:
    assert count_restarts(asked, hosts) == count


@pytest.mark.parametrize(
    "hosts, silent, before, np, left, ranks",
    [
        ("a b c d", "c", {"a": 1, "b": 1, "c": 1, "d": 1}, 4, "a b d", 3),
        ("a b c d", "a", {"a": 2, "b": 2, "c": 2, "d": 1}, 7, "b c d", 5),
        ("a b c", "a", {"a": 2, "b": 2}, 4, "b c", 4),
        ("a b=1 c", "c", {"a": 2, "c": 2}, 4, "a b=1", 3),
        ("a b c", "", {"a": 1, "b": 1, "c": 1}, 3, "a b c", 3),
        ("a b", "a b", {"a": 1, "b": 1}, 2, "", 0),
    ],
)
def test_hosts_that_answer_get_what_they_had_and_spares_take_the_place_of_the_lost(
    hosts: str, silent: str, before: dict[str, int], np: int, left: str, ranks: int
) -> None:
    def parse(text: str) -> tuple[Host, ...]:
        pairs = [word.partition("=") for word in text.split()]
        return tuple(Host(name, int(slots or 0)) for name, _, slots in pairs)

    assert choose_hosts(parse(hosts), silent.split(), before, np) == (parse(left), ranks)


@pytest.mark.parametrize(
    "hosts, ranks, update, end",
    [
        (["a", "b"], 4, 120, "4 ranks on a, b continue after update 120"),
        (["a"], 1, 120, "1 rank on a continues after update 120"),
        (["a", "b"], 2, 0, "2 ranks on a, b start from the beginning, because no checkpoint had been saved yet"),
        (["a"], 1, 0, "1 rank on a starts from the beginning, because no checkpoint had been saved yet"),
    ],
)
def test_the_line_that_a_user_sees(hosts: list[str], ranks: int, update: int, end: str) -> None:
    assert describe_restart(1, 3, "host c was lost", hosts, ranks, update) == f"restart 1 of 3: host c was lost; {end}"
