"""Faults are drawn alike by the same seed, and blame is read as a user reads it."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.benchmarks.check_faults import (
    KINDS,
    PROCESSES,
    RANKS,
    STAGES,
    TWO,
    WITH_RANKS,
    Target,
    draw_faults,
    was_named,
)

WORKER, RANK = Target("b", others=("a", "c")), Target("b", 1, ("a", "b", "c"))


def test_every_kind_comes_as_often_and_hits_who_is_there() -> None:
    drawn = draw_faults(5 * len(STAGES), 7, 4, 30)
    assert set(Counter(fault.stage for fault in drawn).values()) == {5}
    assert {fault.kind for fault in draw_faults(len(KINDS) * len(STAGES), 7, 4, 30)} == {*KINDS}
    assert all(fault.stage in WITH_RANKS for fault in drawn if fault.kind in (*RANKS, *PROCESSES))
    assert all(len({1, *fault.numbers}) == 2 for fault in drawn if fault.kind in TWO)
    assert all(fault.number in range(1, 4) for fault in drawn if "worker" in fault.kind)
    assert {fault.number for fault in drawn if "master" in fault.kind} == {0}
    assert draw_faults(5, 7, 4, 30) == drawn[:5]


@pytest.mark.parametrize(
    "target, line, named",
    [
        (WORKER, "cpuft: host b does not answer, so rank 1 was lost: check the host with cpuft doctor", True),
        (WORKER, "cpuft: host c does not answer, so rank 2 was lost: check the host with cpuft doctor", False),
        (WORKER, "cpuft: error: fetch the run from b: failed (Connection refused)", True),
        (RANK, "cpuft: rank 1 on b failed (killed by signal 9). Last lines of rank 0:", True),
        (
            RANK,
            "cpuft: rank 1 on b did not answer the other ranks: log in to b and check whether its process is stopped",
            True,
        ),
        (RANK, "cpuft: rank 0 on a failed (killed by signal 9). Last lines of rank 0:", False),
        (Target(others=("a",)), "cpuft: mpirun failed, and no rank reported an error. Last lines of mpirun:", True),
        (Target(others=("a",)), "cpuft: host a does not answer, so rank 0 was lost", False),
        (Target(others=("a",)), "step 3/30", False),
    ],
)
def test_who_was_named(target: Target, line: str, named: bool) -> None:
    assert was_named(target, ["step 1/30", line]) is named
