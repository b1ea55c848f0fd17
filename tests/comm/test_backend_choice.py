"""The choice of a backend from measurements, and its cache."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from cpuft.comm import backend_choice
from cpuft.comm.backend_choice import (
    Choice,
    cache_key,
    choose_backend,
    read_choice,
    select_backend,
    write_choice,
)
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
    ids=("fastest", "gloo wins", "gloo wins a tie", "a tie between the others", "one slow repetition"),
)
def test_the_fastest_median_wins(
    gloo: tuple[float, ...], mpi: tuple[float, ...], ccl: tuple[float, ...], chosen: str
) -> None:
    timings = {name: [(one, 0.5) for one in found] for name, found in {"gloo": gloo, "mpi": mpi, "ccl": ccl}.items()}
    assert choose_backend(timings, 25 * MIB).backend == chosen


def test_cpu_time_taken_from_computing_counts() -> None:
    # At 1 Gbit/s all take the same time. Spinning costs much on a rank's only core, and little on one of 28.
    timings = {"mpi": [(0.198, 1.0)], "gloo": [(0.200, 0.13)], "ccl": [(0.199, 0.33)]}
    assert choose_backend(timings, MIB).backend == "gloo"
    assert choose_backend(timings | {"mpi": [(0.198, 1 / 28)]}, MIB).backend == "mpi"


def test_the_reason_is_one_line_with_all_figures() -> None:
    timings = {"mpi": [(0.0047, 1.0)], "gloo": [(0.042, 0.87)]}
    assert choose_backend(timings, 25 * MIB).reason == (
        "all-reduce of 25 MiB takes gloo 42.00 ms (87% busy), mpi 4.70 ms (100% busy)"
    )


def test_without_measurements_the_error_says_what_to_do() -> None:
    with pytest.raises(CpuftError, match="--backend gloo"):
        choose_backend({}, MIB)


def test_a_choice_is_cached_for_its_hosts(tmp_path: Path) -> None:
    key = cache_key(["b", "a"], 2, {"torch": "2.13"})
    assert read_choice(tmp_path, key) is None
    write_choice(tmp_path, key, Choice("mpi", "why"))
    assert read_choice(tmp_path, cache_key(["a", "b"], 2, {"torch": "2.13"})) == Choice("mpi", "why")
    assert read_choice(tmp_path, cache_key(["a", "b"], 4, {"torch": "2.13"})) is None
    (tmp_path / f"backend-{key}.json").write_text("{")
    assert read_choice(tmp_path, key) is None


def test_a_choice_is_measured_anew_over_another_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[str]()

    def measure(*_: object, **_options: object) -> Choice:
        measured.append(os.environ["GLOO_SOCKET_IFNAME"])
        return Choice("gloo", "why")

    monkeypatch.setattr(backend_choice, "measure_backends", measure)
    for interface in ("eth0", "ib0", "eth0"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert select_backend(HashStore(), 0, 1, tmp_path).backend == "gloo"
    assert measured == ["eth0", "ib0"]


@pytest.mark.parametrize(
    "of_rank_1, choices, is_told",
    [("no libccl", {}, True), ("", None, True), ("no libccl", None, False)],
    ids=["wanted", "on-one-rank", "not-installed"],
)
def test_a_backend_that_cannot_be_used_is_told_of_once(
    of_rank_1: str,
    choices: dict[tuple[str, int], backend_choice.Choice] | None,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = HashStore()
    store.set("turn 0/has/1", of_rank_1)
    monkeypatch.setattr(backend_choice, "BACKENDS", {"ccl": SimpleNamespace(find_problem=lambda: "no libccl")})
    plan = [("ccl", "all_reduce", "float32", 8)] * 3
    assert list(backend_choice.measure_turns(store, 0, 2, plan, 1.0, choices)) == []
    assert capsys.readouterr().err == "cpuft comm: leaving out ccl: rank 0: no libccl\n" * is_told
