"""What is made of the texts that a host's looking brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuft.cli.stacks import format_sights
from cpuft.launch.stack_dumps import (
    GONE,
    SILENT,
    Frame,
    Sight,
    Wait,
    describe_state,
    fill_gaps,
    format_sight,
    parse_dump,
    parse_sight,
)
from tests.conftest import Golden

DUMP = """Thread 0x00007f8f66ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/env/lib/python3.11/site-packages/cpuft/comm/watch/deadlines.py", line 78 in _run

Current thread 0x00007f23b7f3ab80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/a user/train.py", line 39 in hang "it"
  File "<frozen runpy>", line 88 in _run_code

Thread 0x00007f8f76be96c0 (most recent call first):
  File "/home/a user/loader.py", line 4 in run
"""


def found(**more: object) -> dict[str, object]:
    report = {
        "pending": [
            {"channel": "the world", "sequence": 7, "name": "all_reduce", "seconds": 1.0, "ranks": [0, 1]},
            {"channel": "group 1", "sequence": 2, "name": "barrier", "seconds": 4.5, "ranks": [0, 1]},
        ],
        "progress": {"the world from 1": [9, "recv"], "the world": [7, "all_reduce"], "group 1": [2, "barrier"]},
        "raised": [],
        "main": [["/home/me/train.py", 3, "load"]],
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
def test_the_main_thread_got_the_signal_or_is_the_last(text: str, innermost: int) -> None:
    assert [frame.line for frame in parse_dump(text)[:1]] == ([innermost] if innermost else [])


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
        (["/src/cpuft/comm/group/queues.py", "/src/cpuft/train/loop.py"], "/src/cpuft/train/loop.py:2"),
        (["<string>", "/var/tmp/cpuft-0/inputs/0123abcd/train.py", "/src/cpuft/words.py"], "train.py:2"),
        (["<frozen importlib>", "/x/lib/python3.11/site-packages/torch/a.py"], "<frozen importlib>:1"),
        ([str(Path.cwd() / "train.py")], str(Path.cwd() / "train.py") + ":1"),
        ([], ""),
    ],
)
def test_a_rank_stands_on_a_line_of_the_users_or_of_our_training(files: list[str], place: str) -> None:
    frames = tuple(Frame(file, line, "f") for line, file in enumerate(files, 1))
    assert Sight(0, "node1", "R", frames=frames).place == (f"{place} in f" if place else "")


def test_a_path_below_the_working_folder_is_short(tmp_path: Path) -> None:
    """Tests run in a folder of their own."""
    assert Sight(0, "node1", "R", frames=(Frame(f"{tmp_path}/a/train.py", 3, "f"),)).place == "a/train.py:3 in f"


def test_a_sight_has_the_longest_wait_first() -> None:
    sight = parse_sight(found(), "node1")
    assert [wait.text for wait in sight.waits] == ["barrier #2 of group 1", "all_reduce #7 of the world"]
    assert sight.is_in_collective
    assert sight.last == "all_reduce #7 of the world, barrier #2 of group 1"


def test_a_rank_that_was_thrown_out_of_an_operation_had_waited_in_it() -> None:
    report = {"pending": [], "progress": {"the world": [3, "all_reduce"]}, "raised": [["/a.py", 5, "step"]]}
    sight = parse_sight(found(report=json.dumps(report)), "node1")
    assert sight.waits == (Wait("the world", 3, "all_reduce", 0.0),)
    assert sight.place == "/a.py:5 in step"


def test_of_a_rank_whose_threads_get_no_turn_old_waits_count_for_nothing() -> None:
    stuck = parse_sight(found(state="R", age=9.0), "node1")
    assert (stuck.holds_gil, stuck.waits) == (True, ())
    assert describe_state(stuck) == "running in C code that keeps the GIL"
    assert not parse_sight(found(state="R", age=1.0), "node1").holds_gil
    assert len(parse_sight(found(state="S", age=9.0), "node1").waits) == 2


def test_a_stopped_rank_stands_where_it_was_last() -> None:
    assert parse_sight(found(state="T", stack=""), "node1").place == "/home/me/train.py:3 in load"


@pytest.mark.parametrize("report", ["", '{"pending": [{"cha', "{}"])
def test_half_a_report_is_none(report: str) -> None:
    sight = parse_sight(found(report=report), "node1")
    assert (sight.waits, sight.last) == ((), "")


SEEN = (
    parse_sight(found(), "node1"),
    Sight(2, "node2", "T", 14, progress={"the world": (6, "all_reduce")}),
)


def test_a_file_and_a_table_of_sights(golden: Golden) -> None:
    all_ranks = fill_gaps(SEEN, ("node1", "node1", "node2", "node3"), ["node3"])
    assert [sight.state for sight in all_ranks] == ["S", GONE, "T", SILENT]
    texts = [format_sights(all_ranks), *(format_sight(sight) for sight in all_ranks)]
    golden("stacks.txt", "\n".join(texts))
