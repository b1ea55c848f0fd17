"""PowerSGD (Vogels et al. 2019, arXiv:1905.13727): a gradient's factors are sent, and what they miss is kept for later.

torch's own hook starts collectives from callbacks. With several buckets their order differs between ranks, which then
wait for each other. Here all are started from backward, in the order of buckets, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

RANK = 4
"""Between the ranks 2 (ResNet-18) and 4 (LSTM) that the paper trains with."""

_WHOLE = torch.bfloat16


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

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._tensors, self._work = tensors, None
        if tensors:
            packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype).div_(group.size())
            self._means = torch.split(packed, [tensor.numel() for tensor in tensors])
            self._work = dist.all_reduce(packed, group=group, async_op=True)

    def wait(self) -> None:
        """Put the means in the place of the tensors."""
        if self._work:
            self._work.wait()
            for tensor, mean in zip(self._tensors, self._means, strict=True):
                tensor.copy_(mean.view(tensor.shape))


class PowerSGD:
    """Averages DDP's buckets over a group's ranks. Gradients whose factors are no fewer bytes go whole, as bf16."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self._kept: dict[torch.Tensor, Matrix] = {}
        # Of the buckets on their way.
        self._means: list[_Mean] = []
        self._matrices: list[tuple[Matrix, torch.Tensor]] = []
        self._ends: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A DDP hook. The futures of all buckets are complete when the last one's call returns."""
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        whole = [gradient for _, gradient in pairs if not is_worth_factors(gradient.shape)]
        matrices = [(self._keep(parameter), g) for parameter, g in pairs if is_worth_factors(g.shape)]
        factors = [matrix.project(gradient) for matrix, gradient in matrices]
        self._means += _Mean(whole, _WHOLE, self._group), _Mean(factors, torch.float32, self._group)
        self._matrices += matrices
        future = torch.futures.Future[torch.Tensor]()
        self._ends.append((future, bucket.buffer()))
        if bucket.is_last():
            self._finish()
        return future

    def _keep(self, parameter: torch.Tensor) -> Matrix:
        if parameter not in self._kept:
            self._kept[parameter] = Matrix(*_as_matrix(parameter.shape), self._generator)
        return self._kept[parameter]

    def _finish(self) -> None:
        for mean in self._means:
            mean.wait()
        _Mean([matrix.answer() for matrix, _ in self._matrices], torch.float32, self._group).wait()
        for matrix, gradient in self._matrices:
            matrix.settle(gradient)
        for future, buffer in self._ends:
            future.set_result(buffer)
        self._means, self._matrices, self._ends = [], [], []


def count_bytes(shape: torch.Size) -> int:
    """What a gradient of this shape travels as: its factors, in fp32, or itself as bf16."""
    rows, columns = _as_matrix(shape)
    factors = (rows + columns) * min(rows, columns, RANK)
    return min(factors * torch.float32.itemsize, rows * columns * _WHOLE.itemsize)


def is_worth_factors(shape: torch.Size) -> bool:
    """Whether a gradient's factors, in fp32, are fewer bytes than the gradient itself as bf16."""
    return count_bytes(shape) < shape.numel() * _WHOLE.itemsize


def _as_matrix(shape: torch.Size) -> tuple[int, int]:
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(1, rows)
