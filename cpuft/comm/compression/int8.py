"""Means over ranks as blocks of 8-bit numbers with error feedback: int8. powersgd also sends blocks of 4-bit numbers.

Blocks with a scale each are those of Dettmers et al. 2021 (arXiv:2110.02861). Error feedback, which adds the rounding
error of an update to the next one, is that of Seide et al. 2014 (1-bit SGD) and Karimireddy et al. 2019
(arXiv:1901.09847). Sums of codes would overflow, so each rank receives its share of all ranks' numbers, sums them in
fp32, rounds the mean again, and sends it to all ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cpuft.comm.backends.gloo import MAX_PAIRWISE_RANKS
from cpuft.comm.collectives import gather_single
from cpuft.comm.process_group import ProgressThread, QueuedWork
from cpuft.kernels import kernels_for

BLOCK = 256
"""Numbers that share a scale, whose four bytes are 1.6 % of the message."""
_DIRECT_BYTES = 2**15
"""Size of a rank's tensor up to which it is sent directly to each other rank of a large group."""


def all_gather(
    output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gather all ranks' equally large contiguous tensors in `output`, by rank; return a Work if `async_op`, else None.

    Collective. In large groups, small tensors go directly to each rank: in gloo's ring, each waits behind larger ones.
    """
    ranks = dist.get_world_size(group)
    if ranks <= MAX_PAIRWISE_RANKS or own.nbytes > _DIRECT_BYTES:
        return gather_single(output, own, group=group, async_op=async_op)
    return dist.all_to_all_single(output.view(-1), own.view(-1).repeat(ranks), group=group, async_op=async_op)


def encoded_bytes(count: int, ranks: int, bits: int = 8) -> int:
    """Return the bytes that each rank sends, and also receives, for a mean of `count` numbers: 256 * `bits` / 8 + 4 for
    each block of 256, of which all ranks have equally many, and at least one.
    """
    return ranks * _message_bytes(_share_length(count, ranks), bits)


def _share_length(count: int, ranks: int) -> int:
    """Return how many numbers each rank averages: whole blocks, at least one."""
    return max(1, -(-count // (ranks * BLOCK))) * BLOCK


def _message_bytes(length: int, bits: int) -> int:
    return length * bits // 8 + length // BLOCK * torch.float32.itemsize


def encode(shares: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Encode fp32 numbers, (n, length), as codes and scales: int8, (n, length * bits / 8 + length / 256 * 4).

    `bits` is 8 or 4, and the length a multiple of 256. A scale is the largest magnitude in a block of 256 numbers
    divided by the largest code, 127 or 7. A block with an infinity or a NaN becomes NaN. Codes come first, then the
    bytes of fp32 scales. With 4 bits, a byte has code j of a block in its low half, and code j + 128 in its high half.
    """
    count = len(shares)
    blocks = shares.view(count, -1, BLOCK)
    # A block of zeros needs a scale that is not zero.
    largest = 127 if bits == 8 else 7
    scales = blocks.abs().amax(2, keepdim=True).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = blocks.div(scales).round_().to(torch.int8)
    if bits == 4:
        codes = codes[:, :, : BLOCK // 2] & 15 | codes[:, :, BLOCK // 2 :] << 4
    return torch.cat([codes.view(count, -1), scales.view(count, -1).view(torch.int8)], 1)


def decode(message: torch.Tensor, length: int, bits: int = 8) -> torch.Tensor:
    """Return the numbers of messages of `encode`, (n, bytes): fp32, shape (n, length)."""
    scales = message[:, length * bits // 8 :].contiguous().view(torch.float32)
    codes = message[:, : length * bits // 8].reshape(len(message), -1, BLOCK * bits // 8)
    if bits == 4:
        codes = torch.cat([((codes & 15) ^ 8) - 8, codes >> 4], 2)
    return codes.float().mul_(scales[:, :, None]).view(len(message), length)


def _encode_numbers(
    numbers: torch.Tensor, unsent: torch.Tensor | None, error: torch.Tensor, ranks: int, bits: int
) -> torch.Tensor:
    """Return the messages of `numbers + unsent`, one for each rank, as `encode` does; `error` may be `unsent`."""
    count, length = len(numbers), _share_length(len(numbers), ranks)
    kernels = kernels_for(numbers)
    if kernels is not None:
        messages = torch.empty((ranks, _message_bytes(length, bits)), dtype=torch.int8)
        kernels.run("encode_blocks", numbers.dtype, numbers, unsent, error, messages, count, ranks, length, bits)
        return messages
    summed = numbers.float() if unsent is None else numbers.float() + unsent
    shares = torch.nn.functional.pad(summed, (0, ranks * length - count)).view(ranks, length)
    messages = encode(shares, bits)
    error.copy_((shares - decode(messages, length, bits)).view(-1)[:count])
    return messages


def _average_messages(received: torch.Tensor, length: int, error: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the message of the mean, (1, bytes), and add what rounding it loses of all ranks' numbers to `error`."""
    ranks = len(received)
    kernels = kernels_for(error)
    if kernels is not None:
        message = torch.empty_like(received[:1])
        kernels.run("average_blocks", error.dtype, received, message, error, len(error), ranks, length, bits)
        return message
    first, *others = decode(received, length, bits)
    for numbers in others:
        first += numbers
    mean = first.div_(ranks)[None]
    message = encode(mean, bits)
    # Rounding the mean loses as much of every rank's numbers.
    error += mean.sub_(decode(message, length, bits)).mul_(ranks)[0, : len(error)]
    return message


def _decode_numbers(messages: torch.Tensor, length: int, numbers: torch.Tensor, bits: int) -> None:
    kernels = kernels_for(numbers)
    if kernels is not None:
        kernels.run("decode_blocks", numbers.dtype, messages, numbers, len(numbers), len(messages), length, bits)
    else:
        numbers.copy_(decode(messages, length, bits).view(-1)[: len(numbers)])


def encode_message(numbers: torch.Tensor, error: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Return (n,) contiguous fp32 or bf16 numbers, filled up to blocks of 256 by zeros, as a message, int8, of codes of
    8 or 4 bits; write what the message lacks of the numbers to `error`: fp32, (n,).
    """
    return _encode_numbers(numbers, None, error, 1, bits)[0]


def decode_message(message: torch.Tensor, numbers: torch.Tensor, bits: int = 8) -> None:
    """Write the first numbers of a message of `encode_message` to `numbers`: fp32 or bf16, (n,), contiguous."""
    length = len(message) // _message_bytes(BLOCK, bits) * BLOCK
    _decode_numbers(message[None], length, numbers, bits)


class BlockMean:
    """The mean of each rank's numbers over a group, computed in steps between which the rank can do other work.

    All ranks make one, which encodes `numbers`, one-dimensional and contiguous, and then call `send`, `average_share`
    and `finish`, once each. `unsent`, fp32, is what was not sent before: it is added, and `error` has its memory.
    """

    def __init__(
        self, numbers: torch.Tensor, group: dist.ProcessGroup, unsent: torch.Tensor | None = None, bits: int = 8
    ) -> None:
        self._bits = bits
        self._group, self._length = group, _share_length(len(numbers), group.size())
        self.error = torch.empty(len(numbers), dtype=torch.float32) if unsent is None else unsent
        """What the mean lacks of this rank's numbers, to be added to the next ones; complete after `average_share`."""
        self._message = _encode_numbers(numbers, unsent, self.error, group.size(), bits)
        self._received = torch.empty_like(self._message)
        self._work: dist.Work | None = None

    def send(self) -> None:
        """Start to send each rank its share of the numbers, without waiting."""
        self._work = dist.all_to_all_single(self._received, self._message, group=self._group, async_op=True)

    def average_share(self) -> None:
        """Wait for all ranks' numbers of this rank's share, and start to send their mean to all ranks."""
        assert self._work is not None
        self._work.wait()
        start = self._group.rank() * self._length
        share = self.error[start : start + self._length]
        message = _average_messages(self._received, self._length, share, self._bits)
        self._message = torch.empty_like(self._received)
        self._work = all_gather(self._message, message, group=self._group, async_op=True)

    def finish(self, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the mean, the same bits on all ranks; return it in `numbers`, contiguous, or in new fp32 memory."""
        assert self._work is not None
        self._work.wait()
        mean = torch.empty_like(self.error) if numbers is None else numbers
        _decode_numbers(self._message, self._length, mean, self._bits)
        return mean


def measure_coding_seconds() -> float:
    """Return seconds per number to encode and decode 2**21 numbers, which the second-level cache does not hold."""
    parts = list(zip(torch.ones(8, 2**18), torch.zeros(8, 2**18), strict=True))
    start = 0.0
    for _ in range(2):  # the first time warms up
        start = time.perf_counter()
        for numbers, error in parts:
            _code(numbers, error)
    return (time.perf_counter() - start) / (len(parts) * 2**18)


def _code(numbers: torch.Tensor, error: torch.Tensor) -> None:
    length = _share_length(len(numbers), 1)
    message = _average_messages(_encode_numbers(numbers, error, error, 1, 8), length, error, 8)
    _decode_numbers(message, length, torch.empty_like(numbers), 8)


@dataclass
class _BucketUnderWay:
    bucket: GradBucket
    mean: BlockMean
    work: QueuedWork


class BlockReducer:
    """Averages buckets over a group's ranks as int8 blocks with error feedback. One reducer belongs to one model.

    Each update has the same buckets (`cpuft.train.arena.Bucket`), in the same order on all ranks. Gradients are encoded
    in the backward pass; a thread does the rest, so that the backward pass waits for no message.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._unsent: dict[torch.Tensor, torch.Tensor] = {}
        """First parameter of a bucket -> what was not sent of the bucket's gradients."""
        self._thread = ProgressThread("int8")
        # Only the thread uses these two lists. It waits for a bucket's message after it has sent the next bucket's, so
        # that a message is always under way.
        self._sent: list[_BucketUnderWay] = []
        self._averaged: list[_BucketUnderWay] = []

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; return a future of its buffer with the mean, or an exchange's error.

        No other operation of the group may start before the futures of all buckets are complete.
        """
        mean = BlockMean(bucket.buffer(), self._group, self._unsent.get(bucket.parameters()[0]))
        one = _BucketUnderWay(bucket, mean, QueuedWork(bucket.buffer()))
        future = one.work.get_future()
        is_last = bucket.is_last()
        self._thread.put(lambda: self._advance(one, is_last))
        return future

    def _advance(self, one: _BucketUnderWay, is_last: bool) -> None:
        """Send a bucket and continue those before it, in an order of messages that is the same on all ranks."""
        self._sent.append(one)
        try:
            one.mean.send()
            while len(self._sent) > (0 if is_last else 1):
                oldest = self._sent[0]
                oldest.mean.average_share()
                # `reduce` reads this entry in the next update, after the futures of this one are complete.
                self._unsent[oldest.bucket.parameters()[0]] = oldest.mean.error
                self._averaged.append(self._sent.pop(0))
            while len(self._averaged) > (0 if is_last else 1):
                oldest = self._averaged[0]
                oldest.mean.finish(oldest.bucket.buffer())
                self._averaged.pop(0).work.complete()
        except Exception as error:  # whoever waits for the futures raises it
            for lost in self._averaged + self._sent:
                lost.work.fail(error)
            self._averaged, self._sent = [], []

    def take_unsent(self, bucket: GradBucket) -> torch.Tensor:
        """Return and forget a bucket's unsent gradients, fp32, (n,), which must not be under way; zeros if all were
        sent.
        """
        unsent = self._unsent.pop(bucket.parameters()[0], None)
        return torch.zeros(len(bucket.buffer())) if unsent is None else unsent
