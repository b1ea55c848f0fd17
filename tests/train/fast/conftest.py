"""What tests of the fast path's pieces share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from cpuft.train.fast.kernels import kernel_status, kernels_for, plain_torch


def need_kernels() -> None:
    """Skip where there is no compiler; fail where there is one, and no kernels for all that."""
    if kernels_for(torch.empty(0)) is not None:
        return
    assert kernel_status().startswith("off: no C++ compiler")
    pytest.skip("no C++ compiler")


@pytest.fixture(params=["kernels", "torch"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with the kernels, and once with their plain torch twins."""
    if request.param == "kernels":
        need_kernels()
    with plain_torch() if request.param == "torch" else contextlib.nullcontext():
        yield
