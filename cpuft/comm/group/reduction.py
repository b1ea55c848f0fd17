"""Reductions of tensors over ranks, whatever the library can reduce itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed import ReduceOp

from cpuft.comm.group.collectives import Collectives

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


def reduction_name(operation: object) -> str:
    """The name of a torch ReduceOp. NotImplementedError for the one (PREMUL_SUM) that only NCCL has."""
    for known, name in _NAMES.items():
        if operation == known:
            return name
    raise NotImplementedError(f"{operation} is NCCL's own: scale the tensor and use ReduceOp.SUM")


def all_reduce(library: Collectives, size: int, tensor: torch.Tensor, reduction: str) -> None:
    """Reduce a contiguous tensor of any shape over `size` ranks, in place.

    16-bit floats that the library cannot reduce travel as float32. Other types and reductions it lacks (bool, bitwise
    ones in oneCCL) are gathered and folded here: `size` times the memory and bytes, and rare.
    """
    base = "sum" if reduction == "avg" else reduction
    if tensor.numel() == 0:
        return
    if library.reduces(tensor.dtype, base):
        library.all_reduce(tensor.data_ptr(), tensor.numel(), tensor.dtype, base)
    elif tensor.dtype in (torch.bfloat16, torch.float16) and library.reduces(torch.float32, base):
        wide = tensor.float()
        library.all_reduce(wide.data_ptr(), wide.numel(), wide.dtype, base)
        tensor.copy_(wide)
    else:
        gathered = tensor.new_empty((size, *tensor.shape))
        library.all_gather(tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes)
        tensor.copy_(_fold(gathered, base))
    if reduction == "avg":
        divide(tensor, size)


def reduce_scatter(library: Collectives, rank: int, source: torch.Tensor, target: torch.Tensor, reduction: str) -> None:
    """Reduce `source` (size * n elements, contiguous) and leave the rank-th n elements in `target` (contiguous)."""
    base = "sum" if reduction == "avg" else reduction
    if target.numel() == 0:
        return
    size = source.numel() // target.numel()
    if library.reduces(source.dtype, base):
        library.reduce_scatter(source.data_ptr(), target.data_ptr(), target.numel(), source.dtype, base)
    else:
        whole = source.clone()
        all_reduce(library, size, whole, base)
        target.view(-1).copy_(whole.view(size, -1)[rank])
    if reduction == "avg":
        divide(target, size)


def divide(tensor: torch.Tensor, size: int) -> None:
    """Divide in place; integers towards zero, as C does."""
    if tensor.is_floating_point():
        tensor.div_(size)
    else:
        tensor.div_(size, rounding_mode="trunc")


def _fold(gathered: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce over the first dimension. Sums and products of bool are logical or and and, as C++ has them."""
    folds: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functools.reduce(folds[reduction], gathered.unbind(0))
