"""The drawings of hosts and their cores."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cpuft.record import RecordedRank
from cpuft.report.host_drawings import MOST_HOSTS, draw_hosts
from cpuft.report.page import write_page
from tests.report.page import make_equal_cores, make_runs


def test_hosts_are_drawn_with_their_cores_by_rank() -> None:
    one, two = make_equal_cores(1.9)
    (alone,), (both,) = draw_hosts([one, two])
    assert (alone.ranks, both.ranks) == ("1 rank, 8 of 16 cores", "2 ranks, 16 cores")
    assert re.findall(r"fill: var\((.*?)\)\"><title>(.*?)<", alone.svg) == [
        ("--line", "idle"),
        ("--c0", "rank 0, CPU 0, 1, 2, 3, 4, 5, 6, 7"),
    ]
    assert re.findall(r'd="(.*?)" style="fill: var\((--c\d)', both.svg)[1][0].count("M") == 8
    # A shared core is divided among its ranks.
    shared = dataclasses.replace(one.header, ranks=[RecordedRank(rank, "node1", [5]) for rank in (0, 1)])
    ((drawn,),) = draw_hosts([dataclasses.replace(one, header=shared)])
    assert re.findall(r'd="(.*?)"', drawn.svg) == ["M0 0h9v18h-9z", "M9 0h9v18h-9z"]
    unpinned = dataclasses.replace(one.header, ranks=[RecordedRank(0, "node1", [])])
    assert draw_hosts([dataclasses.replace(one, header=unpinned)])[0][0].svg == ""


def test_of_many_hosts_the_first_are_drawn(tmp_path: Path) -> None:
    (run,) = make_runs((MOST_HOSTS + 3,), ideal=False)
    assert [len(drawn) for drawn in draw_hosts([run])] == [MOST_HOSTS]
    assert "<figcaption>and 3 more</figcaption>" in write_page([run], tmp_path / "a.html").read_text(encoding="utf-8")
