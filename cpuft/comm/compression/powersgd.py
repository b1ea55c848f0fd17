"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): a gradient's factors are sent, and what they miss is kept for later.

torch's own hook starts collectives from callbacks. With several buckets their order differs between ranks, which then
wait for each other. Here all are started from backward, in the order of buckets, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

RANK = 16
"""The paper trains with 2 (ResNet-18) and 4 (LSTM), for hundreds of epochs. Sixteen columns are a sixth of the bytes
of 8-bit blocks in MiniLM, and cost no more to work out than four."""

_SENT = torch.bfloat16
"""Of factors and of whole gradients. What rounding a factor misses is kept with all that it misses."""

_AHEAD = 2
"""Buckets whose first factors may be on their way while backward goes on."""


class Matrix:
    """A gradient's approximation P Q^T, and what of the gradient has not been sent yet, fp32, shape (rows, columns)."""

    def __init__(self, rows: int, columns: int, generator: torch.Generator) -> None:
        self.unsent = torch.zeros(rows, columns)
        # From the second update on the last one's factor, from which the next is not far (the paper's warm start).
        self.q = torch.randn(columns, min(rows, columns, RANK), generator=generator)
        self.p = torch.empty(0)

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of P."""
        self.unsent.add_(gradient.reshape(self.unsent.shape))
        self.p = self.unsent @ torch.linalg.qr(self.q).Q
        return self.p

    def answer(self) -> torch.Tensor:
        """This rank's part of Q, when P is all ranks' sum."""
        self.p = torch.linalg.qr(self.p).Q
        self.q = self.unsent.T @ self.p
        return self.q

    def settle(self, gradient: torch.Tensor) -> None:
        """Write the approximation into the gradient, when Q is all ranks' mean, and keep what it misses."""
        sent = self.p @ self.q.T
        self.unsent.sub_(sent)
        gradient.copy_(sent.view(gradient.shape))


class _Mean:
    """Tensors on their way to their means over the ranks, as one message."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._tensors, self._work = tensors, None
        if tensors:
            packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(_SENT).div_(group.size())
            self._means = torch.split(packed, [tensor.numel() for tensor in tensors])
            self._work = dist.all_reduce(packed, group=group, async_op=True)

    def wait(self) -> None:
        """Put the means in the place of the tensors."""
        if self._work:
            self._work.wait()
            for tensor, mean in zip(self._tensors, self._means, strict=True):
                tensor.copy_(mean.view(tensor.shape))


class _Moving:
    """A bucket on its way: its small gradients whole, of the others first P, then Q."""

    def __init__(self, bucket: GradBucket, keep: Callable[[torch.Tensor], Matrix], group: dist.ProcessGroup) -> None:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        self._buffer, self._group = bucket.buffer(), group
        self.future = torch.futures.Future[torch.Tensor]()
        self._matrices = [(keep(parameter), g) for parameter, g in pairs if is_worth_factors(g.shape)]
        first = [matrix.project(gradient) for matrix, gradient in self._matrices]
        self._means = [_Mean([g for _, g in pairs if not is_worth_factors(g.shape)], group), _Mean(first, group)]

    def answer(self) -> None:
        """Wait for all ranks' P, and send Q."""
        self._means[1].wait()
        self._means[1] = _Mean([matrix.answer() for matrix, _ in self._matrices], self._group)

    def finish(self) -> None:
        """Wait for everything, and write it into the bucket."""
        for mean in self._means:
            mean.wait()
        for matrix, gradient in self._matrices:
            matrix.settle(gradient)
        self.future.set_result(self._buffer)


class PowerSGD:
    """Averages DDP's buckets over a group's ranks. Gradients whose factors are no fewer bytes go whole. All as bf16."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._kept: dict[torch.Tensor, Matrix] = {}
        # Buckets whose first factors are on their way, and those whose second ones are.
        self._projected: list[_Moving] = []
        self._answered: list[_Moving] = []

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A DDP hook. The futures of all buckets are complete when the last one's call returns."""
        moving = _Moving(bucket, self._keep, self._group)
        self._projected.append(moving)
        while len(self._projected) > (0 if bucket.is_last() else _AHEAD):
            self._answered.append(self._projected.pop(0))
            self._answered[-1].answer()
        if bucket.is_last():
            for one in self._answered:
                one.finish()
            self._answered = []
        return moving.future

    def _keep(self, parameter: torch.Tensor) -> Matrix:
        if parameter not in self._kept:
            self._kept[parameter] = Matrix(*_as_matrix(parameter.shape), self._generator)
        return self._kept[parameter]


def count_numbers(shape: torch.Size) -> int:
    """What a gradient of this shape travels as: its factors, or itself."""
    rows, columns = _as_matrix(shape)
    return min((rows + columns) * min(rows, columns, RANK), rows * columns)


def count_bytes(shape: torch.Size) -> int:
    """What they take on their way."""
    return count_numbers(shape) * _SENT.itemsize


def is_worth_factors(shape: torch.Size) -> bool:
    """Whether a gradient's factors are fewer numbers than the gradient itself."""
    return count_numbers(shape) < shape.numel()


def _as_matrix(shape: torch.Size) -> tuple[int, int]:
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(1, rows)
