"""powersgd (Vogels et al. 2019, arXiv:1905.13727): low-rank factors of gradients are sent as blocks of codes with 4
bits (P) and 8 bits (Q), with error feedback.

The first updates send int8 blocks of whole gradients instead, because factors cost most accuracy there (see
EXACT_UPDATES).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cpuft.comm.compression.int8 import BlockMean, BlockReducer, encoded_bytes
from cpuft.comm.process_group import ProgressThread, QueuedWork
from cpuft.kernels import CArray, address_array, int64_array, kernels_for

RANK = 12
"""Rows of the factors. The paper trains with 2 (ResNet-18) and 4 (LSTM), for hundreds of epochs. Factors of 16 rows,
which send a third more bytes, had the same metric: -0.0010 on MRPC and -0.0016 on SST-2, compared with exact gradients,
and 12 rows -0.0010 and -0.0018 (five seeds each, with 4 bits also for gradients that are sent whole)."""
P_BITS = 4
"""Bits of a code of P, which only says in which directions Q is measured. Embedding rows have as many."""
Q_BITS = 8
"""Bits of a code of Q, and of the gradients that are sent whole with it. If Q had 4 bits, too, the metric on MRPC was
-0.0055 (five seeds, 16 rows)."""
EXACT_UPDATES = 6
"""Updates at the beginning whose gradients are sent as int8 blocks. With 16 rows and without these updates, the
parameters ended after 63 updates of SST-2 at a distance from the exact ones that was 35 % of the exact change, and 23 %
with them."""


class Matrix:
    """The approximation P^T Q of a parameter's gradient, and what has not been sent of the gradient yet.

    In each update, call `compute_p`, average its result over the ranks, then the same with `compute_q`, and then
    `write_approximations`. The factors have r = min(rows, columns, RANK) rows. Their rows belong to the singular
    vectors of the gradient, the largest one first, so that the numbers of a block are of similar size.

    Parameters
    ----------
    unsent: what has not been sent so far: in the type of the gradients, contiguous, shape (rows, columns). Each update
        changes it in place. In bf16, each update rounds it, and the rounding error is not sent later. It is at most
        0.2 % of each number.
    generator: makes the first Q; in the same state on all ranks.
    """

    def __init__(self, unsent: torch.Tensor, generator: torch.Generator) -> None:
        self._unsent = unsent
        self.rows, self.columns = unsent.shape
        self.factor_rows = min(*unsent.shape, RANK)
        # From the second update on, the last update's factor, to which the next one is close (the paper's warm start).
        # torch draws normal numbers in fp32 differently with AVX2 and AVX-512.
        self._q = torch.randn(self.factor_rows, self.columns, generator=generator, dtype=torch.float64).float()
        self._p = torch.empty(self.factor_rows, self.rows)
        """Orthonormal rows that span the mean of P."""
        self._sent: torch.Tensor | None = None
        """What this rank has sent of Q since the last update; P^T times this is still part of `_unsent`."""

    @property
    def unsent(self) -> torch.Tensor:
        """What has not been sent so far: fp32, shape (rows, columns)."""
        unsent = self._unsent.float()
        return unsent if self._sent is None else unsent - self._p.T @ self._sent


# Each of the following functions handles all matrices of a bucket in one call of a kernel: one call for each matrix
# would take a tenth to a fifth more time. All gradients have the type of what is unsent.


def compute_p(matrices: Sequence[Matrix], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add a gradient to what is unsent of each matrix, and return this rank's P of each: fp32, shape (r, rows).

    Parameters
    ----------
    gradients: each has rows * columns numbers in any shape. They do not change.
    """
    factors = [torch.empty(one.factor_rows, one.rows) for one in matrices]
    if not matrices:
        return factors
    dtype, gradients = gradients[0].dtype, [gradient.contiguous() for gradient in gradients]
    kernels = kernels_for(gradients[0])
    if kernels is not None:
        lefts = [None if one._sent is None else one._p for one in matrices]
        arrays = gradients, [one._unsent for one in matrices], lefts, [one._sent for one in matrices]
        addresses = [address_array(array) for array in (*arrays, [one._q for one in matrices], factors)]
        kernels.run("make_first_factors", dtype, *addresses, *_list_shapes(matrices), len(matrices))
        return factors
    for one, gradient, factor in zip(matrices, gradients, factors, strict=True):
        basis = orthonormalise(one._q, dtype)
        summed = one._unsent.float() + gradient.view(one._unsent.shape)
        one._unsent.copy_(summed if one._sent is None else summed.addmm_(one._p.T, one._sent, alpha=-1))
        torch.mm(basis, one._unsent.float().T, out=factor)
    return factors


def compute_q(matrices: Sequence[Matrix], means: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's Q of each matrix for the mean of its P: fp32, shape (r, columns)."""
    factors = [torch.empty(one.factor_rows, one.columns) for one in matrices]
    if not matrices:
        return factors
    dtype, means = matrices[0]._unsent.dtype, [mean.contiguous() for mean in means]
    kernels = kernels_for(matrices[0]._unsent)
    if kernels is not None:
        arrays = means, [one._p for one in matrices], [one._unsent for one in matrices], factors
        addresses = [address_array(array) for array in arrays]
        kernels.run("make_second_factors", dtype, *addresses, *_list_shapes(matrices), len(matrices))
    for one, mean, factor in zip(matrices, means, factors, strict=True):
        if kernels is None:
            one._p = orthonormalise(mean, dtype)
            torch.mm(one._p, one._unsent.float(), out=factor)
        one._sent = None
    return factors


def write_approximations(
    matrices: Sequence[Matrix],
    sent: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> None:
    """Write P^T Q into the gradient of each matrix. This rank's part of it is no longer unsent.

    Parameters
    ----------
    sent: the Q that `compute_q` has returned for each, without what rounding has left out of it.
    means: of what all ranks have sent of Q, the same on all ranks.
    gradients: contiguous, rows * columns numbers each in any shape. They are overwritten.
    """
    for one, own, mean in zip(matrices, sent, means, strict=True):
        one._sent, one._q = own.contiguous(), mean.contiguous()
    kernels = kernels_for(gradients[0]) if gradients else None
    if kernels is not None:
        arrays = [one._p for one in matrices], [one._q for one in matrices], gradients
        addresses = [address_array(array) for array in arrays]
        kernels.run("write_products", gradients[0].dtype, *addresses, *_list_shapes(matrices), len(matrices))
        return
    for one, gradient in zip(matrices, gradients, strict=True):
        gradient.view(one._unsent.shape).copy_(one._p.T @ one._q)


def _list_shapes(matrices: Sequence[Matrix]) -> tuple[CArray, CArray, CArray]:
    """Return the rows and columns of matrices, and the rows of their factors, for a kernel."""
    shapes = [(one.rows, one.columns, one.factor_rows) for one in matrices]
    rows, columns, factor_rows = zip(*shapes, strict=True)
    return int64_array(rows), int64_array(columns), int64_array(factor_rows)


def orthonormalise(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return orthonormal rows that span those of a factor, rounded to `dtype`: fp32, in the factor's shape.

    A row that depends on those before it is replaced by one that is orthogonal to them. All ranks need the same rows:
    kernels give the same bits on all CPUs. NaNs stay NaNs.

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


class _Message:
    """Tensors whose means over the ranks are computed as one message of blocks. Making one encodes the tensors.

    `bits`: of a code, 8 or 4.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bits: int) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._blocks = BlockMean(torch.cat([tensor.reshape(-1) for tensor in tensors]), group, bits=bits)

    def average(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Send the tensors, and wait for their means; return these, and what they lack of this rank's tensors."""
        self._blocks.send()
        self._blocks.average_share()
        return self._split(self._blocks.finish()), self._split(self._blocks.error)

    def _split(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(numbers, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


@dataclass
class _Bucket:
    """A bucket of gradients of which factors are sent."""

    matrices: list[Matrix]
    gradients: list[torch.Tensor]
    """Of the matrices."""
    whole: list[tuple[torch.Tensor, torch.Tensor]]
    """The other parameters, and their gradients, which are sent as they are."""
    factors: list[torch.Tensor]
    """P of the matrices."""
    sums: list[torch.Tensor]
    """The gradients that are sent whole, with what was not sent of them before."""
    work: QueuedWork
    """Is done when the means are in the bucket's buffer."""


SMALL_SHARE = 0.5
"""A last bucket with fewer numbers than this share of the bucket before it shares that one's messages."""


class PowerSGD:
    """Averages DDP's buckets over a group's ranks: in the first updates as int8 blocks, then as factors.

    P is sent as blocks of 4-bit codes, Q as int8 blocks. Gradients that factors would not make smaller are sent as int8
    blocks in all updates. P is computed in the backward
    pass, and everything else by a thread, so that the backward pass waits for no message. One object belongs to one
    model.

    Parameters
    ----------
    exact_updates: number of updates that are sent as int8 blocks of whole gradients.
    """

    def __init__(self, group: dist.ProcessGroup, exact_updates: int = EXACT_UPDATES) -> None:
        self._group, self._exact_updates = group, exact_updates
        self._generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._blocks, self._thread = BlockReducer(group), ProgressThread("powersgd")
        self._updates = 0
        """Updates of which the last bucket has been given."""
        self._sizes = list[int]()
        """Numbers in the buckets that have been given in this update."""
        self._small_after = 0
        """Number of buckets before the last bucket of the previous update, if that bucket was small; otherwise 0."""
        self._error: Exception | None = None
        """The first error of the thread, after which it sends nothing any more."""
        self._held: list[_Bucket] = []
        """Buckets whose messages are sent together with those of the next one."""
        self._matrices: dict[torch.Tensor, Matrix] = {}
        self._unsent: dict[torch.Tensor, torch.Tensor] = {}
        """Parameter -> what was not sent of its gradient, for gradients that are sent whole."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; a DDP communication hook. All ranks call it for the same buckets in the same order.

        It does not wait for messages. It returns a future of the bucket's buffer, in its own type, which holds the mean
        or its approximation when the future is complete. No other operation of the group may start before the futures
        of all buckets are complete. If a rank is lost, waiting for the future raises the error of the operation that
        failed.
        """
        is_exact = self._updates < self._exact_updates
        # A small last bucket, such as that of the few parameters of another type, becomes ready soon after the one
        # before it. They share their messages.
        self._sizes.append(bucket.buffer().numel())
        is_next_small = self._small_after == len(self._sizes)
        if bucket.is_last():
            is_small = len(self._sizes) > 1 and SMALL_SHARE * self._sizes[-2] > self._sizes[-1]
            self._small_after = len(self._sizes) - 1 if is_small else 0
            self._updates, self._sizes = self._updates + 1, []
        is_held = is_next_small and not is_exact and not bucket.is_last()
        return self._blocks.reduce(bucket) if is_exact else self._reduce_as_factors(bucket, is_held)

    @torch.no_grad()
    def _reduce_as_factors(self, bucket: GradBucket, is_held: bool) -> torch.futures.Future[torch.Tensor]:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        of_matrices = [(one, gradient) for one, gradient in pairs if saves_bytes(one.shape)]
        matrices = [self._find_matrix(one, gradient) for one, gradient in of_matrices]
        gradients = [gradient for _, gradient in of_matrices]
        whole = [(one, gradient) for one, gradient in pairs if not saves_bytes(one.shape)]
        factors, sums = compute_p(matrices, gradients), self._add_unsent(whole)
        self._held.append(_Bucket(matrices, gradients, whole, factors, sums, QueuedWork(bucket.buffer())))
        future = self._held[-1].work.get_future()
        if not is_held:
            buckets, self._held = self._held, []
            # These messages follow all messages of the buckets before, so that their order is the same on all ranks.
            self._thread.put(lambda: self._average(buckets))
        return future

    def _average(self, buckets: Sequence[_Bucket]) -> None:
        """Average buckets together, and complete their works."""
        try:
            if self._error is not None:  # other ranks may wait for what this rank could not send
                raise self._error
            first = [factor for one in buckets for factor in one.factors]
            means = iter(_Message(first, self._group, P_BITS).average()[0] if first else [])
            factors = [compute_q(one.matrices, [next(means) for _ in one.matrices]) for one in buckets]
            second = [tensor for one, own in zip(buckets, factors, strict=True) for tensor in own + one.sums]
            pairs = zip(*_Message(second, self._group, Q_BITS).average(), strict=True)
            for one, own in zip(buckets, factors, strict=True):
                of_matrices, of_whole = [next(pairs) for _ in own], [next(pairs) for _ in one.whole]
                sent = [factor - error for factor, (_, error) in zip(own, of_matrices, strict=True)]
                write_approximations(one.matrices, sent, [mean for mean, _ in of_matrices], one.gradients)
                for (parameter, gradient), (mean, error) in zip(one.whole, of_whole, strict=True):
                    gradient.copy_(mean)
                    self._unsent[parameter] = error
        except Exception as failure:  # whoever waits for the futures raises it
            self._error = failure
            for one in buckets:
                one.work.fail(failure)
        else:
            for one in buckets:
                one.work.complete()

    def _add_unsent(self, whole: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return for each parameter the sum of its gradient and of what was not sent of it before: fp32."""
        if not whole:
            return []
        unsent = []
        for parameter, gradient in whole:
            if parameter not in self._unsent:
                exact = self._blocks.take_unsent(parameter)
                self._unsent[parameter] = torch.zeros(gradient.shape) if exact is None else exact.view(gradient.shape)
            unsent.append(self._unsent[parameter])
        return list(torch._foreach_add(unsent, [gradient for _, gradient in whole]))

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


def count_bytes(shapes: Iterable[torch.Size], ranks: int) -> int:
    """Return the bytes of the two messages for gradients of these shapes, in each direction of an exchange.

    If gradients are sent in several buckets, their messages are padded, and have up to 392 bytes more for each bucket
    and rank.
    """
    first = second = 0
    for shape in shapes:
        rows, columns = _matrix_shape(shape)
        factor_rows = min(rows, columns, RANK)
        first += rows * factor_rows if saves_bytes(shape) else 0
        second += columns * factor_rows if saves_bytes(shape) else rows * columns
    return (encoded_bytes(first, ranks, P_BITS) if first else 0) + encoded_bytes(second, ranks, Q_BITS)


def saves_bytes(shape: torch.Size) -> bool:
    """Return whether a gradient's factors have fewer numbers than the gradient itself.

    The result is False for a gradient with one dimension.
    """
    return count_numbers(shape) < shape.numel()


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (rows, columns) of a gradient as a matrix: its first dimension, and all others together."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(1, rows)
