"""Gradients in fewer bytes: communication hooks for DistributedDataParallel, over any backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from cpuft.comm.gradients.blocks import BlockReducer
from cpuft.comm.gradients.powersgd import PowerSGD
from cpuft.config import COMPRESSIONS
from cpuft.errors import CpuftError, near_names

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _average_in_half(
    dtype: torch.dtype, group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, sent as bf16 or fp16.

    Gradients are divided first, so that fp16's sum over many ranks does not overflow. torch's own hooks do the same,
    but DDP refuses bf16_compress_hook by its name wherever there is no NCCL.
    """
    buffer = bucket.buffer()
    # To the buffer itself where it has that type already.
    half = buffer.to(dtype).div_(group.size())
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
    compression: none; bf16 or fp16: half the bytes of float32 gradients; int8: a quarter, blocks of 8-bit numbers with
        error feedback; powersgd: the factors of a rank-16 approximation with error feedback, for slow networks, and
        bf16 wherever that is fewer bytes.

    Raises
    ------
    CpuftError: no such compression.
    """
    if compression == "none":
        return lambda bucket: allreduce_hook(group, bucket)
    if compression in _HALVES:
        return functools.partial(_average_in_half, _HALVES[compression], group)
    if compression == "int8":
        return BlockReducer(group).reduce
    if compression == "powersgd":
        return PowerSGD(group).reduce
    raise CpuftError(f"no gradient compression {compression}: {near_names(compression, COMPRESSIONS[1:])}")


def choose_compression(asked: str, precision: str) -> str:
    """What gradients are sent as: what was asked for; `auto` is bf16 where training is bf16."""
    return asked if asked != "auto" else "bf16" if precision == "bf16" else "none"


def narrow(gradient: torch.Tensor, compression: str) -> torch.Tensor:
    """Rows of a gradient in the type that they are sent as; themselves when they have that type."""
    return gradient.to(_HALVES.get(compression, gradient.dtype))


def gradient_type(compression: str) -> str:
    """torch's name of the type that most bytes have on their way."""
    return str(_HALVES.get(compression, torch.float32)).removeprefix("torch.")


def compress_gradients(model: DistributedDataParallel, compression: str) -> None:
    """Make a wrapped model send its gradients compressed. To be called once, before the first backward."""
    reduce = make_reduce(compression, model.process_group)
    # A lambda has no annotations: DDP compares them with types, and postponed ones are text.
    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))
