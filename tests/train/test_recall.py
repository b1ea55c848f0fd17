"""What a run's first start has measured is taken over where it still holds."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch

from cpuft.comm.selection import Choice
from cpuft.config import TrainConfig
from cpuft.rank.measured import EarlierMeasurements, describe_products, read_measurements
from cpuft.rank.world import World
from cpuft.train.exchange.compression import choose_compression
from cpuft.train.objective.table import make_objective
from cpuft.train.recall import find_products, recall, recall_backend
from tests.records import make_record
from tests.train.exchange.test_compression import PREPARED

PRODUCTS = {"kernel": "brg_matmul:avx512_core_amx", "teraflops": 9.0, "fp32_teraflops": 1.0}
AUTO = {"backend": "auto", "grad_compression": "auto"}
HEADER = make_record(4, 4, backend="mpi", gradients="int8", products=PRODUCTS, options=AUTO).header


def test_it_comes_through_json_whole() -> None:
    measured = read_measurements(HEADER)
    assert measured == EarlierMeasurements(4, "mpi", "int8", PRODUCTS, describe_products(HEADER))
    assert recall(json.dumps(asdict(measured)), 4) == measured
    assert recall("", 3) == EarlierMeasurements(3)


@pytest.mark.parametrize(
    "ranks, choice",
    [
        (4, Choice("mpi", "as measured when the run began")),
        (3, Choice("mpi", "as measured when the run began, on 4 ranks")),
    ],
)
def test_the_backend_stays_and_other_ranks_are_told_of_it(ranks: int, choice: Choice) -> None:
    assert recall_backend(read_measurements(HEADER), ranks) == choice


@pytest.mark.parametrize("change", [{"options": {"backend": "mpi"}}, {"world_size": 1}, {"options": {}}])
def test_a_backend_that_was_asked_for_or_had_no_rivals_was_not_measured(change: dict[str, Any]) -> None:
    assert recall_backend(read_measurements(replace(HEADER, **change)), 4) is None


def test_products_stay_on_such_a_cpu_and_are_measured_on_another() -> None:
    assert find_products(HEADER, read_measurements(HEADER)) == PRODUCTS
    for other in (
        replace(HEADER, cpu_model="another"),
        replace(HEADER, cpu_flags=["avx2"]),
        replace(HEADER, precision="fp32"),
        replace(HEADER, versions={"torch": "2.14"}),
    ):
        assert describe_products(other) != describe_products(HEADER)
    found = find_products(replace(HEADER, precision="fp32"), read_measurements(HEADER))
    assert found != PRODUCTS
    assert found["teraflops"] > 0


@pytest.mark.parametrize(
    "asked, on_a_host, found",
    [("auto", 1, ("int8", "as when the run began")), ("auto", 2, ("", "")), ("bf16", 1, ("", ""))],
)
def test_what_gradients_are_sent_as_stays_where_it_is_a_question(
    asked: str, on_a_host: int, found: tuple[str, str]
) -> None:
    """Nothing is measured: there is no process group here."""
    config, world = TrainConfig(grad_compression=asked), World(0, 2, 0, on_a_host)
    objective = make_objective(config, PREPARED)
    assert choose_compression(config, "fp32", torch.nn.Linear(2, 2), objective, PREPARED, world, "int8") == found


def test_what_cannot_be_shared_out_is_not_gone_on_with() -> None:
    config, world = TrainConfig(shard="optimizer"), World(0, 2, 0, 1)
    objective = make_objective(config, PREPARED)
    settled = partial(choose_compression, config, "fp32", torch.nn.Linear(2, 2), objective, PREPARED, world)
    assert settled("bf16") == ("bf16", "as when the run began")
    # To measure anew it would have to have other ranks.
    with pytest.raises(ValueError, match="process group"):
        settled("int8")
