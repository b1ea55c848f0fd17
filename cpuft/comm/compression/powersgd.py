"""powersgd (Vogels et al. 2019, arXiv:1905.13727): low-rank factors of gradients are sent, with error feedback.

The first updates send int8 blocks instead, because factors cost most accuracy there (see EXACT_UPDATES). torch's own
hook has an option for this, too. It starts collectives in callbacks: with several buckets, their order differs between
ranks, which then wait for each other for ever. Here the backward pass starts all collectives in the order of the
buckets, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cpuft.comm.compression.int8 import BlockReducer

RANK = 32
"""Columns of the factors. The paper trains with 2 (ResNet-18) and 4 (LSTM), for hundreds of epochs. For MiniLM, factors
with 32 columns have a quarter of the bytes of int8. With the gradients of 63 updates of SST-2, the parameters end at a
distance from the exact ones that is 18 % of the exact change, 23 % with 16 columns, and 13 % with 64."""
EXACT_UPDATES = 6
"""Updates at the beginning whose gradients are sent as int8 blocks. Without them the distance is 35 % with 16 columns
instead of 23 %, and with four or eight of them it is 19 or 17 % with 32 columns."""

_WIRE_TYPE = torch.bfloat16
"""Type in which factors and small gradients are sent. Error feedback covers the rounding of factors."""
_MAX_AHEAD = 2
"""Buckets whose first factors may be under way while the backward pass continues, and as many with second ones."""


class Matrix:
    """The approximation P Q^T of a parameter's gradient, and what has not been sent of the gradient yet.

    In each update, call `compute_p`, average its result over the ranks, then the same with `compute_q`, and then
    `write_approximation`. The factors have r = min(rows, columns, RANK) columns.

    Parameters
    ----------
    unsent: fp32, shape (rows, columns): what has not been sent so far. It changes with each update.
    generator: makes the first Q; in the same state on all ranks.
    """

    def __init__(self, unsent: torch.Tensor, generator: torch.Generator) -> None:
        self.unsent = unsent
        rows, columns = unsent.shape
        # From the second update on, the last update's factor, to which the next one is close (the paper's warm start).
        self.q = torch.randn(columns, min(rows, columns, RANK), generator=generator)
        self.p = torch.empty(0)

    def compute_p(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add the gradient to what is unsent, and return this rank's P, to be averaged over the ranks in place.

        P is fp32, shape (rows, r). The gradient has rows * columns numbers in any shape, and does not change.
        """
        self.unsent.add_(gradient.reshape(self.unsent.shape))
        self.p = self.unsent @ torch.linalg.qr(self.q).Q
        return self.p

    def compute_q(self) -> torch.Tensor:
        """Return this rank's Q for the averaged P, to be averaged over the ranks in place: fp32, shape (columns, r)."""
        self.p = torch.linalg.qr(self.p).Q
        self.q = self.unsent.T @ self.p
        return self.q

    def write_approximation(self, gradient: torch.Tensor) -> None:
        """Write P Q^T with the averaged Q into the gradient, and subtract it from what is unsent."""
        sent = self.p @ self.q.T
        self.unsent.sub_(sent)
        gradient.copy_(sent.view(gradient.shape))


class _MeanUnderWay:
    """Tensors whose means over the ranks are under way as one message."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._tensors, self._work = tensors, None
        if tensors:
            packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(_WIRE_TYPE).div_(group.size())
            self._means = torch.split(packed, [tensor.numel() for tensor in tensors])
            self._work = dist.all_reduce(packed, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the means, and write them into the tensors."""
        if self._work:
            self._work.wait()
            for tensor, mean in zip(self._tensors, self._means, strict=True):
                tensor.copy_(mean.view(tensor.shape))


class _BucketUnderWay:
    """A bucket that is under way: its small gradients as they are; of the other ones, first P and then Q."""

    def __init__(
        self, bucket: GradBucket, find_matrix: Callable[[torch.Tensor], Matrix], group: dist.ProcessGroup
    ) -> None:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        self._buffer, self._group = bucket.buffer(), group
        self.future = torch.futures.Future[torch.Tensor]()
        self._matrices = [(find_matrix(parameter), g) for parameter, g in pairs if saves_bytes(g.shape)]
        factors = [matrix.compute_p(gradient) for matrix, gradient in self._matrices]
        small = [gradient for _, gradient in pairs if not saves_bytes(gradient.shape)]
        self._means = [_MeanUnderWay(small, group), _MeanUnderWay(factors, group)]

    def send_q(self) -> None:
        """Wait for the mean of P, and send Q."""
        self._means[1].wait()
        self._means[1] = _MeanUnderWay([matrix.compute_q() for matrix, _ in self._matrices], self._group)

    def finish(self) -> None:
        """Wait for all means, write them into the bucket, and complete the future."""
        for mean in self._means:
            mean.wait()
        for matrix, gradient in self._matrices:
            matrix.write_approximation(gradient)
        self.future.set_result(self._buffer)


class PowerSGD:
    """Averages DDP's buckets over a group's ranks: in the first updates as int8 blocks, then as factors.

    Gradients that factors would not make smaller are then sent as bf16, as factors are. One object belongs to one
    model.

    Parameters
    ----------
    exact_updates: number of updates that are sent as int8 blocks.
    """

    def __init__(self, group: dist.ProcessGroup, exact_updates: int = EXACT_UPDATES) -> None:
        self._group, self._exact_updates = group, exact_updates
        self._generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._blocks = BlockReducer(group)
        self._updates = 0
        """Updates that are complete."""
        self._matrices: dict[torch.Tensor, Matrix] = {}
        self._sending_p: list[_BucketUnderWay] = []
        self._sending_q: list[_BucketUnderWay] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; a DDP communication hook. All ranks call it for the same buckets in the same order.

        It returns a future of the bucket's buffer, in its own type, which holds the mean or its approximation then. No
        other operation of the group may start until the futures of all buckets up to the last one are complete. With
        factors, it waits for earlier buckets if more than two are under way, and all futures are complete when the last
        bucket's call returns.
        """
        is_exact = self._updates < self._exact_updates
        self._updates += bucket.is_last()
        return self._blocks.reduce(bucket) if is_exact else self._reduce_as_factors(bucket)

    @torch.no_grad()
    def _reduce_as_factors(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # The first update with factors sends what rounding to int8 blocks has left out. Gradients that are not
            # sent as factors have no error feedback after that.
            if not saves_bytes(gradient.shape) and (unsent := self._blocks.take_unsent(parameter)) is not None:
                gradient += unsent.view(gradient.shape)
        current = _BucketUnderWay(bucket, self._find_matrix, self._group)
        self._sending_p.append(current)
        ahead = 0 if bucket.is_last() else _MAX_AHEAD
        while len(self._sending_p) > ahead:
            self._sending_q.append(self._sending_p.pop(0))
            self._sending_q[-1].send_q()
        while len(self._sending_q) > ahead:
            self._sending_q.pop(0).finish()
        return current.future

    def _find_matrix(self, parameter: torch.Tensor) -> Matrix:
        if parameter not in self._matrices:
            unsent, shape = self._blocks.take_unsent(parameter), _matrix_shape(parameter.shape)
            start = torch.zeros(shape) if unsent is None else unsent.view(shape)
            self._matrices[parameter] = Matrix(start, self._generator)
        return self._matrices[parameter]


def count_numbers(shape: torch.Size) -> int:
    """Return how many numbers are sent for a gradient of this shape: those of its factors, or of itself if fewer.

    The first dimension is the rows, and all others together are the columns: (rows + columns) * min(rows, columns,
    RANK), at most rows * columns. A gradient with one dimension is sent as it is.
    """
    rows, columns = _matrix_shape(shape)
    return min((rows + columns) * min(rows, columns, RANK), rows * columns)


def count_bytes(shape: torch.Size) -> int:
    """Return how many bytes are sent for a gradient of this shape: two for each of `count_numbers`."""
    return count_numbers(shape) * _WIRE_TYPE.itemsize


def saves_bytes(shape: torch.Size) -> bool:
    """Return whether a gradient's factors have fewer numbers than the gradient itself.

    The result is False for a gradient with one dimension.
    """
    return count_numbers(shape) < shape.numel()


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (rows, columns) of a gradient as a matrix: its first dimension, and all others together."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(1, rows)
