"""Blocks of numbers with codes of 8 or 4 bits: their rounding error and their bytes."""

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


@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.floats(-38, 30), st.sampled_from([(8, 127), (4, 7)])
)
def test_the_error_is_at_most_half_of_the_distance_of_two_codes(
    seed: int, rows: int, blocks: int, power: float, codes: tuple[int, int]
) -> None:
    bits, most = codes
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, blocks * BLOCK, generator=generator) * 10.0**power
    found = decode(encode(numbers, bits), blocks * BLOCK, bits)
    error = (found - numbers).view(rows, blocks, BLOCK).abs().amax(2)
    largest = numbers.view(rows, blocks, BLOCK).abs().amax(2)
    assert bool((error <= largest * (0.5001 / most) + 1e-38).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_a_nan_affects_its_own_block_only(bits: int) -> None:
    numbers = torch.zeros(1, 4 * BLOCK)
    numbers[0, BLOCK + 3], numbers[0, 2 * BLOCK], numbers[0, 3 * BLOCK] = math.inf, math.nan, -5.0
    found = decode(encode(numbers, bits), 4 * BLOCK, bits)[0].view(4, BLOCK)
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
    assert encoded_bytes(count, ranks, 4) == nbytes * 132 // 260 == encode(torch.zeros(ranks, part), 4).nbytes


def code(numbers: torch.Tensor, unsent: torch.Tensor, ranks: int, bits: int) -> list[torch.Tensor]:
    """The numbers, errors and mean of the first rank, which receives its own shares from all ranks."""
    error = unsent.clone()
    messages = _encode_numbers(numbers, error, error, ranks, bits)
    length = messages.shape[1] // (BLOCK * bits // 8 + 4) * BLOCK
    message = _average_messages(messages, length, error[:length], bits)
    mean = torch.empty_like(numbers)
    _decode_numbers(message.repeat(ranks, 1), length, mean, bits)
    return [decode(messages, length, bits), error, decode(message, length, bits), mean]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 255, 513, 4099])
@pytest.mark.parametrize("fault", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernels_have_the_bits_of_plain_torch(
    dtype: torch.dtype, ranks: int, count: int, fault: float, bits: int
) -> None:
    assert kernels_for(torch.empty(0)) is not None, kernel_status()
    generator = torch.Generator().manual_seed(count)
    numbers, unsent = torch.randn(2, count, generator=generator) * 10 ** torch.randn(count, generator=generator)
    numbers[:200], unsent[:200] = 0, 0
    numbers[count // 2] = fault
    found = code(numbers.to(dtype), unsent, ranks, bits)
    with plain_torch():
        wanted = code(numbers.to(dtype), unsent, ranks, bits)
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
