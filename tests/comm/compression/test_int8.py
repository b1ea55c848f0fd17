"""Blocks of 8-bit numbers: their rounding error and their bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cpuft.comm.compression.int8 import (
    BLOCK,
    BlockReducer,
    _average_messages,
    _decode_numbers,
    _encode_numbers,
    decode,
    encode,
    encoded_bytes,
)
from cpuft.kernels import kernel_status, kernels_for, plain_torch
from tests.comm.compression.feedback import Bucket


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.floats(-38, 30))
def test_the_error_is_at_most_a_254th_of_the_blocks_largest_number(
    seed: int, rows: int, blocks: int, power: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, blocks * BLOCK, generator=generator) * 10.0**power
    found = decode(encode(numbers), blocks * BLOCK)
    error = (found - numbers).view(rows, blocks, BLOCK).abs().amax(2)
    largest = numbers.view(rows, blocks, BLOCK).abs().amax(2)
    assert bool((error <= largest * (0.5001 / 127) + 1e-38).all())


def test_zeros_stay_zeros_and_a_nan_affects_its_own_block_only() -> None:
    numbers = torch.zeros(1, 4 * BLOCK)
    numbers[0, BLOCK + 3], numbers[0, 2 * BLOCK], numbers[0, 3 * BLOCK] = math.inf, math.nan, -5.0
    found = decode(encode(numbers), 4 * BLOCK)[0].view(4, BLOCK)
    assert found.isnan().sum(1).tolist() == [0, BLOCK, BLOCK, 0]
    assert found[0].tolist() == [0.0] * BLOCK
    assert found[3].tolist() == [-5.0] + [0.0] * (BLOCK - 1)


@pytest.mark.parametrize(
    "count, ranks, nbytes",
    [(0, 2, 2 * 260), (1, 2, 2 * 260), (512, 2, 2 * 260), (513, 2, 4 * 260), (10**7, 4, 10_156_640)],
)
def test_a_message_has_a_quarter_of_the_bytes_of_fp32(count: int, ranks: int, nbytes: int) -> None:
    assert encoded_bytes(count, ranks) == nbytes
    part = nbytes // ranks * BLOCK // (BLOCK + 4)
    assert encode(torch.zeros(ranks, part)).nbytes == nbytes


def code(numbers: torch.Tensor, unsent: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The numbers, errors and mean of the first rank, which receives its own shares from all ranks."""
    error = unsent.clone()
    messages = _encode_numbers(numbers, error, error, ranks)
    length = messages.shape[1] // (BLOCK + 4) * BLOCK
    message = _average_messages(messages, length, error[:length])
    mean = torch.empty_like(numbers)
    _decode_numbers(message.repeat(ranks, 1), length, mean)
    return [decode(messages, length), error, decode(message, length), mean]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 255, 513, 4099])
@pytest.mark.parametrize("fault", [0.0, math.nan, math.inf])
def test_the_kernels_have_the_bits_of_plain_torch(dtype: torch.dtype, ranks: int, count: int, fault: float) -> None:
    assert kernels_for(torch.empty(0)) is not None, kernel_status()
    generator = torch.Generator().manual_seed(count)
    numbers, unsent = torch.randn(2, count, generator=generator) * 10 ** torch.randn(count, generator=generator)
    numbers[:200], unsent[:200] = 0, 0
    numbers[count // 2] = fault
    found = code(numbers.to(dtype), unsent, ranks)
    with plain_torch():
        wanted = code(numbers.to(dtype), unsent, ranks)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(1.0).view(torch.int16), theirs.nan_to_num(1.0).view(torch.int16))


class Pair:
    """A group of two ranks, of which the other one is lost."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def test_the_future_of_each_bucket_raises_the_error_of_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("connection closed by rank 1")

    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **options: Lost())
    group: Any = Pair()
    reducer = BlockReducer(group)
    buckets: list[Any] = [
        Bucket([torch.zeros(300)], [torch.ones(300)], last=False),
        Bucket([torch.zeros(7)], [torch.ones(7)], last=True),
    ]
    for future in [reducer.reduce(bucket) for bucket in buckets]:
        with pytest.raises(RuntimeError, match="connection closed by rank 1"):
            future.wait()
