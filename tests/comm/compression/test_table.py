"""The table of compressions."""

from __future__ import annotations

import pytest
import torch

from cpuft.comm.compression.table import TABLE, divide, list_levels, resolve_compression, wire_type_name
from cpuft.compressions import COMPRESSION_FACTS, COMPRESSIONS, COMPRESSIONS_WITH_FEEDBACK, count_ring_passes


@pytest.mark.parametrize(
    "requested, precision, sent_as",
    [("auto", "bf16", "bf16"), ("auto", "fp32", "none"), ("powersgd", "bf16", "powersgd")],
)
def test_auto_follows_the_precision_of_training(requested: str, precision: str, sent_as: str) -> None:
    assert resolve_compression(requested, precision) == sent_as


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1024])
def test_gradients_are_divided_to_the_last_bit(ranks: int, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = patterns.view(torch.float16 if dtype == torch.float16 else torch.bfloat16).to(dtype)
    assert torch.equal(divide(numbers.clone(), ranks).nan_to_num(), (numbers / ranks).nan_to_num())


@pytest.mark.parametrize(
    "compression, dtype", [("none", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("powersgd", "float32")]
)
def test_the_wire_type_is_one_that_backends_are_measured_with(compression: str, dtype: str) -> None:
    assert wire_type_name(compression) == dtype


def test_both_tables_hold_the_same_compressions() -> None:
    assert list(TABLE) == list(COMPRESSION_FACTS) == list(COMPRESSIONS[1:])


@pytest.mark.parametrize("members, passes", [(1, 0.0), (2, 1.0), (4, 1.5), (64, 126 / 64)])
def test_a_ring_sends_its_payload_almost_twice_over_each_link(members: int, passes: float) -> None:
    assert count_ring_passes(members) == passes


@pytest.mark.parametrize("hosts, ranks_per_host", [(2, 2), (2, 8), (8, 2)])
def test_hierarchical_means_send_what_one_rank_per_host_would(hosts: int, ranks_per_host: int) -> None:
    parameters, rows = [torch.zeros(2048, 256), torch.zeros(512)], (2**16, 2**15)
    ranks = hosts * ranks_per_host
    alone = list_levels(parameters, rows, hosts, 1e-9)
    flat = list_levels(parameters, rows, ranks, 1e-9)
    found = list_levels(parameters, rows, ranks, 1e-9, hosts)
    for level, of_hosts, of_ranks in zip(found, alone, flat, strict=True):
        if level.name not in COMPRESSIONS_WITH_FEEDBACK:
            assert level == of_ranks
            continue
        # An all-reduce between n ranks sends its payload 2 (n - 1) / n times over the link of a host.
        for name in ("layer_bytes", "row_bytes"):
            sent = getattr(level, name) * 2 * (ranks - 1) / ranks
            assert sent == pytest.approx(getattr(of_hosts, name) * 2 * (hosts - 1) / hosts)
            assert getattr(level, name) < 0.97 * getattr(of_ranks, name)
        assert level.coding_seconds == of_ranks.coding_seconds
        # The messages of rows that are not late come after those of layers.
        assert not level.has_late_rows
        assert level.messages == of_ranks.messages + 2 * of_ranks.has_late_rows
