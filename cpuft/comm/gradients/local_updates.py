"""Averaging parameters every H updates, instead of gradients at every one: H times fewer bytes.

Local SGD (Stich 2018, arXiv:1805.09767): ranks train apart, and meet now and then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


@torch.no_grad()
def average_parameters(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace the parameters by their mean over the ranks, in one message for each type. A collective.

    The model must not exchange gradients as well: not wrapped in DistributedDataParallel, or inside no_sync().
    """
    kept = list(parameters)
    for dtype in {parameter.dtype for parameter in kept}:
        tensors = [parameter for parameter in kept if parameter.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
        means = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view(tensor.shape))
