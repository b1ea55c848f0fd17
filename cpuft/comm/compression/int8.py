"""Means over ranks in a quarter of fp32's bytes: 8-bit numbers in blocks, and what rounding misses is sent next time.

Blocks with a scale each are those of Dettmers et al. 2021 (arXiv:2110.02861), error feedback is Seide et al. 2014's
(1-bit SGD) and Karimireddy et al. 2019's (arXiv:1901.09847). Integers of several ranks cannot be added without
overflow. So each rank gets its part of all messages, adds in fp32, rounds the mean anew and gives it to all.
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
"""Numbers that share a scale: its four bytes are 1.6 % of the message."""
_AHEAD = 4
"""Buckets whose parts may be on their way before backward waits for the first."""
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 warns of the name that torch 2.8 has."""


def coded_bytes(count: int, ranks: int) -> int:
    """Bytes of `count` numbers as blocks, cut into a part for each rank."""
    return ranks * _row_bytes(_part(count, ranks))


def _part(count: int, ranks: int) -> int:
    """Numbers of a rank's part, whole blocks, one at least."""
    return max(1, -(-count // (ranks * BLOCK))) * BLOCK


def _row_bytes(width: int) -> int:
    return width + width // BLOCK * torch.float32.itemsize


def encode(rows: torch.Tensor) -> torch.Tensor:
    """Numbers, fp32, shape (k, width), whole blocks, as a message for each row: int8, shape (k, bytes).

    A number is off by half a 127th of its block's largest magnitude at most. A block with an infinity or a NaN is NaN.
    """
    count, width = rows.shape
    blocks = rows.view(count, -1, BLOCK)
    # Zeros need a scale by which they can be divided.
    scales = blocks.abs().amax(2, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = blocks.div(scales).round_()
    message = torch.empty((count, _row_bytes(width)), dtype=torch.int8)
    message[:, :width].view(codes.shape).copy_(codes)
    message[:, width:] = scales.view(count, -1).view(torch.int8)
    return message


def decode(message: torch.Tensor, width: int) -> torch.Tensor:
    """The numbers of a message, fp32, shape (k, width)."""
    scales = message[:, width:].contiguous().view(torch.float32)
    numbers = message[:, :width].float().view(len(message), -1, BLOCK).mul_(scales[:, :, None])
    return numbers.view(len(message), width)


class BlockMean:
    """Numbers on their way to their mean over a group's ranks. `turn` and `finish` are collectives, like making one.

    Parameters
    ----------
    numbers: fp32, one-dimensional.
    """

    def __init__(self, numbers: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._count, ranks = group, len(numbers), group.size()
        self._width = _part(self._count, ranks)
        rows = torch.nn.functional.pad(numbers, (0, ranks * self._width - self._count)).view(ranks, self._width)
        self._message = encode(rows)
        self._missed = rows.sub_(decode(self._message, self._width))
        self._parts = torch.empty_like(self._message)
        self._work = dist.all_to_all_single(self._parts, self._message, group=group, async_op=True)

    @property
    def missed(self) -> torch.Tensor:
        """What the mean lacks of this rank's numbers: to be added to what it sends next. Whole after `turn`."""
        return self._missed.view(-1)[: self._count]

    def turn(self) -> None:
        """Wait for all ranks' numbers of this rank's part, and send their mean to all."""
        assert self._work is not None
        self._work.wait()
        mean = decode(self._parts, self._width).mean(0, keepdim=True)
        own = encode(mean)
        # The mean's rounding misses as much of every rank's numbers: this one sends it for all of them.
        missed = mean.sub_(decode(own, self._width)).mul_(self._group.size())
        self._missed[self._group.rank()] += missed[0]
        self._message = torch.empty_like(self._parts)
        self._work = all_gather(self._message, own, group=self._group, async_op=True)

    def finish(self) -> torch.Tensor:
        """Wait for the mean: fp32, one-dimensional, the same bits on all ranks."""
        assert self._work is not None
        self._work.wait()
        return decode(self._message, self._width).view(-1)[: self._count]


class BackgroundMean:
    """A mean that goes on beside whatever this thread does; of one group, one at a time.

    Parameters
    ----------
    group: nothing else may be under way on it.
    queue: the thread that waits.
    """

    def __init__(self, numbers: torch.Tensor, group: dist.ProcessGroup, queue: ProgressThread) -> None:
        self._mean = BlockMean(numbers, group)
        self._turned: concurrent.futures.Future[None] = concurrent.futures.Future()
        queue.put(self._turn)

    def _turn(self) -> None:
        try:
            self._mean.turn()
            self._turned.set_result(None)
        except Exception as error:  # to be raised where it is waited for
            self._turned.set_exception(error)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the mean, and what is to be added to what this rank sends next."""
        self._turned.result()
        return self._mean.finish(), self._mean.missed


def average_blocks(numbers: torch.Tensor, unsent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean over the ranks of numbers and what was not sent of them before, fp32, one-dimensional. A collective.

    `unsent`, of the same shape, becomes what is to be sent with these numbers next time.
    """
    mean = BlockMean(numbers + unsent, group)
    mean.turn()
    unsent.copy_(mean.missed)
    return mean.finish()


def average_seconds() -> float:
    """What coding a number costs a rank in a mean over ranks, in seconds: measured in some milliseconds."""
    rows = torch.randn(1, 2**18)
    decode(encode(rows), rows.shape[1])
    start = time.perf_counter()
    decode(encode(rows), rows.shape[1])
    # This rank's numbers, all ranks' of its part, and the mean.
    return 2 * (time.perf_counter() - start) / rows.shape[1]


class BlockReducer:
    """Averages DDP's buckets over a group's ranks, as blocks. All collectives are started from backward, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._unsent: dict[torch.Tensor, torch.Tensor] = {}
        # Buckets whose parts are on their way, and those whose means are.
        self._parting: list[tuple[BlockMean, GradBucket]] = []
        self._gathering: list[tuple[BlockMean, GradBucket]] = []
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A DDP hook. The futures of all buckets are complete when the last one's call returns."""
        numbers = bucket.buffer().to(torch.float32, copy=True)
        for unsent, gradient in zip(self._unsent_of(bucket), _split(numbers, bucket), strict=True):
            gradient.add_(unsent)
        self._parting.append((BlockMean(numbers, self._group), bucket))
        self._futures.append(torch.futures.Future())
        future = self._futures[-1]
        while len(self._parting) > (0 if bucket.is_last() else _AHEAD):
            self._turn()
        if bucket.is_last():
            self._finish()
        return future

    def _unsent_of(self, bucket: GradBucket) -> list[torch.Tensor]:
        """What each of a bucket's parameters has not sent. By parameter: DDP makes its buckets anew after a step."""
        return [self._unsent.get(parameter, torch.zeros(())) for parameter in bucket.parameters()]

    def _turn(self) -> None:
        mean, bucket = self._parting.pop(0)
        mean.turn()
        self._unsent.update(zip(bucket.parameters(), _split(mean.missed, bucket), strict=True))
        self._gathering.append((mean, bucket))

    def _finish(self) -> None:
        for (mean, bucket), future in zip(self._gathering, self._futures, strict=True):
            bucket.buffer().copy_(mean.finish())
            future.set_result(bucket.buffer())
        self._gathering, self._futures = [], []


def _split(numbers: torch.Tensor, bucket: GradBucket) -> tuple[torch.Tensor, ...]:
    """A bucket's numbers, by parameter."""
    return torch.split(numbers, [parameter.numel() for parameter in bucket.parameters()])
