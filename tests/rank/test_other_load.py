"""How much of a rank's cores other programs take."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from cpuft.rank.other_load import OtherLoad, count_busy_ticks

STAT = """cpu  100 0 10 800 20 0 0 5 0 0
cpu0 60 1 5 400 10 2 3 4 60 0
cpu1 40 0 5 400 10 0 0 1 0 0
cpu10 7 0 0 1 1 0 0 0 0 0
intr 5
"""


def test_idle_time_and_other_threads_do_not_count() -> None:
    assert count_busy_ticks(STAT.splitlines(), {"cpu0"}) == 60 + 1 + 5 + 2 + 3 + 4
    assert count_busy_ticks(STAT.splitlines(), {"cpu0", "cpu1", "cpu10"}) == 75 + 46 + 7
    assert count_busy_ticks([], {"cpu0"}) == 0


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.real
def test_another_process_on_the_same_core_is_seen_and_the_own_work_is_not() -> None:
    cpu, before = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        load = OtherLoad([cpu])
        other = multiprocessing.get_context("fork").Process(target=spin, args=(1.5,))
        other.start()
        spin(1.5)
        other.join()
        shared = load.measure_share()
        assert shared > 0.3
        assert OtherLoad([cpu]).measure_share() == 0.0  # too short
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.proof
def test_an_idle_core_has_no_other_load() -> None:
    cpu, before = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        load = OtherLoad([cpu])
        spin(1.5)
        assert load.measure_share() < 0.3
    finally:
        os.sched_setaffinity(0, before)
