"""Moving tensors between ranks, of any layout and size, with a library that moves bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from cpuft.comm.group import reduction
from cpuft.comm.group.collectives import Collectives

Tensors = Sequence[torch.Tensor]


@contextlib.contextmanager
def in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or a contiguous copy that is written back."""
    dense = tensor.contiguous()
    yield dense
    if dense is not tensor:
        tensor.copy_(dense)


def broadcast(library: Collectives, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's contiguous tensor to every rank."""
    if tensor.numel():
        library.broadcast(tensor.data_ptr(), tensor.nbytes, root)


def all_gather_single(library: Collectives, source: torch.Tensor, target: torch.Tensor) -> None:
    """Put the tensors of all ranks, all of one size, one after another into `target` (size * n elements)."""
    if target.numel() == 0:
        return
    dense = source.contiguous()
    with in_place(target) as whole:
        library.all_gather(dense.data_ptr(), whole.data_ptr(), dense.nbytes)


def all_gather(library: Collectives, rank: int, source: torch.Tensor, targets: Tensors) -> None:
    """Put the tensor of rank r into the r-th target. All ranks know all sizes from their targets."""
    if len({target.nbytes for target in targets}) == 1:
        whole = targets[0].new_empty((len(targets), targets[0].numel()))
        all_gather_single(library, source, whole)
        for target, part in zip(targets, whole, strict=True):
            target.copy_(part.view(target.shape))
        return
    targets[rank].copy_(source)
    for root, target in enumerate(targets):
        with in_place(target) as dense:
            broadcast(library, dense, root)


def reduce_scatter(library: Collectives, rank: int, pieces: Tensors, target: torch.Tensor, name: str) -> None:
    """Reduce the pieces over the ranks and leave the rank-th in `target`."""
    whole = torch.cat([piece.reshape(-1) for piece in pieces])
    if len({piece.numel() for piece in pieces}) == 1:
        with in_place(target) as dense:
            reduction.reduce_scatter(library, rank, whole, dense, name)
        return
    reduction.all_reduce(library, len(pieces), whole, name)
    mine = torch.split(whole, [piece.numel() for piece in pieces])[rank]
    target.copy_(mine.view(target.shape))


def split(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Parts along the first dimension, of these sizes or, without any, equal."""
    return list(torch.split(tensor, list(sizes) or [tensor.shape[0] // ranks] * ranks))


def all_to_all_single(
    library: Collectives, source: torch.Tensor, target: torch.Tensor, sizes: Sequence[Sequence[int]], ranks: int
) -> None:
    """Send rank r its rows of `source`, and put what it sent at its rows of `target`.

    Parameters
    ----------
    sizes: rows of each rank, in `source` and in `target`; none for equal parts.
    """
    dense = source.contiguous()
    with in_place(target) as whole:
        sent, received = (
            [part.nbytes for part in split(tensor, rows, ranks)] for tensor, rows in zip((dense, whole), sizes)
        )
        library.all_to_all(dense.data_ptr(), sent, whole.data_ptr(), received)


def all_to_all(library: Collectives, sources: Tensors, targets: Tensors) -> None:
    """Send the r-th source to rank r, and receive the r-th target from it. Empty ones are nothing to send."""
    sent = torch.cat([_bytes(source) for source in sources])
    received = torch.empty(sum(target.nbytes for target in targets), dtype=torch.uint8)
    library.all_to_all(
        sent.data_ptr(),
        [source.nbytes for source in sources],
        received.data_ptr(),
        [target.nbytes for target in targets],
    )
    parts = torch.split(received, [target.nbytes for target in targets])
    for target, part in zip(targets, parts, strict=True):
        if target.numel():
            # A view needs the memory aligned to the type, and a part may begin anywhere.
            target.copy_(part.clone().view(target.dtype).view(target.shape))


def gather(library: Collectives, size: int, root: int, source: torch.Tensor, targets: Tensors) -> None:
    """Give the root the tensors of all ranks; `targets` is empty elsewhere."""
    nothing = source.new_empty(0)
    sources = [source if rank == root else nothing for rank in range(size)]
    all_to_all(library, sources, targets or [nothing] * size)


def scatter(library: Collectives, size: int, root: int, sources: Tensors, target: torch.Tensor) -> None:
    """Give rank r the root's r-th tensor; `sources` is empty elsewhere."""
    nothing = target.new_empty(0)
    targets = [target if rank == root else nothing for rank in range(size)]
    all_to_all(library, sources or [nothing] * size, targets)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
