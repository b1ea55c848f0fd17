"""The plan and the table of `cpuft bench comm`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpuft.comm.bench import format_table, merge_rounds
from cpuft.config.bench import BenchConfig, list_bench_cases
from cpuft.errors import CpuftError
from cpuft.record import Measurement, bus_factor


def _measured(backend: str, *milliseconds: float) -> Measurement:
    seconds = tuple(one / 1e3 for one in milliseconds)
    return Measurement(backend, "all_reduce", "float32", 2**20, 2, seconds, (0.5,) * len(seconds))


def test_rounds_take_turns() -> None:
    plan = list_bench_cases(BenchConfig(backends="gloo,auto", sizes="8,16", dtypes="float32", rounds=2))
    one_round = [(backend, "all_reduce", "float32", size) for backend in ("gloo", "auto") for size in (8, 16)]
    assert plan == one_round * 2


def test_all_rounds_become_one_row_with_the_ratio_to_gloo() -> None:
    rows = [_measured("gloo", 9, 10, 11), _measured("auto:ccl", 2, 3), _measured("gloo", 10), _measured("auto:ccl", 2)]
    assert [one.seconds for one in merge_rounds(rows)] == [(0.009, 0.01, 0.011, 0.01), (0.002, 0.003, 0.002)]
    fastest, slowest = format_table(rows).splitlines()[-2:]
    assert fastest.split()[2:5] == ["auto:ccl", "1048576", "2.000"]
    assert fastest.split()[-1] == "5.00"
    assert slowest.split()[2:5] == ["gloo", "1048576", "10.000"]
    assert slowest.split()[-1] == "1.00"


def test_without_gloo_there_is_no_ratio() -> None:
    assert format_table([_measured("mpi", 1, 1)]).splitlines()[-1].split()[-1] == "1.049"


@pytest.mark.parametrize(
    "options, complaint",
    (
        ({"backends": "glo"}, "gloo"),
        ({"sizes": "1M"}, "list of bytes"),
        ({"sizes": "9" * 5000}, "list of bytes"),
        ({"dtypes": "bf16"}, "bfloat16"),
    ),
)
def test_an_unknown_name_or_size_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CpuftError, match=complaint):
        list_bench_cases(replace(BenchConfig(), **options))


@pytest.mark.parametrize(
    "operation, ranks, factor",
    (("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("broadcast", 4, 1.0)),
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == factor
