"""powersgd (Vogels et al. 2019, arXiv:1905.13727): low-rank factors of gradients are sent as int8 blocks, with error
feedback.

The first updates send int8 blocks of whole gradients instead, because factors cost most accuracy there (see
EXACT_UPDATES).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cpuft.comm.compression.int8 import BlockMean, BlockReducer
from cpuft.kernels import kernels_for

RANK = 16
"""Rows of the factors. The paper trains with 2 (ResNet-18) and 4 (LSTM), for hundreds of epochs. With the gradients of
63 updates of SST-2, the parameters end at a distance from the exact ones that is 23 % of the exact change, 18 % with
32 rows, and 13 % with 64."""
EXACT_UPDATES = 6
"""Updates at the beginning whose gradients are sent as int8 blocks. Without them the distance is 35 %."""


class Matrix:
    """The approximation P^T Q of a parameter's gradient, and what has not been sent of the gradient yet.

    In each update, call `compute_p`, average its result over the ranks, then the same with `compute_q`, and then
    `write_approximation`. The factors have r = min(rows, columns, RANK) rows. Their rows belong to the singular vectors
    of the gradient, the largest one first, so that the numbers of an int8 block are of similar size.

    Parameters
    ----------
    unsent: what has not been sent so far: in the type of the gradients, contiguous, shape (rows, columns). Each update
        changes it in place. In bf16, each update rounds it, and the rounding error is not sent later. It is at most
        0.2 % of each number.
    generator: makes the first Q; in the same state on all ranks.
    """

    def __init__(self, unsent: torch.Tensor, generator: torch.Generator) -> None:
        self._unsent = unsent
        rows, columns = unsent.shape
        # From the second update on, the last update's factor, to which the next one is close (the paper's warm start).
        self._q = torch.randn(min(rows, columns, RANK), columns, generator=generator)
        self._p = torch.empty(0)
        self._sent: torch.Tensor | None = None
        """What this rank has sent of Q since the last update; P^T times this is still part of `_unsent`."""

    @property
    def unsent(self) -> torch.Tensor:
        """What has not been sent so far: fp32, shape (rows, columns)."""
        unsent = self._unsent.float()
        return unsent if self._sent is None else unsent - self._p.T @ self._sent

    def compute_p(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add the gradient to what is unsent, and return this rank's P: fp32, shape (r, rows).

        The gradient has rows * columns numbers in any shape, and the type of what is unsent. It does not change.
        """
        gradient, factor = gradient.contiguous(), orthonormalise(self._q, self._unsent.dtype)
        left, right = (None, None) if self._sent is None else (self._p, self._sent)
        kernels = kernels_for(gradient)
        if kernels is not None:
            p = torch.empty(len(factor), len(self._unsent))
            arrays = gradient, self._unsent, left, right, factor, p
            kernels.run("add_gradient", gradient.dtype, *arrays, *self._unsent.shape, len(factor))
            return p
        summed = self._unsent.float() + gradient.view(self._unsent.shape)
        self._unsent.copy_(summed if right is None else summed.addmm_(self._p.T, right, alpha=-1))
        return factor @ self._unsent.float().T

    def compute_q(self, p: torch.Tensor) -> torch.Tensor:
        """Return this rank's Q for the mean of P: fp32, shape (r, columns)."""
        self._p = orthonormalise(p, self._unsent.dtype)
        self._sent = None
        kernels = kernels_for(self._unsent)
        if kernels is None:
            return self._p @ self._unsent.float()
        q = torch.empty(len(p), self._unsent.shape[1])
        arrays = self._p, self._unsent, q
        kernels.run("multiply_factor", self._unsent.dtype, *arrays, *self._unsent.shape, len(p))
        return q

    def write_approximation(self, sent: torch.Tensor, mean: torch.Tensor, gradient: torch.Tensor) -> None:
        """Write P^T Q into the gradient. This rank's part of it is no longer unsent.

        Parameters
        ----------
        sent: the Q that `compute_q` has returned, without what rounding has left out of it.
        mean: of what all ranks have sent of Q, the same on all ranks.
        gradient: contiguous, rows * columns numbers in any shape. It is overwritten.
        """
        self._sent, self._q = sent.contiguous(), mean.contiguous()
        kernels = kernels_for(gradient)
        if kernels is None:
            gradient.view(self._unsent.shape).copy_(self._p.T @ self._q)
        else:
            arrays = self._p, self._q, gradient
            kernels.run("write_product", gradient.dtype, *arrays, *self._unsent.shape, len(self._p))


def orthonormalise(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return orthonormal rows that span those of a factor, rounded to `dtype`: fp32, in the factor's shape.

    A row that depends on those before it is replaced by one that is orthogonal to them. All ranks need the same rows:
    kernels give the same bits on CPUs with AVX2 and AVX-512. NaNs stay NaNs.

    Parameters
    ----------
    factor: fp32, with at least as many columns as rows.
    """
    kernels = kernels_for(factor.new_empty(0, dtype=dtype))
    if kernels is not None:
        rows = torch.empty(factor.shape)
        kernels.run("orthonormalise", dtype, factor.contiguous(), rows, *factor.shape)
        return rows
    rows, columns = factor.clone(), factor.shape[1]
    for i in range(len(rows)):
        least = rows[i].norm() * 1e-6
        length, unit = _project(rows, i), 0
        while least.isfinite() and length <= least:
            rows[i] = 0.0
            rows[i, unit] = 1.0
            # One of the unit vectors has at least this length left.
            least = torch.tensor(0.5 * (columns - i) / columns).sqrt()
            length, unit = _project(rows, i), unit + 1
        rows[i] /= length
    rounded: torch.Tensor = rows.to(dtype).float()
    return rounded


def _project(rows: torch.Tensor, i: int) -> torch.Tensor:
    """Subtract the projection of row i on the rows before it, and return the length that is left of row i."""
    for _ in range(2):
        rows[i] -= (rows[:i] @ rows[i]) @ rows[:i]
    length: torch.Tensor = rows[i].norm()
    return length


_ENDED = object()
"""What `next` returns for an iterator that has ended."""


class _Message:
    """Tensors whose means over the ranks are computed as one message of int8 blocks."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._blocks = BlockMean(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
        self.means: list[torch.Tensor] = []
        self.errors: list[torch.Tensor] = []
        """What the means lack of this rank's tensors."""

    def exchange(self) -> Iterator[None]:
        """Send the tensors and receive `means`. At each `yield`, a message is under way."""
        self._blocks.send()
        yield
        self._blocks.average_share()
        yield
        self.means, self.errors = self._split(self._blocks.finish()), self._split(self._blocks.error)

    def _split(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(numbers, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class PowerSGD:
    """Averages DDP's buckets over a group's ranks: in the first updates as int8 blocks, then as factors in such blocks.

    Gradients that factors would not make smaller are sent as int8 blocks in all updates. One object belongs to one
    model.

    Parameters
    ----------
    exact_updates: number of updates that are sent as int8 blocks of whole gradients.
    """

    def __init__(self, group: dist.ProcessGroup, exact_updates: int = EXACT_UPDATES) -> None:
        self._group, self._exact_updates = group, exact_updates
        self._generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._blocks = BlockReducer(group)
        self._updates = 0
        """Updates of which the last bucket has been given."""
        self._matrices: dict[torch.Tensor, Matrix] = {}
        self._unsent: dict[torch.Tensor, torch.Tensor] = {}
        """Parameter -> what was not sent of its gradient, for gradients that are sent whole."""
        self._under_way: list[Iterator[None]] = []
        """What is left to do for the buckets that are under way."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; a DDP communication hook. All ranks call it for the same buckets in the same order.

        It returns a future of the bucket's buffer, in its own type, which holds the mean or its approximation then. No
        other operation of the group may start until the futures of all buckets up to the last one are complete. With
        factors, it waits for the messages that the calls for earlier buckets have started, and all futures are complete
        when the call for the last bucket returns.
        """
        is_exact = self._updates < self._exact_updates
        self._updates += bucket.is_last()
        return self._blocks.reduce(bucket) if is_exact else self._reduce_as_factors(bucket)

    @torch.no_grad()
    def _reduce_as_factors(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future[torch.Tensor]()
        self._under_way.append(self._average(bucket, future))
        # The order of messages depends on the order of the buckets only, so that it is the same on all ranks.
        self._advance()
        while bucket.is_last() and self._under_way:
            self._advance()
        return future

    def _advance(self) -> None:
        """Take one step with each bucket, the oldest first: wait for its message, and start the next one."""
        ended = [one for one in self._under_way if next(one, _ENDED) is _ENDED]
        self._under_way = [one for one in self._under_way if one not in ended]

    def _average(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]) -> Iterator[None]:
        """Average a bucket, and complete its future. At each `yield`, a message is under way."""
        pairs, buffer = list(zip(bucket.parameters(), bucket.gradients(), strict=True)), bucket.buffer()
        matrices = [(self._find_matrix(one, gradient), gradient) for one, gradient in pairs if saves_bytes(one.shape)]
        whole = [(one, gradient) for one, gradient in pairs if not saves_bytes(one.shape)]

        first = _Message(
            [matrix.compute_p(gradient) for matrix, gradient in matrices]
            + [self._add_unsent(one, gradient) for one, gradient in whole],
            self._group,
        )
        yield from first.exchange()
        for (one, gradient), mean, error in zip(whole, first.means[len(matrices) :], first.errors[len(matrices) :]):
            gradient.copy_(mean)
            self._unsent[one] = error

        if matrices:
            factors = [matrix.compute_q(mean) for (matrix, _), mean in zip(matrices, first.means)]
            second = _Message(factors, self._group)
            yield from second.exchange()
            for (matrix, gradient), q, mean, error in zip(matrices, factors, second.means, second.errors, strict=True):
                matrix.write_approximation(q - error, mean, gradient)
        future.set_result(buffer)

    def _add_unsent(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of a gradient and of what was not sent of it before: fp32."""
        unsent = self._blocks.take_unsent(parameter) if parameter not in self._unsent else self._unsent[parameter]
        return gradient.float() if unsent is None else gradient + unsent.view(gradient.shape)

    def _find_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Matrix:
        if parameter not in self._matrices:
            unsent, shape = self._blocks.take_unsent(parameter), _matrix_shape(parameter.shape)
            start = gradient.new_zeros(shape) if unsent is None else unsent.view(shape).to(gradient.dtype)
            self._matrices[parameter] = Matrix(start, self._generator)
        return self._matrices[parameter]


def count_numbers(shape: torch.Size) -> int:
    """Return how many numbers are sent for a gradient of this shape: those of its factors, or of itself if fewer.

    The first dimension is the rows, and all others together are the columns: (rows + columns) * min(rows, columns,
    RANK), at most rows * columns. A gradient with one dimension is sent as it is.
    """
    rows, columns = _matrix_shape(shape)
    return min((rows + columns) * min(rows, columns, RANK), rows * columns)


def saves_bytes(shape: torch.Size) -> bool:
    """Return whether a gradient's factors have fewer numbers than the gradient itself.

    The result is False for a gradient with one dimension.
    """
    return count_numbers(shape) < shape.numel()


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (rows, columns) of a gradient as a matrix: its first dimension, and all others together."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(1, rows)
