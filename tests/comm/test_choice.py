"""From timings to a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.comm.choice import Choice, cache_key, choose_backend, read_choice, write_choice
from cpuft.errors import CpuftError

MIB = 2**20


@pytest.mark.parametrize(
    "gloo, mpi, ccl, chosen",
    (
        ((0.042,), (0.0047,), (0.0054,), "mpi"),
        ((0.079,), (0.101,), (0.196,), "gloo"),
        ((0.100,), (0.0985,), (0.099,), "gloo"),
        ((0.100,), (0.091,), (0.090,), "mpi"),
        ((0.100,), (0.050, 0.050, 9.0), (0.060,), "mpi"),
    ),
    ids=("fastest", "gloo may win", "a tie is gloo's", "a tie between the others", "one slow repetition"),
)
def test_the_fastest_median_wins(
    gloo: tuple[float, ...], mpi: tuple[float, ...], ccl: tuple[float, ...], chosen: str
) -> None:
    timings = {"gloo": {25 * MIB: gloo}, "mpi": {25 * MIB: mpi}, "ccl": {25 * MIB: ccl}}
    assert choose_backend(timings).backend == chosen


def test_the_size_nearest_to_the_message_counts() -> None:
    timings = {"gloo": {MIB: [9.0], 100 * MIB: [1.0]}, "mpi": {MIB: [1.0], 100 * MIB: [9.0]}}
    assert choose_backend(timings, 2 * MIB).backend == "mpi"
    assert choose_backend(timings, 110 * MIB).backend == "gloo"


def test_the_reason_is_one_line_with_all_figures() -> None:
    timings = {"mpi": {25 * MIB: [0.0047]}, "gloo": {25 * MIB: [0.042]}}
    assert choose_backend(timings).reason == ("all-reduce of 25 MiB takes gloo 42.00 ms, mpi 4.70 ms (median)")


def test_nothing_measured_says_what_to_do() -> None:
    with pytest.raises(CpuftError, match="--backend gloo"):
        choose_backend({})


def test_a_choice_is_remembered_for_its_hosts(tmp_path: Path) -> None:
    key = cache_key(["b", "a"], 2, {"torch": "2.13"})
    assert read_choice(tmp_path, key) is None
    write_choice(tmp_path, key, Choice("mpi", "why"))
    assert read_choice(tmp_path, cache_key(["a", "b"], 2, {"torch": "2.13"})) == Choice("mpi", "why")
    assert read_choice(tmp_path, cache_key(["a", "b"], 4, {"torch": "2.13"})) is None
    (tmp_path / f"backend-{key}.json").write_text("{")
    assert read_choice(tmp_path, key) is None
