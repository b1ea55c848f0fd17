"""Averaging parameters every H updates, instead of gradients at every one: H times fewer bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


class ParameterAverager:
    """Local SGD (Stich 2018, arXiv:1805.09767): ranks train apart, and meet every `every` updates.

    The model must not be wrapped in DistributedDataParallel, or its gradients must be kept apart with no_sync(). At
    the first call all ranks should hold equal parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], every: int, group: dist.ProcessGroup | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._parameters = [parameter.detach() for parameter in parameters]
        self._every = every
        self._group = group
        self._updates = 0

    def after_update(self, last: bool = False) -> bool:
        """To be called after each optimizer step; averages at every H-th and at the last. Whether it did."""
        self._updates += 1
        due = self._updates % self._every == 0 or last
        if due:
            self.average()
        return due

    def average(self) -> None:
        """Replace the parameters by their mean over the ranks, in one message for each type."""
        for dtype in {parameter.dtype for parameter in self._parameters}:
            tensors = [parameter for parameter in self._parameters if parameter.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._group)
            means = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, mean in zip(tensors, means, strict=True):
                tensor.copy_(mean.view(tensor.shape))
