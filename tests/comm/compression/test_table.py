"""The table of compressions."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore, ProcessGroup

from cpuft.comm.compression.table import TABLE, make_reduce, resolve_compression, wire_type_name
from cpuft.compressions import COMPRESSION_FACTS, COMPRESSIONS
from cpuft.errors import CpuftError


@pytest.mark.parametrize(
    "requested, precision, sent_as",
    [("auto", "bf16", "bf16"), ("auto", "fp32", "none"), ("powersgd", "bf16", "powersgd")],
)
def test_auto_follows_the_precision_of_training(requested: str, precision: str, sent_as: str) -> None:
    assert resolve_compression(requested, precision) == sent_as


@pytest.mark.parametrize(
    "compression, dtype", [("none", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("powersgd", "float32")]
)
def test_the_wire_type_is_one_that_backends_are_measured_with(compression: str, dtype: str) -> None:
    assert wire_type_name(compression) == dtype


def test_an_unknown_compression_is_refused() -> None:
    group = ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(CpuftError, match="there is no gradient compression bf61: did you mean bf16"):
        make_reduce("bf61", group)


def test_both_tables_hold_the_same_compressions() -> None:
    assert list(TABLE) == list(COMPRESSION_FACTS) == list(COMPRESSIONS[1:])


def test_a_removed_compression_is_answered_with_what_to_give_instead() -> None:
    with pytest.raises(CpuftError, match=r"late was removed.*: give --grad-compression int8"):
        make_reduce("late", ProcessGroup(HashStore(), 0, 1))
