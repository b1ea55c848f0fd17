"""What is made of the stack dumps that hosts send, and which rank is named as the one that blocks the others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.cli.stacks import format_dumps
from cpuft.execute import Answer
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import SshTransport
from cpuft.launch.stack_dumps import (
    GONE,
    UNREACHABLE,
    Frame,
    PendingOperation,
    RankDump,
    complete_dumps,
    describe_state,
    diagnose,
    diagnose_run,
    format_rank_dump,
    parse_rank_dump,
    parse_stack,
)
from tests.conftest import Golden

DUMP = """Thread 0x00007f8f66ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/env/lib/python3.11/site-packages/cpuft/comm/watchdog.py", line 78 in _run

Current thread 0x00007f23b7f3ab80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/a user/train.py", line 39 in hang "it"
  File "<frozen runpy>", line 88 in _run_code

Thread 0x00007f8f76be96c0 (most recent call first):
  File "/home/a user/loader.py", line 4 in run
"""


def name_culprits(verdict: str) -> tuple[int, ...]:
    """Return the ranks that `diagnose` blames in this text."""
    return tuple(map(int, re.findall(r"(?:^|; )rank (\d+) on \S+?(?: blocks the others \(.*?\))?: ", verdict)))


LOADING = {"file": "/a.py", "line": 5, "function": "load"}


def found(**more: object) -> dict[str, object]:
    report = {
        "pending": [
            {"channel": "the world", "sequence": 7, "name": "all_reduce", "seconds": 1.0, "ranks": [0, 1]},
            {"channel": "group 1", "sequence": 2, "name": "barrier", "seconds": 4.5, "ranks": [0, 1]},
        ],
        "progress": {"the world from 1": [9, "recv"], "the world": [7, "all_reduce"], "group 1": [2, "barrier"]},
        "raised": [],
        "main": [LOADING | {"file": "/home/me/train.py", "line": 3}],
    }
    plain = {"rank": 0, "pid": 12, "state": "S", "wchan": "futex_do_wait", "stack": DUMP, "age": 0.3}
    return plain | {"report": json.dumps(report)} | more


@pytest.mark.parametrize(
    "text, innermost",
    [
        (DUMP, 5356),
        (DUMP.replace("Current thread", "Thread"), 4),
        ("Stack (most recent call first):\n" + DUMP.splitlines()[6], 39),
        ("", 0),
    ],
)
def test_the_main_thread_is_the_one_with_the_signal_or_the_last(text: str, innermost: int) -> None:
    assert [frame.line for frame in parse_stack(text)[:1]] == ([innermost] if innermost else [])


@pytest.mark.parametrize(
    "files, place",
    [
        (
            ["/x/lib/python3.11/site-packages/torch/a.py", "/home/me/train.py", "/home/me/main.py"],
            "/home/me/train.py:2",
        ),
        (
            ["/x/lib/python3.11/threading.py", "/x/site-packages/cpuft/train/loop.py"],
            "/x/site-packages/cpuft/train/loop.py:2",
        ),
        (["/src/cpuft/comm/process_group.py", "/src/cpuft/train/loop.py"], "/src/cpuft/train/loop.py:2"),
        (["<string>", "/var/tmp/cpuft-0/inputs/0123abcd/train.py", "/src/cpuft/argv.py"], "train.py:2"),
        (["<frozen importlib>", "/x/lib/python3.11/site-packages/torch/a.py"], "<frozen importlib>:1"),
        ([str(Path.cwd() / "train.py")], str(Path.cwd() / "train.py") + ":1"),
        ([], ""),
    ],
)
def test_the_location_of_a_rank_is_in_the_users_code_or_our_training(files: list[str], place: str) -> None:
    frames = tuple(Frame(file, line, "f") for line, file in enumerate(files, 1))
    assert RankDump(0, "node1", "R", frames=frames).location == (f"{place} in f" if place else "")


def test_a_path_below_the_working_directory_is_relative(tmp_path: Path) -> None:
    """Tests run in their own working directory."""
    assert RankDump(0, "node1", "R", frames=(Frame(f"{tmp_path}/a/train.py", 3, "f"),)).location == "a/train.py:3 in f"


def test_the_longest_pending_operation_comes_first() -> None:
    dump = parse_rank_dump(found(), "node1")
    assert [one.text for one in dump.pending] == ["barrier #2 of group 1", "all_reduce #7 of the world"]
    assert dump.is_in_collective
    assert dump.last_operations == "all_reduce #7 of the world, barrier #2 of group 1"


def test_an_operation_ended_by_a_timeout_counts_as_pending() -> None:
    report: dict[str, object] = {"pending": [], "progress": {"the world": [3, "all_reduce"]}}
    report["raised"] = [LOADING | {"function": "step"}]
    report["failed"] = [{"channel": "the world", "sequence": 3, "name": "all_reduce", "seconds": 0.0}]
    dump = parse_rank_dump(found(report=json.dumps(report)), "node1")
    assert dump.pending == (PendingOperation("the world", 3, "all_reduce", 0.0),)
    assert dump.location == "/a.py:5 in step"


def test_a_finished_operation_of_a_rank_that_raised_an_error_does_not_count_as_pending() -> None:
    progress = {"the world from nothing": [1, "connect"], "the world": [3, "all_reduce"]}
    dumps = [
        parse_rank_dump(
            found(
                rank=rank,
                report=json.dumps({"pending": [], "progress": progress, "raised": [LOADING][rank:]}),
            ),
            f"node{rank + 1}",
        )
        for rank in (0, 1)
    ]
    assert dumps[0].pending == ()
    why = "no rank waits for another one, and the script ended with an error: rank 0 on node1 at /a.py:5 in load"
    assert diagnose(dumps, 0.0) == why
    assert name_culprits(why) == ()
    waiting = replace(dumps[1], pending=(PendingOperation("the world", 4, "barrier", 9.0, (0, 1)),))
    ended = replace(dumps[0], frames=(Frame("/x/threading.py", 3, "wait"), Frame("/x/script.py", 9, "end_process")))
    assert diagnose([ended, waiting]).endswith("(rank 1 waits in barrier #4 of the world): its script has ended")
    assert diagnose([dumps[0], waiting], 0.0) == (
        "rank 0 on node1 blocks the others (rank 1 waits in barrier #4 of the world): an error ended its script at "
        "/a.py:5 in load"
    )


def test_pending_operations_of_a_rank_that_holds_the_gil_are_ignored() -> None:
    stuck = parse_rank_dump(found(state="R", age=9.0), "node1")
    assert (stuck.holds_gil, stuck.pending) == (True, ())
    assert describe_state(stuck) == "running in C code that keeps the GIL"
    assert not parse_rank_dump(found(state="R", age=1.0), "node1").holds_gil
    assert len(parse_rank_dump(found(state="S", age=9.0), "node1").pending) == 2


def test_the_location_of_a_stopped_rank_comes_from_its_last_report() -> None:
    assert parse_rank_dump(found(state="T", stack=""), "node1").location == "/home/me/train.py:3 in load"


@pytest.mark.parametrize("report", ["", '{"pending": [{"cha', "{}"])
def test_an_incomplete_report_is_ignored(report: str) -> None:
    dump = parse_rank_dump(found(report=report), "node1")
    assert (dump.pending, dump.last_operations) == ((), "")


SEEN = (
    parse_rank_dump(found(), "node1"),
    RankDump(2, "node2", "T", 14, progress={"the world": (6, "all_reduce")}),
)


def test_the_file_and_the_table_of_stack_dumps(golden: Golden) -> None:
    all_ranks = complete_dumps(SEEN, ("node1", "node1", "node2", "node3"), ["node3"])
    assert [dump.state for dump in all_ranks] == ["S", GONE, "T", UNREACHABLE]
    texts = [format_dumps(all_ranks), *(format_rank_dump(dump) for dump in all_ranks)]
    golden("stacks.txt", "\n".join(texts))


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
) -> RankDump:
    """A rank that waits in "NAME N CHANNEL", or in nothing; it is at train.py:LINE, in torch when that is 0."""
    name, sequence, channel = (*operation.split(" ", 2), "", "")[:3] if operation else ("", "0", "")
    waits = (PendingOperation(channel, int(sequence), name, seconds, ranks),) if operation else ()
    progress = {channel: (int(sequence), name)} if operation else {}
    frames = (Frame("/home/me/train.py", line, "step"),) if line else (TORCH, Frame("/home/me/train.py", 7, "step"))
    return RankDump(number, "node1", state, 100 + number, "", frames, waits, {**progress, **(reached or {})})


SUM = f"all_reduce 6 {WORLD}"
BEFORE = {WORLD: (5, "all_reduce")}
IN_SUM = f"(ranks 0, 2 wait in all_reduce #6 of {WORLD})"


@pytest.mark.parametrize(
    "dumps, culprits, words",
    [
        ([rank(0, SUM), rank(1, line=4, reached=BEFORE), rank(2, SUM)], (1,), f"{IN_SUM}: it is at"),
        ([rank(0, SUM), rank(1, line=4, state="R", reached=BEFORE), rank(2, SUM)], (1,), "train.py:4 in step, running"),
        (
            [rank(0, SUM), rank(1, state="T", reached=BEFORE), rank(2, SUM)],
            (1,),
            f"{IN_SUM}: it is stopped (T), last at /home/me/train.py:7 in step, last in all_reduce #5 of {WORLD}; "
            "let it continue with kill -CONT 101 on its host",
        ),
        ([rank(0, SUM), rank(1, SUM, state="T"), rank(2, SUM)], (1,), "it is stopped (T)"),
        ([rank(0, SUM), RankDump(1, "node2", GONE), rank(2, SUM)], (1,), "rank 1 on node2 blocks the others"),
        ([rank(0, SUM), RankDump(1, "node2", UNREACHABLE), rank(2, SUM)], (1,), "its host does not answer"),
        ([rank(0, SUM), rank(1, f"barrier 6 {WORLD}"), rank(2, SUM)], (1,), f"it is in barrier #6 of {WORLD}, at "),
        # Rank 2 waits for rank 3 in a group of two, so that the others wait for both; rank 3 is the cause.
        (
            [
                rank(0, SUM),
                rank(1, SUM),
                rank(2, f"broadcast 1 {PAIR}", ranks=(2, 3), reached=BEFORE),
                rank(3, line=4, reached=BEFORE),
            ],
            (3,),
            "rank 3 on node1 blocks the others (ranks 0, 1, 2 wait in",
        ),
        # Rank 2 uses two groups in another order than the others.
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
        ([rank(0, SUM), rank(1, SUM)], (), f"all ranks have started all_reduce #6 of {WORLD}, which does not finish"),
        ([rank(0), rank(1, line=4), rank(2)], (1,), "rank 1 on node1 blocks the others (ranks 0, 2 wait): it is"),
        ([rank(0, line=4), rank(1, line=4), rank(2, line=9)], (2,), "train.py:9 in step"),
        ([rank(0), rank(1)], (), "the run makes progress, or all are at the same line"),
        ([rank(0, line=4), rank(1, line=4)], (), "the run makes progress, or all are at the same line"),
        ([rank(0, line=4)], (), "the run makes progress, or all are at the same line"),
        (
            [RankDump(0, "a", UNREACHABLE), RankDump(1, "b", UNREACHABLE)],
            (0, 1),
            "rank 0 on a: its host does not answer; rank 1 on b",
        ),
    ],
)
def test_which_rank_the_others_wait_for(dumps: list[RankDump], culprits: tuple[int, ...], words: str) -> None:
    verdict = diagnose(dumps)
    assert name_culprits(verdict) == culprits
    assert words in verdict
    assert "\n" not in verdict


def test_in_a_group_of_unknown_members_only_ranks_that_used_it_are_blamed() -> None:
    group = f"all_reduce 6 {PAIR}"
    dumps = [rank(0, group), rank(1, line=4, reached={PAIR: (5, "all_reduce")}), rank(2, line=5)]
    assert name_culprits(diagnose(dumps)) == (1,)


def test_a_rank_that_holds_the_gil_may_be_in_any_group() -> None:
    stuck = replace(rank(1, state="R", line=4), holds_gil=True)
    assert name_culprits(diagnose([rank(0, f"all_reduce 6 {PAIR}"), stuck])) == (1,)


def test_short_operations_blame_no_rank() -> None:
    """Operations that have just begun are ignored, but at a timeout all of them count."""
    dumps = [rank(0, SUM, seconds=0.5), rank(1, line=4, reached=BEFORE), rank(2, SUM, seconds=0.5)]
    assert diagnose(dumps) == "no rank has waited long in an operation: the run is probably making progress"
    assert name_culprits(diagnose(dumps, 0.0)) == (1,)


def test_many_blamed_ranks_are_counted() -> None:
    dumps = [rank(0, SUM), *(rank(number, line=4, reached=BEFORE) for number in range(1, 8))]
    verdict = diagnose(dumps)
    assert name_culprits(verdict) == (1, 2, 3)
    assert verdict.endswith("; and 4 more")


def test_a_host_that_is_frozen_is_not_logged_in_to(tmp_path: Path) -> None:
    asked = list[str]()

    class Frozen(SshTransport):
        def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
            return {"b"}

        def is_here(self, host: Host) -> bool:
            return host.name == "a"

        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
            asked.append(host.name)
            return Answer(0, json.dumps([found()]), "")

    diagnosis, lost = diagnose_run(str(tmp_path), ("a", "b", "a"), Frozen(), print)
    assert (asked, lost) == (["a", "a"], {"b"})  # for its stacks, and to store them
    assert "rank 1 on b" in diagnosis


def test_a_hang_is_explained_also_if_the_stacks_cannot_be_stored(tmp_path: Path) -> None:
    class Full(SshTransport):
        def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
            return set()

        def is_here(self, host: Host) -> bool:
            return True

        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
            storing = "rank-0.stack" in stdin
            return Answer(1, "", "No space left on device") if storing else Answer(0, json.dumps([found()]), "")

    said = list[str]()
    diagnosis, lost = diagnose_run(str(tmp_path), ("a", "a"), Full(), said.append)
    assert said == ["host a could not store the stacks (No space left on device): check its disk"]
    assert "rank 1 on a" in diagnosis
    assert not lost
