"""powersgd (Vogels et al. 2019, arXiv:1905.13727): low-rank factors of gradients are sent with error feedback.

P is sent as blocks of 4-bit codes, Q of 8-bit codes; the first EXACT_UPDATES updates send int8 blocks instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from cpuft.comm.compression.int8 import BlockMean, BlockReducer, encoded_bytes
from cpuft.comm.process_group import ProgressThread, QueuedWork
from cpuft.kernels import int64_array, kernels_for

RANK = 12
"""Rows of the factors. The paper trains with 2 (ResNet-18) and 4 (LSTM), for hundreds of epochs. With 16 rows, which
send a third more bytes, the metric differed from that of exact gradients by -0.0010 on MRPC and -0.0016 on SST-2, and
with 12 rows by -0.0010 and -0.0018 (five seeds each, with 4 bits also for gradients that are sent whole)."""
P_BITS = 4
"""Bits of a code of P, which only says in which directions Q is measured, and of embedding rows."""
Q_BITS = 8
"""Bits of a code of Q, and of the gradients that are sent whole with it. If Q had 4 bits, too, the metric on MRPC was
-0.0055 (five seeds, 16 rows)."""
EXACT_UPDATES = 6
"""Updates at the beginning whose gradients are sent as int8 blocks. After 63 updates of SST-2 with 16 rows, the
parameters' distance from the exact ones was 35 % of the exact change without these updates, and 23 % with them."""


class Matrices:
    """The approximations P^T Q of several gradients in a bucket, and what has not been sent of these gradients yet.

    In each update, call `compute_p`, average its result over the ranks, then the same with `compute_q`, and then
    `write_approximations`. Factors have r = min(rows, columns, RANK) rows, which belong to the singular vectors of the
    gradient, the largest one first. All factors lie in one tensor, and each function is one call of a kernel: tensors
    and calls for each gradient would take a fifth more time.

    `starts` are the indices of the gradients in the bucket's buffer, and `generator` has the same state on all ranks.
    `unsent` is in the type of the gradients, one after another, and changed in place; in bf16, each update rounds it by
    at most 0.2 % of each number, and this error is not sent later.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], starts: Sequence[int], unsent: torch.Tensor, generator: torch.Generator
    ) -> None:
        self._shapes, self._starts, self._unsent = shapes, int64_array(starts), unsent
        factor_rows = [min(*shape, RANK) for shape in shapes]
        self.p_shapes = [(rank, rows) for rank, (rows, _) in zip(factor_rows, shapes, strict=True)]
        self.q_shapes = [(rank, columns) for rank, (_, columns) in zip(factor_rows, shapes, strict=True)]
        rows, columns = ([shape[i] for shape in shapes] for i in (0, 1))
        self._sizes = int64_array(rows), int64_array(columns), int64_array(factor_rows), len(shapes)
        # From the second update on, the last update's factors, to which the next ones are close (the paper's warm
        # start). torch draws normal numbers in fp32 differently with AVX2 and AVX-512.
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).float() for shape in self.q_shapes]
        self._q = torch.cat([torch.empty(0), *(one.view(-1) for one in drawn)])
        self._p = torch.empty(sum(rank * rows for rank, rows in self.p_shapes))
        """Orthonormal rows that span the mean of each P."""
        self._sent: torch.Tensor | None = None
        """What this rank has sent of each Q since the last update; P^T times this is still part of `_unsent`."""

    @property
    def unsent(self) -> list[torch.Tensor]:
        """What has not been sent so far of each gradient: fp32, shape (rows, columns)."""
        unsent = _split(self._unsent.float(), self._shapes)
        if self._sent is None:
            return unsent
        factors = zip(unsent, _split(self._p, self.p_shapes), _split(self._sent, self.q_shapes), strict=True)
        return [one - p.T @ sent for one, p, sent in factors]

    def compute_p(self, buffer: torch.Tensor) -> torch.Tensor:
        """Add gradients of the contiguous buffer to what is unsent; return this rank's P: fp32, flat, of `p_shapes`."""
        factors, dtype = torch.empty_like(self._p), buffer.dtype
        kernels = kernels_for(buffer)
        if kernels is not None:
            left = None if self._sent is None else self._p
            arrays = buffer, self._starts, self._unsent, left, self._sent, self._q, factors
            kernels.run("make_first_factors", dtype, *arrays, *self._sizes)
            return factors
        gradients, unsents = self._split_buffer(buffer), _split(self._unsent, self._shapes)
        sent = [None] * len(unsents) if self._sent is None else _split(self._sent, self.q_shapes)
        parts = (_split(self._p, self.p_shapes), _split(self._q, self.q_shapes), _split(factors, self.p_shapes))
        for gradient, unsent, own, p, q, factor in zip(gradients, unsents, sent, *parts, strict=True):
            summed = unsent.float() + gradient
            unsent.copy_(summed if own is None else summed.addmm_(p.T, own, alpha=-1))
            torch.mm(orthonormalise(q, dtype), unsent.float().T, out=factor)
        return factors

    def compute_q(self, means: torch.Tensor) -> torch.Tensor:
        """Return this rank's Q, fp32, flat, of `q_shapes`, for the mean of P after `compute_p`, which is contiguous."""
        factors, self._sent = torch.empty_like(self._q), None
        kernels = kernels_for(self._unsent)
        if kernels is not None:
            arrays = means, self._p, self._unsent, factors
            kernels.run("make_second_factors", self._unsent.dtype, *arrays, *self._sizes)
            return factors
        parts = (_split(one, self.p_shapes) for one in (means, self._p))
        others = _split(self._unsent, self._shapes), _split(factors, self.q_shapes)
        for mean, p, unsent, factor in zip(*parts, *others, strict=True):
            torch.mm(p.copy_(orthonormalise(mean, unsent.dtype)), unsent.float(), out=factor)
        return factors

    def write_approximations(self, sent: torch.Tensor, means: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write P^T Q into the gradients in the bucket's buffer. This rank's part of it is no longer unsent.

        `sent` is what `compute_q` has returned without what rounding has left out, and `means` the mean of what all
        ranks have sent. All three are contiguous; `sent` and `means` are stored, not copied: do not change them later.
        """
        self._sent, self._q = sent, means
        kernels = kernels_for(buffer)
        if kernels is not None:
            kernels.run("write_products", buffer.dtype, self._p, means, buffer, self._starts, *self._sizes)
            return
        factors = _split(self._p, self.p_shapes), _split(means, self.q_shapes)
        for p, q, gradient in zip(*factors, self._split_buffer(buffer), strict=True):
            gradient.copy_(p.T @ q)

    def _split_buffer(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        places = zip(self._starts, self._shapes, strict=True)
        return [buffer[start : start + rows * columns].view(rows, columns) for start, (rows, columns) in places]


def _split(numbers: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    parts = torch.split(numbers, [rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def orthonormalise(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return orthonormal rows that span those of a factor, rounded to `dtype`: fp32, in the factor's shape.

    The factor is fp32, with at least as many columns as rows. A row that depends on those before it is replaced by one
    that is orthogonal to them. All ranks need the same rows: kernels give the same bits on all CPUs. NaNs stay NaNs.
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
    for _ in range(2):
        rows[i] -= (rows[:i] @ rows[i]) @ rows[:i]
    length: torch.Tensor = rows[i].norm()
    return length


class _Bucket:
    """A bucket of gradients, of which factors are sent, and the small ones whole, with what was unsent before."""

    def __init__(self, bucket: GradBucket, unsent: torch.Tensor, generator: torch.Generator) -> None:
        parameters = bucket.parameters()
        sizes = [one.numel() for one in parameters]
        starts, before = [0, *accumulate(sizes)], torch.split(unsent, sizes)
        factored, whole = list[int](), list[int]()
        for number, one in enumerate(parameters):
            (factored if saves_bytes(one.shape) else whole).append(number)
        shapes = [_matrix_shape(parameters[number].shape) for number in factored]
        kept, self._unsent = (
            torch.cat([torch.empty(0), *(before[number] for number in numbers)]) for numbers in (factored, whole)
        )
        """What was not sent of the gradients that are sent whole, one after another."""
        kept = kept.to(bucket.buffer().dtype)
        self.matrices = Matrices(shapes, [starts[number] for number in factored], kept, generator)
        self._whole = [(starts[number], sizes[number]) for number in whole]

    def begin(self, buffer: torch.Tensor) -> None:
        self._buffer, self.p = buffer, self.matrices.compute_p(buffer)
        self._unsent += torch.cat([torch.empty(0), *self._list_whole()])

    def compute_second(self, means: torch.Tensor) -> torch.Tensor:
        """Return what is sent second, for the means of P: Q, and then the gradients that are sent whole."""
        return torch.cat([self.matrices.compute_q(means), self._unsent])

    def finish(self, sent: torch.Tensor, means: torch.Tensor, errors: torch.Tensor) -> None:
        """Write the means into the bucket; `errors` are what they lack of this rank's numbers, and `sent` the rest."""
        count = len(means) - len(self._unsent)
        self.matrices.write_approximations(sent[:count], means[:count], self._buffer)
        self._unsent = errors[count:]
        parts = torch.split(means[count:], [size for _, size in self._whole])
        for gradient, mean in zip(self._list_whole(), parts, strict=True):
            gradient.copy_(mean)
        del self._buffer, self.p  # copies of gradients are free before the next update makes others

    def _list_whole(self) -> list[torch.Tensor]:
        return [self._buffer[start : start + size] for start, size in self._whole]


SMALL_SHARE = 0.5
"""A last bucket with fewer numbers than this share of the bucket before it shares that one's messages."""


class PowerSGD:
    """Averages buckets over a group's ranks: in the first updates as int8 blocks, then as factors.

    Each update has the same buckets. P is computed in the backward pass, and everything else by a thread, so that the
    backward pass waits for no message. Gradients that factors would not make smaller stay int8 blocks. One object
    belongs to one model.
    """

    def __init__(self, group: dist.ProcessGroup, exact_updates: int = EXACT_UPDATES) -> None:
        self._group, self._exact_updates = group, exact_updates
        self._generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._blocks, self._thread = BlockReducer(group), ProgressThread("powersgd")
        self._updates = 0
        """Updates of which the last bucket has been given."""
        self._sizes: dict[torch.Tensor | None, int] = {None: 0}
        """Numbers in each bucket, in the order of buckets, by its first parameter; none of its own comes before."""
        self._error: Exception | None = None
        """The first error of the thread, after which it sends nothing any more."""
        self._held: list[tuple[_Bucket, QueuedWork]] = []
        """Buckets whose messages are sent together with those of the next one."""
        self._buckets: dict[torch.Tensor, _Bucket] = {}
        """Buckets by their first parameters."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; return a future of its buffer with about the mean, or an exchange's error.

        No other operation of the group may start before the futures of all buckets are complete.
        """
        is_exact, key = self._updates < self._exact_updates, bucket.parameters()[0]
        self._updates += bucket.is_last()
        # A small last bucket, such as that of the few parameters of another type, becomes ready soon after the one
        # before it. They share their messages.
        self._sizes[key] = bucket.buffer().numel()
        *_, (before, size), (_, last) = self._sizes.items()
        is_held = before is key and SMALL_SHARE * size > last
        return self._blocks.reduce(bucket) if is_exact else self._reduce_as_factors(bucket, is_held)

    @torch.no_grad()
    def _reduce_as_factors(self, bucket: GradBucket, is_held: bool) -> torch.futures.Future[torch.Tensor]:
        key, buffer = bucket.parameters()[0], bucket.buffer()
        if key not in self._buckets:
            self._buckets[key] = _Bucket(bucket, self._blocks.take_unsent(bucket), self._generator)
        one = self._buckets[key]
        one.begin(buffer)
        work = QueuedWork(buffer)
        future = work.get_future()
        self._held.append((one, work))
        if not is_held:
            held, self._held = self._held, []
            # These messages follow all messages of the buckets before, so that their order is the same on all ranks.
            self._thread.put(lambda: self._average([one for one, _ in held], [work for _, work in held]))
        return future

    def _average(self, buckets: Sequence[_Bucket], works: Sequence[QueuedWork]) -> None:
        try:
            if self._error is not None:  # other ranks may wait for what this rank could not send
                raise self._error
            first = [one.p for one in buckets]
            means = self._send(first, P_BITS)[0] if any(len(one) for one in first) else first
            second = [one.compute_second(mean) for one, mean in zip(buckets, means, strict=True)]
            means, errors = self._send(second, Q_BITS)
            for one, own, mean, error in zip(buckets, second, means, errors, strict=True):
                one.finish(own - error, mean, error)
        except Exception as failure:  # whoever waits for the futures raises it
            self._error = failure
            for work in works:
                work.fail(failure)
        else:
            for work in works:
                work.complete()

    def _send(self, parts: Sequence[torch.Tensor], bits: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Send one-dimensional tensors as one message; return their means, and what these lack of this rank's."""
        blocks, sizes = BlockMean(torch.cat(list(parts)), self._group, bits=bits), [len(one) for one in parts]
        blocks.send()
        blocks.average_share()
        return torch.split(blocks.finish(), sizes), torch.split(blocks.error, sizes)


def count_numbers(shape: torch.Size) -> int:
    """Return how many numbers are sent for a gradient of this shape: (rows + columns) * min(rows, columns, 12) in its
    factors, or rows * columns if that is less; columns are all dimensions but the first.
    """
    rows, columns = _matrix_shape(shape)
    return min((rows + columns) * min(rows, columns, RANK), rows * columns)


def count_factor_bytes(shapes: Iterable[torch.Size], ranks: int) -> int:
    """Return the bytes that a rank sends, and receives, with one bucket; each further one adds up to 392 * `ranks`."""
    first = second = 0
    for shape in shapes:
        rows, columns = _matrix_shape(shape)
        factor_rows = min(rows, columns, RANK)
        first += rows * factor_rows if saves_bytes(shape) else 0
        second += columns * factor_rows if saves_bytes(shape) else rows * columns
    return (encoded_bytes(first, ranks, P_BITS) if first else 0) + encoded_bytes(second, ranks, Q_BITS)


def saves_bytes(shape: torch.Size) -> bool:
    """Return whether `count_numbers` is less than the gradient's own numbers; False if it has one dimension."""
    return count_numbers(shape) < shape.numel()


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(1, rows)
