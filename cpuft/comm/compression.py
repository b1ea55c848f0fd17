"""Gradients in fewer bytes: communication hooks for DistributedDataParallel, over any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from cpuft.errors import CpuftError, near_names

COMPRESSIONS = ("none", "bf16", "fp16", "powersgd")
POWERSGD_RANK = 4
"""Between the ranks 2 (ResNet-18) and 4 (LSTM) that PowerSGD (Vogels et al. 2019, arXiv:1905.13727) trains with."""
POWERSGD_START = 10
"""Updates with whole gradients first; torch asks for 2 at least, and its guide for a warm start."""

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfState:
    """What a 16-bit hook needs to know."""

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> None:
        self.dtype = dtype
        self.group = group


def average_in_half(state: HalfState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP hook: average a bucket of gradients over the ranks, sent as bf16 or fp16.

    Gradients are divided first, so that fp16's sum over many ranks does not overflow. torch's own hooks do the same,
    but DDP refuses bf16_compress_hook by its name wherever there is no NCCL.
    """
    group = state.group if state.group is not None else dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    if buffer.dtype == state.dtype:
        half = buffer.div_(group.size())
    else:
        half = torch.empty_like(buffer, dtype=state.dtype).copy_(buffer).div_(group.size())
    work = dist.all_reduce(half, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()

    def widen(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        summed = done.value()[0]
        return buffer if summed is buffer else buffer.copy_(summed)

    return future.then(widen)


Reduce = Callable[[Any], torch.futures.Future[torch.Tensor]]
"""Averages a DDP bucket over the ranks."""


def make_reduce(compression: str, group: dist.ProcessGroup) -> Reduce:
    """What averages buckets of gradients over the ranks of `group`.

    Parameters
    ----------
    compression: none; bf16 or fp16: half the bytes of float32 gradients; powersgd: the factors of a rank-4
        approximation with error feedback, for slow networks.

    Raises
    ------
    CpuftError: no such compression.
    """
    if compression == "none":
        return lambda bucket: allreduce_hook(group, bucket)
    if compression in _HALVES:
        half = HalfState(_HALVES[compression], group)
        return lambda bucket: average_in_half(half, bucket)
    if compression == "powersgd":
        state = powersgd.PowerSGDState(
            process_group=group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
        )
        return lambda bucket: powersgd.powerSGD_hook(state, bucket)
    raise CpuftError(f"no gradient compression {compression}: {near_names(compression, COMPRESSIONS)}")


def narrow(gradient: torch.Tensor, compression: str) -> torch.Tensor:
    """A gradient in the type that it is sent as; itself when it has that type."""
    return gradient.to(_HALVES.get(compression, gradient.dtype))


def gradient_type(compression: str) -> str:
    """torch's name of the type that most bytes have on their way."""
    return str(_HALVES.get(compression, torch.float32)).removeprefix("torch.")


def compress_gradients(model: DistributedDataParallel, compression: str) -> None:
    """Make a wrapped model send its gradients compressed. To be called once, before the first backward."""
    reduce = make_reduce(compression, model.process_group)
    # A lambda has no annotations: DDP compares them with types, and postponed ones are text.
    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))
