"""Repetitions of a collective, and its names."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cpuft.comm.collective_timing import count_repetitions, limit_repetitions, measure_collective
from cpuft.train.joint import exchange_examples


@pytest.mark.parametrize("nbytes, times", ((1, 50), (25 * 2**20, 20), (2**30, 5)))
def test_large_messages_are_repeated_less_often(nbytes: int, times: int) -> None:
    assert count_repetitions(nbytes) == times


@pytest.mark.parametrize(
    "wanted, seconds, times", ((50, 0.0, 50), (50, 0.01, 50), (50, 0.126, 23), (50, 2.5, 5), (3, 2.5, 3))
)
def test_operations_over_a_slow_link_are_repeated_less_often(wanted: int, seconds: float, times: int) -> None:
    assert limit_repetitions(wanted, seconds) == times


def test_own_calls_of_collectives_have_the_names_that_torch_does_not_warn_about(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            for operation in ("all_gather", "reduce_scatter"):
                assert measure_collective("gloo", operation, "float32", 64, 5).seconds
            assert exchange_examples(torch.ones(1, 2), [1], 0).tolist() == [[1, 1]]
    finally:
        dist.destroy_process_group()
