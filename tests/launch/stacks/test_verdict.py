"""Whom the others wait for, told from operations, and from stacks where nothing else is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cpuft.launch.stack_dumps import GONE, SILENT, Frame, Sight, Wait, judge

WORLD, PAIR = "the world", "group 1"
TORCH = Frame("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")


def rank(
    number: int,
    operation: str = "",
    state: str = "S",
    line: int = 0,
    seconds: float = 30.0,
    reached: Mapping[str, tuple[int, str]] | None = None,
    ranks: tuple[int, ...] = (),
) -> Sight:
    """A rank that waits in "NAME N CHANNEL", or in nothing; it stands at train.py:LINE, in torch when that is 0."""
    name, sequence, channel = (*operation.split(" ", 2), "", "")[:3] if operation else ("", "0", "")
    waits = (Wait(channel, int(sequence), name, seconds, ranks),) if operation else ()
    progress = {channel: (int(sequence), name)} if operation else {}
    frames = (Frame("/home/me/train.py", line, "step"),) if line else (TORCH, Frame("/home/me/train.py", 7, "step"))
    return Sight(number, "node1", state, 100 + number, "", frames, waits, {**progress, **(reached or {})})


SUM = f"all_reduce 6 {WORLD}"
BEFORE = {WORLD: (5, "all_reduce")}
IN_SUM = f"(rank 0, 2 wait in all_reduce #6 of {WORLD})"


@pytest.mark.parametrize(
    "sights, culprits, words",
    [
        ([rank(0, SUM), rank(1, line=4, reached=BEFORE), rank(2, SUM)], (1,), f"{IN_SUM}: it stands at"),
        ([rank(0, SUM), rank(1, line=4, state="R", reached=BEFORE), rank(2, SUM)], (1,), "train.py:4 in step, running"),
        (
            [rank(0, SUM), rank(1, state="T", reached=BEFORE), rank(2, SUM)],
            (1,),
            f"{IN_SUM}: it is stopped (T), last at /home/me/train.py:7 in step, last in all_reduce #5 of {WORLD}; "
            "kill -CONT 101 there lets it go on",
        ),
        ([rank(0, SUM), rank(1, SUM, state="T"), rank(2, SUM)], (1,), "it is stopped (T)"),
        ([rank(0, SUM), Sight(1, "node2", GONE), rank(2, SUM)], (1,), "rank 1 on node2 holds up the others"),
        ([rank(0, SUM), Sight(1, "node2", SILENT), rank(2, SUM)], (1,), "its host does not answer"),
        ([rank(0, SUM), rank(1, f"barrier 6 {WORLD}"), rank(2, SUM)], (1,), f"it is in barrier #6 of {WORLD}, at "),
        # Rank 2 waits for rank 3 among the two of them, and keeps the others waiting without fault of its own.
        (
            [
                rank(0, SUM),
                rank(1, SUM),
                rank(2, f"broadcast 1 {PAIR}", ranks=(2, 3), reached=BEFORE),
                rank(3, line=4, reached=BEFORE),
            ],
            (3,),
            "rank 3 on node1 holds up the others (rank 0, 1, 2 wait in",
        ),
        # In the wrong order of two groups.
        (
            [
                rank(0, SUM, reached={PAIR: (2, "barrier")}),
                rank(1, SUM, reached={PAIR: (2, "barrier")}),
                rank(2, f"barrier 3 {PAIR}", ranks=(0, 1, 2), reached=BEFORE),
            ],
            (2,),
            f"it is in barrier #3 of {PAIR}, at ",
        ),
        ([rank(0, SUM), rank(1, f"barrier 6 {WORLD}")], (), "ranks wait for each other: rank 0 in all_reduce #6 of"),
        ([rank(0, SUM), rank(1, SUM)], (), f"all ranks have arrived at all_reduce #6 of {WORLD}, which does not end"),
        ([rank(0), rank(1, line=4), rank(2)], (1,), "rank 1 on node1 holds up the others (rank 0, 2 wait): it stands"),
        ([rank(0, line=4), rank(1, line=4), rank(2, line=9)], (2,), "train.py:9 in step"),
        ([rank(0), rank(1)], (), "the run goes on, or all do the same"),
        ([rank(0, line=4), rank(1, line=4)], (), "the run goes on, or all do the same"),
        ([rank(0, line=4)], (), "the run goes on, or all do the same"),
        ([Sight(0, "a", SILENT), Sight(1, "b", SILENT)], (0, 1), "rank 0 on a: its host does not answer; rank 1 on b"),
    ],
)
def test_who_holds_up_the_others(sights: list[Sight], culprits: tuple[int, ...], words: str) -> None:
    verdict = judge(sights)
    assert verdict.culprits == culprits
    assert words in verdict.text
    assert "\n" not in verdict.text


def test_of_a_group_whose_ranks_nobody_tells_only_those_are_blamed_that_know_it() -> None:
    group = f"all_reduce 6 {PAIR}"
    sights = [rank(0, group), rank(1, line=4, reached={PAIR: (5, "all_reduce")}), rank(2, line=5)]
    assert judge(sights).culprits == (1,)


def test_of_a_rank_that_keeps_the_gil_too_little_is_known_to_leave_it_out() -> None:
    stuck = replace(rank(1, state="R", line=4), holds_gil=True)
    assert judge([rank(0, f"all_reduce 6 {PAIR}"), stuck]).culprits == (1,)


def test_in_a_run_that_goes_on_nobody_is_blamed_by_operations() -> None:
    """Operations that have just begun say nothing, but at a deadline they all count."""
    sights = [rank(0, SUM, seconds=0.5), rank(1, line=4, reached=BEFORE), rank(2, SUM, seconds=0.5)]
    assert judge(sights).text == "no rank has waited for long in an operation: the run goes on"
    assert judge(sights, 0.0).culprits == (1,)


def test_many_culprits_are_counted() -> None:
    sights = [rank(0, SUM), *(rank(number, line=4, reached=BEFORE) for number in range(1, 8))]
    verdict = judge(sights)
    assert verdict.culprits == tuple(range(1, 8))
    assert verdict.text.endswith("; and 4 more")
