"""Collectives on tensors of any type, layout and size, on top of a backend that works on raw bytes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed import ReduceOp

from cpuft.comm.backends.base import Backend

Tensors = Sequence[torch.Tensor]

_REDUCTION_NAMES = {
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
    """Return the name that backends have for a torch ReduceOp: sum, avg, product, min, max, band, bor or bxor.

    Raises NotImplementedError: `operation` is none of these, for example PREMUL_SUM, which only NCCL has.
    """
    for known, name in _REDUCTION_NAMES.items():
        if operation == known:
            return name
    raise NotImplementedError(f"{operation} exists in NCCL only: scale the tensor and use ReduceOp.SUM")


@contextlib.contextmanager
def contiguous_in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor itself if it is contiguous, else a contiguous copy of it.

    The copy is written back into the tensor at the end of the context, unless that ends with an exception.
    """
    dense = tensor.contiguous()
    yield dense
    if dense is not tensor:
        tensor.copy_(dense)


def all_reduce(backend: Backend, size: int, tensor: torch.Tensor, reduction: str) -> None:
    """Reduce a contiguous tensor of any shape over the `size` ranks of a group, in place. Blocks until it is done.

    16-bit floats that the backend cannot reduce are sent as float32. Other types and reductions that it lacks (bool,
    and bitwise ones in oneCCL) are gathered and reduced here. This takes `size` times the memory and bytes, and is
    rare. An empty tensor is left alone. The sum of bools is their logical or, and their product the logical and.

    Parameters
    ----------
    reduction: a name that `reduction_name` returns. `avg` is the sum divided by `size`, with integers rounded towards
        zero.

    Raises RuntimeError: the backend fails, or torch cannot apply the reduction to the type (a bitwise one to floats,
    `avg` to bools).
    """
    base = "sum" if reduction == "avg" else reduction
    if tensor.numel() == 0:
        return
    if backend.can_reduce(tensor.dtype, base):
        backend.all_reduce(tensor.data_ptr(), tensor.numel(), tensor.dtype, base)
    elif tensor.dtype in (torch.bfloat16, torch.float16) and backend.can_reduce(torch.float32, base):
        wide = tensor.float()
        backend.all_reduce(wide.data_ptr(), wide.numel(), wide.dtype, base)
        tensor.copy_(wide)
    else:
        gathered = tensor.new_empty((size, *tensor.shape))
        backend.all_gather(tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes)
        tensor.copy_(_reduce_locally(gathered, base))
    if reduction == "avg":
        _divide(tensor, size)


def reduce_scatter_single(
    backend: Backend, rank: int, source: torch.Tensor, target: torch.Tensor, reduction: str
) -> None:
    """Reduce `source` over the ranks, and write the `rank`-th of its equal parts to `target`. Blocks until it is done.

    `source` does not change. Nothing happens if `target` is empty.

    Parameters
    ----------
    rank: this process's rank in the group.
    source: size * n elements for a group of `size` ranks, contiguous.
    target: n elements, contiguous; n also decides what `size` is.
    reduction: a name that `reduction_name` returns; `avg` rounds integers towards zero.

    Raises RuntimeError: the backend fails, or torch cannot apply the reduction to the type.
    """
    base = "sum" if reduction == "avg" else reduction
    if target.numel() == 0:
        return
    size = source.numel() // target.numel()
    if backend.can_reduce(source.dtype, base):
        backend.reduce_scatter(source.data_ptr(), target.data_ptr(), target.numel(), source.dtype, base)
    else:
        whole = source.clone()
        all_reduce(backend, size, whole, base)
        target.view(-1).copy_(whole.view(size, -1)[rank])
    if reduction == "avg":
        _divide(target, size)


def _divide(tensor: torch.Tensor, size: int) -> None:
    """Divide in place; integers are rounded towards zero, as in C."""
    if tensor.is_floating_point():
        tensor.div_(size)
    else:
        tensor.div_(size, rounding_mode="trunc")


def _reduce_locally(gathered: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce over the first dimension. Sums and products of bool are logical or and and, as in C++."""
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functools.reduce(functions[reduction], gathered.unbind(0))


def reduce_scatter(backend: Backend, rank: int, pieces: Tensors, target: torch.Tensor, reduction: str) -> None:
    """Reduce each piece over the ranks, and write the `rank`-th one to `target`. Blocks until it is done.

    The pieces do not change. If their sizes differ, all of them are reduced on every rank, which sends twice as many
    bytes.

    Parameters
    ----------
    rank: this process's rank in the group.
    pieces: one tensor for each rank, of one type; the r-th one has the same shape on all ranks.
    target: has the shape of the `rank`-th piece, and any layout.
    reduction: a name that `reduction_name` returns; `avg` rounds integers towards zero.

    Raises RuntimeError: the backend fails, or torch cannot apply the reduction to the type.
    """
    whole = torch.cat([piece.reshape(-1) for piece in pieces])
    if len({piece.numel() for piece in pieces}) == 1:
        with contiguous_in_place(target) as dense:
            reduce_scatter_single(backend, rank, whole, dense, reduction)
        return
    all_reduce(backend, len(pieces), whole, reduction)
    own = torch.split(whole, [piece.numel() for piece in pieces])[rank]
    target.copy_(own.view(target.shape))


def broadcast(backend: Backend, tensor: torch.Tensor, root: int) -> None:
    """Copy the contiguous tensor of rank `root` of the group into that of every rank. An empty tensor is left alone."""
    if tensor.numel():
        backend.broadcast(tensor.data_ptr(), tensor.nbytes, root)


def all_gather_single(backend: Backend, source: torch.Tensor, target: torch.Tensor) -> None:
    """Write the tensors of all ranks one after another to `target`. Blocks until it is done.

    Parameters
    ----------
    source: this rank's n elements; as many on every rank.
    target: size * n elements of the same type, in any layout. Sizes are not checked. If it is empty, nothing happens.
    """
    if target.numel() == 0:
        return
    dense = source.contiguous()
    with contiguous_in_place(target) as whole:
        backend.all_gather(dense.data_ptr(), whole.data_ptr(), dense.nbytes)


def all_gather(backend: Backend, rank: int, source: torch.Tensor, targets: Tensors) -> None:
    """Write the tensor of rank r to the r-th target. Blocks until it is done.

    If all targets have as many bytes, this is one all-gather and a copy; otherwise it is one broadcast for each rank.

    Parameters
    ----------
    rank: this process's rank in the group.
    source: this rank's tensor.
    targets: one tensor for each rank, with the shape and type of that rank's `source`.
    """
    if len({target.nbytes for target in targets}) == 1:
        whole = targets[0].new_empty((len(targets), targets[0].numel()))
        all_gather_single(backend, source, whole)
        for target, part in zip(targets, whole, strict=True):
            target.copy_(part.view(target.shape))
        return
    targets[rank].copy_(source)
    for root, target in enumerate(targets):
        with contiguous_in_place(target) as dense:
            broadcast(backend, dense, root)


def all_to_all_single(
    backend: Backend, source: torch.Tensor, target: torch.Tensor, sizes: Sequence[Sequence[int]], ranks: int
) -> None:
    """Send slices of `source` along its first dimension to all ranks, and write the received slices to `target`.

    Blocks until it is done. Slices are sent and received in the order of ranks.

    Parameters
    ----------
    sizes: two lists, for `source` and for `target`: the length of each rank's slice. An empty list means equal slices.
    ranks: number of ranks in the group.

    Raises RuntimeError: the lengths do not add up to the first dimension, or the backend fails.
    """
    dense = source.contiguous()
    with contiguous_in_place(target) as whole:
        sent, received = (
            [part.nbytes for part in torch.split(tensor, list(lengths) or [tensor.shape[0] // ranks] * ranks)]
            for tensor, lengths in zip((dense, whole), sizes)
        )
        backend.all_to_all(dense.data_ptr(), sent, whole.data_ptr(), received)


def all_to_all(backend: Backend, sources: Tensors, targets: Tensors) -> None:
    """Send the r-th source to rank r, and receive the r-th target from it. Blocks until it is done.

    Tensors may be empty, and may differ in type and layout. The r-th source must have as many bytes as rank r's target
    for this rank.
    """
    sent = torch.cat([source.contiguous().view(-1).view(torch.uint8) for source in sources])
    received = torch.empty(sum(target.nbytes for target in targets), dtype=torch.uint8)
    target_sizes = [target.nbytes for target in targets]
    backend.all_to_all(sent.data_ptr(), [source.nbytes for source in sources], received.data_ptr(), target_sizes)
    for target, part in zip(targets, torch.split(received, target_sizes), strict=True):
        if target.numel():
            # A view needs memory that is aligned to its type, and a part may begin at any byte: hence the clone.
            target.copy_(part.clone().view(target.dtype).view(target.shape))


def gather(backend: Backend, size: int, root: int, source: torch.Tensor, targets: Tensors) -> None:
    """Send the tensors of all ranks to rank `root` of the group. Blocks until this rank's part is done.

    Parameters
    ----------
    size: number of ranks in the group.
    source: this rank's tensor.
    targets: on rank `root`, one tensor for each rank, with as many bytes as its `source`; empty on all other ranks.
    """
    empty = source.new_empty(0)
    all_to_all(backend, [source if rank == root else empty for rank in range(size)], targets or [empty] * size)


def scatter(backend: Backend, size: int, root: int, sources: Tensors, target: torch.Tensor) -> None:
    """Send the r-th tensor of rank `root` of the group to rank r. Blocks until this rank's part is done.

    Parameters
    ----------
    size: number of ranks in the group.
    sources: on rank `root`, one tensor for each rank; empty on all other ranks.
    target: receives this rank's tensor, and has as many bytes.
    """
    empty = target.new_empty(0)
    all_to_all(backend, sources or [empty] * size, [target if rank == root else empty for rank in range(size)])
