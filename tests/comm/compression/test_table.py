"""What gradients are sent as."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore, ProcessGroup

from cpuft.comm.compression.table import make_reduce, resolve_compression, wire_type_name
from cpuft.errors import CpuftError


@pytest.mark.parametrize(
    "asked, precision, sent_as", [("auto", "bf16", "bf16"), ("auto", "fp32", "none"), ("powersgd", "bf16", "powersgd")]
)
def test_gradients_are_sent_as_trained_unless_asked_otherwise(asked: str, precision: str, sent_as: str) -> None:
    assert resolve_compression(asked, precision) == sent_as


@pytest.mark.parametrize(
    "compression, dtype", [("none", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("powersgd", "float32")]
)
def test_most_bytes_are_of_a_type_that_can_be_measured(compression: str, dtype: str) -> None:
    assert wire_type_name(compression) == dtype


def test_a_compression_that_there_is_not() -> None:
    group = ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(CpuftError, match="no gradient compression bf61: did you mean bf16"):
        make_reduce("bf61", group)
