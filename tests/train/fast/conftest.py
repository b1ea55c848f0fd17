"""What tests of the fast path's pieces share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from cpuft.kernels import kernel_status, kernels_for, plain_torch
from cpuft.train.fast import int8_products, products


def need_kernels() -> None:
    """Fail where there are no kernels, such as on a machine without a C++ compiler, and say why there are none."""
    assert kernels_for(torch.empty(0)) is not None, kernel_status()


@pytest.fixture(params=["kernels", "torch"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with the kernels, and once with their plain torch twins."""
    if request.param == "kernels":
        need_kernels()
    with plain_torch() if request.param == "torch" else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Arm, products of the kernels also where torch is faster."""
    for module in (products, int8_products):
        monkeypatch.setattr(module, "time_in_turn", lambda own, other: [0.0, 1.0])
