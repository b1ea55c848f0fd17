"""The backend mpi, without ranks."""

from __future__ import annotations

import pytest
import torch

from cpuft.comm.backends.mpi import half_precision_handles


@pytest.mark.parametrize(
    "library, handles",
    (
        ("Intel(R) MPI Library 2021.18.1", {torch.bfloat16: 0x4C000247, torch.float16: 0x4C000246}),
        ("MPICH Version: 4.3.0", {torch.bfloat16: 0x4C00024C}),
        ("Open MPI v5.0.8", {}),
    ),
)
def test_handles_of_16_bit_floats_belong_to_a_library(library: str, handles: dict[torch.dtype, int]) -> None:
    assert half_precision_handles(library) == handles
