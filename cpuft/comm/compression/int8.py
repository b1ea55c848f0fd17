"""int8: means over ranks in a quarter of the bytes of fp32, as blocks of 8-bit numbers with error feedback.

Blocks with a scale each are those of Dettmers et al. 2021 (arXiv:2110.02861). Error feedback, which adds the rounding
error of an update to the next one, is that of Seide et al. 2014 (1-bit SGD) and Karimireddy et al. 2019
(arXiv:1901.09847). Integers of several ranks cannot be summed without overflow. So each rank receives its share of all
ranks' numbers, sums them in fp32, rounds the mean again, and sends it to all ranks.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cpuft.comm.process_group import ProgressThread

BLOCK = 256
"""Numbers that share a scale, whose four bytes are 1.6 % of the message."""
_MAX_AHEAD = 4
"""Buckets whose shares may be under way before the backward pass waits for the first of them."""
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's all-gather of equally large tensors: `all_gather(output, input, group=None, async_op=False)`. torch 2.13
warns about the second name, and torch 2.8 has only that one."""


def encoded_bytes(count: int, ranks: int) -> int:
    """Return the size of `count` numbers as blocks, which each of `ranks` ranks sends in each direction.

    Each rank's share is padded to whole blocks of 256 numbers, at least one, of 260 bytes each. So even 0 numbers have
    `260 * ranks` bytes.
    """
    return ranks * _message_bytes(_share_length(count, ranks))


def _share_length(count: int, ranks: int) -> int:
    """Return how many numbers each rank averages: whole blocks, at least one."""
    return max(1, -(-count // (ranks * BLOCK))) * BLOCK


def _message_bytes(length: int) -> int:
    return length + length // BLOCK * torch.float32.itemsize


def encode(shares: torch.Tensor) -> torch.Tensor:
    """Encode numbers as 8-bit codes and scales.

    A scale is the largest magnitude in a block of 256 numbers divided by 127, and a code is the number divided by it,
    rounded. The error of a number is at most 1/254 of the largest magnitude in its block. A block with an infinity or a
    NaN becomes NaN.

    Parameters
    ----------
    shares: fp32, shape (n, length), contiguous.

    Returns the messages: int8, shape (n, length + length / 256 * 4), with the codes first and then the bytes of the
    fp32 scales.

    Raises RuntimeError: the length is not a multiple of BLOCK.
    """
    count, length = shares.shape
    blocks = shares.view(count, -1, BLOCK)
    # A block of zeros needs a scale that is not zero.
    scales = blocks.abs().amax(2, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = blocks.div(scales).round_()
    message = torch.empty((count, _message_bytes(length)), dtype=torch.int8)
    message[:, :length].view(codes.shape).copy_(codes)
    message[:, length:] = scales.view(count, -1).view(torch.int8)
    return message


def decode(message: torch.Tensor, length: int) -> torch.Tensor:
    """Return the numbers of messages of `encode`: fp32, shape (n, length).

    Parameters
    ----------
    message: int8, shape (n, bytes).
    length: of what was encoded, a multiple of BLOCK.
    """
    scales = message[:, length:].contiguous().view(torch.float32)
    numbers = message[:, :length].float().view(len(message), -1, BLOCK).mul_(scales[:, :, None])
    return numbers.view(len(message), length)


class BlockMean:
    """The mean of each rank's numbers over a group, while it is under way.

    All ranks must make one, and then call `average_share` and `finish`, once each and in the same order. Making one
    starts to send the numbers, and does not wait.

    Parameters
    ----------
    numbers: fp32, one-dimensional, of the same length on all ranks. They are not changed.
    """

    def __init__(self, numbers: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._count, ranks = group, len(numbers), group.size()
        self._length = _share_length(self._count, ranks)
        shares = torch.nn.functional.pad(numbers, (0, ranks * self._length - self._count)).view(ranks, self._length)
        self._message = encode(shares)
        self._error = shares.sub_(decode(self._message, self._length))
        self._received = torch.empty_like(self._message)
        self._work = dist.all_to_all_single(self._received, self._message, group=group, async_op=True)

    @property
    def error(self) -> torch.Tensor:
        """What the mean lacks of this rank's numbers, which must be added to the next ones: fp32, shape of the numbers.

        It is complete after `average_share`.
        """
        return self._error.view(-1)[: self._count]

    def average_share(self) -> None:
        """Wait for all ranks' numbers of this rank's share, and start to send their mean to all ranks."""
        assert self._work is not None
        self._work.wait()
        mean = decode(self._received, self._length).mean(0, keepdim=True)
        message = encode(mean)
        # Rounding the mean loses as much of every rank's numbers: this rank adds the loss of all of them to its own.
        error = mean.sub_(decode(message, self._length)).mul_(self._group.size())
        self._error[self._group.rank()] += error[0]
        self._message = torch.empty_like(self._received)
        self._work = all_gather(self._message, message, group=self._group, async_op=True)

    def finish(self) -> torch.Tensor:
        """Wait for the mean and return it: fp32, shape of the numbers, with the same bits on all ranks."""
        assert self._work is not None
        self._work.wait()
        return decode(self._message, self._length).view(-1)[: self._count]


class BackgroundMean:
    """A mean of int8 blocks that is computed while the calling thread does something else. All ranks must make one.

    Parameters
    ----------
    numbers: fp32, one-dimensional, of the same length on all ranks. They are not changed.
    group: no other operation may be under way on it.
    thread: waits for the other ranks.
    """

    def __init__(self, numbers: torch.Tensor, group: dist.ProcessGroup, thread: ProgressThread) -> None:
        self._mean = BlockMean(numbers, group)
        self._averaged: concurrent.futures.Future[None] = concurrent.futures.Future()
        thread.put(self._average_share)

    def _average_share(self) -> None:
        try:
            self._mean.average_share()
            self._averaged.set_result(None)
        except Exception as error:  # finish() raises it
            self._averaged.set_exception(error)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait, and return (the mean, this rank's error), both fp32 in the shape of the numbers.

        The error must be added to this rank's next numbers. Raises what the background thread raised, for example
        RuntimeError if a rank is lost.
        """
        self._averaged.result()
        return self._mean.finish(), self._mean.error


def average_blocks(numbers: torch.Tensor, unsent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean over the ranks of `numbers + unsent`: fp32, one-dimensional, with the same bits on all ranks.

    All ranks must call it together; it blocks until the mean is there.

    Parameters
    ----------
    numbers: fp32, one-dimensional. They are not changed.
    unsent: of the same shape: what was not sent before. It is overwritten with what must be sent with the next numbers.
    """
    mean = BlockMean(numbers + unsent, group)
    mean.average_share()
    unsent.copy_(mean.error)
    return mean.finish()


def measure_coding_seconds() -> float:
    """Return this rank's seconds per number to encode and decode in a mean over ranks: twice one encoding and decoding.

    It measures 2**18 numbers within some milliseconds. No other rank takes part.
    """
    shares = torch.randn(1, 2**18)
    decode(encode(shares), shares.shape[1])
    start = time.perf_counter()
    decode(encode(shares), shares.shape[1])
    # Twice, for this rank's numbers, and for its share of all ranks' numbers and of their mean.
    return 2 * (time.perf_counter() - start) / shares.shape[1]


class BlockReducer:
    """Averages DDP's buckets over a group's ranks as int8 blocks with error feedback.

    All collectives start in order in the backward pass. One reducer belongs to one model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._unsent: dict[torch.Tensor, torch.Tensor] = {}
        """Parameter -> what was not sent of its gradients. DDP changes its buckets after the first step."""
        self._scattering: list[tuple[BlockMean, GradBucket]] = []
        """Buckets whose shares are under way."""
        self._gathering: list[tuple[BlockMean, GradBucket]] = []
        """Buckets whose means are under way."""
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; a DDP communication hook. All ranks call it for the same buckets in the same order.

        It returns a future of the bucket's buffer, in its own type, which holds the mean then. It waits for earlier
        buckets if more than four are under way. All futures are complete when the last bucket's call returns.
        """
        numbers = bucket.buffer().to(torch.float32, copy=True)
        for parameter, gradient in zip(bucket.parameters(), _split(numbers, bucket), strict=True):
            gradient.add_(self._unsent.get(parameter, torch.zeros(())))
        self._scattering.append((BlockMean(numbers, self._group), bucket))
        self._futures.append(torch.futures.Future())
        future = self._futures[-1]
        while len(self._scattering) > (0 if bucket.is_last() else _MAX_AHEAD):
            self._average_oldest()
        if bucket.is_last():
            self._finish()
        return future

    def _average_oldest(self) -> None:
        mean, bucket = self._scattering.pop(0)
        mean.average_share()
        self._unsent.update(zip(bucket.parameters(), _split(mean.error, bucket), strict=True))
        self._gathering.append((mean, bucket))

    def _finish(self) -> None:
        for (mean, bucket), future in zip(self._gathering, self._futures, strict=True):
            bucket.buffer().copy_(mean.finish())
            future.set_result(bucket.buffer())
        self._gathering, self._futures = [], []


def _split(numbers: torch.Tensor, bucket: GradBucket) -> tuple[torch.Tensor, ...]:
    """Split a bucket's numbers by parameter."""
    return torch.split(numbers, [parameter.numel() for parameter in bucket.parameters()])
