"""What tests of the fast path's pieces share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from cpuft.train.fast.kernels import kernels_for, plain_torch


@pytest.fixture(params=["kernels", "torch"])
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with the kernels, and once with their plain torch twins."""
    if request.param == "kernels" and kernels_for(torch.empty(0)) is None:
        pytest.skip("no C++ compiler")
    with plain_torch() if request.param == "torch" else contextlib.nullcontext():
        yield
