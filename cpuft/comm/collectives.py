"""Collectives on tensors of any type, layout and size, on top of a backend that works on raw bytes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.backends.base import Backend

Tensors = Sequence[torch.Tensor]

gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's all-gather of equally large tensors. torch 2.13 warns about the second name, and torch 2.8 has only that."""
scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch's reduce-scatter of one tensor, which has two names, too."""

_CALL_BYTES = 192
"""Size of the text in which ranks compare their calls."""


def to_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a contiguous copy whose memory holds its values: a conjugated view's does not."""
    return tensor.resolve_conj().resolve_neg().contiguous()


@contextlib.contextmanager
def contiguous_in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor or, if it is not contiguous, a copy that is written back at the end, but not on an exception."""
    dense = to_contiguous(tensor)
    yield dense
    if dense is not tensor:
        tensor.copy_(dense)


def check_ranks_agree(backend: Backend, ranks: Sequence[int], call: str) -> None:
    """Compare the calls of all ranks of a group before any of them touches a buffer. Blocks until all have come.

    Libraries do not: with other sizes on another rank, oneCCL and MPI return wrong values, hang or end the process.
    `call` is the name, elements, types and root of this rank's collective. RuntimeError on every rank if they differ.
    """
    if len(ranks) == 1:
        return
    text = call.encode()
    if len(text) > _CALL_BYTES:
        text = text[: _CALL_BYTES - 20] + b"... " + hashlib.blake2b(text, digest_size=8).hexdigest().encode()
    sent, received = bytearray(text.ljust(_CALL_BYTES)), bytearray(_CALL_BYTES * len(ranks))
    source, target = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (sent, received))
    backend.all_gather(source.data_ptr(), target.data_ptr(), _CALL_BYTES)
    if received == sent * len(ranks):
        return
    callers: dict[str, list[int]] = {}
    for place, rank in enumerate(ranks):
        words = received[place * _CALL_BYTES :][:_CALL_BYTES].decode(errors="replace").rstrip()
        callers.setdefault(words, []).append(rank)
    found = "; ".join(f"rank {', '.join(map(str, who))}: {words}" for words, who in callers.items())
    raise RuntimeError(f"the ranks have called different collectives, or with different sizes ({found})")


def all_reduce(backend: Backend, size: int, tensor: torch.Tensor, reduction: str) -> None:
    """Reduce a contiguous tensor of any shape over the `size` ranks of a group, in place.

    16-bit floats that the backend cannot reduce are sent as float32. Other types and reductions that it lacks (bool,
    and bitwise ones in oneCCL) are gathered and reduced here, which takes `size` times the memory and bytes, and is
    rare. The reduction is a name of `reduction_name`; `avg` rounds integers towards zero. The sum of bools is their
    logical or, their product the logical and. Raises RuntimeError if torch cannot apply the reduction to the type.
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


def all_reduce_sparse(backend: Backend, rank: int, size: int, tensor: torch.Tensor) -> None:
    """Sum a sparse COO tensor over the ranks in place, by gathering indices and values, as torch's gloo does."""
    own = tensor.coalesce()
    count = torch.tensor([own._nnz()])
    counts = torch.empty(size, dtype=torch.int64)
    backend.all_gather(count.data_ptr(), counts.data_ptr(), count.nbytes)
    # The values' first dimension is the one that differs, so the indices are turned to have it first, too.
    parts = []
    for source in (own.indices().t(), own.values()):
        targets = [source.new_empty((length, *source.shape[1:])) for length in counts.tolist()]
        all_gather(backend, rank, source, targets)
        parts.append(torch.cat(targets))
    whole = torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape, check_invariants=True)
    tensor.copy_(whole.coalesce())


def reduce_scatter_single(
    backend: Backend, rank: int, source: torch.Tensor, target: torch.Tensor, reduction: str
) -> None:
    """Reduce `source`, size * n elements, and write the `rank`-th part to `target`, n elements, both contiguous."""
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
    if tensor.is_floating_point() or tensor.is_complex():
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
    """Reduce each piece over the ranks, and write the `rank`-th to `target`; unequal sizes cost twice the bytes."""
    whole = torch.cat([piece.reshape(-1) for piece in pieces])
    if len({piece.numel() for piece in pieces}) == 1:
        with contiguous_in_place(target) as dense:
            reduce_scatter_single(backend, rank, whole, dense, reduction)
        return
    all_reduce(backend, len(pieces), whole, reduction)
    own = torch.split(whole, [piece.numel() for piece in pieces])[rank]
    target.copy_(own.view(target.shape))


def broadcast(backend: Backend, tensor: torch.Tensor, root: int) -> None:
    """Copy the contiguous tensor of rank `root` of the group into that of every rank."""
    if tensor.numel():
        backend.broadcast(tensor.data_ptr(), tensor.nbytes, root)


def all_gather_single(backend: Backend, source: torch.Tensor, target: torch.Tensor) -> None:
    """Write the tensors of all ranks, n elements each, one after another to `target`, size * n elements."""
    if target.numel() == 0:
        return
    dense = to_contiguous(source)
    with contiguous_in_place(target) as whole:
        backend.all_gather(dense.data_ptr(), whole.data_ptr(), dense.nbytes)


def all_gather(backend: Backend, rank: int, source: torch.Tensor, targets: Tensors) -> None:
    """Write the tensor of rank r to the r-th target; targets of unequal sizes cost a broadcast for each rank."""
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


def _exchange(
    backend: Backend,
    source: torch.Tensor,
    sent: Sequence[int],
    target: torch.Tensor,
    received: Sequence[int],
    is_known: bool,
) -> None:
    """Send and receive pieces of these many bytes, which all ranks compare first unless `is_known` from their calls."""
    if is_known:
        backend.all_to_all(source.data_ptr(), sent, target.data_ptr(), received)
        return
    size = len(sent)
    own = torch.tensor([list(sent), list(received)])
    sizes = torch.empty((size, 2, size), dtype=torch.int64)
    backend.all_gather(own.data_ptr(), sizes.data_ptr(), own.nbytes)
    offered, expected = sizes[:, 0], sizes[:, 1].t()
    for sender, receiver in (offered != expected).nonzero().tolist()[:1]:
        raise RuntimeError(
            f"all_to_all: rank {sender} of the group sends {int(offered[sender, receiver])} bytes to rank {receiver}, "
            f"which expects {int(expected[sender, receiver])}"
        )
    backend.all_to_all(source.data_ptr(), sent, target.data_ptr(), received)


def all_to_all_single(
    backend: Backend, source: torch.Tensor, target: torch.Tensor, sizes: Sequence[Sequence[int]], ranks: int
) -> None:
    """Send slices of `source` along its first dimension to all ranks, and write the received slices to `target`.

    `sizes`: two lists, for `source` and `target`, of the length of each rank's slice; an empty one means equal slices.
    Lengths that are given are compared: RuntimeError on all ranks if those of sender and receiver differ.
    """
    dense = to_contiguous(source)
    with contiguous_in_place(target) as whole:
        sent, received = (
            [part.nbytes for part in torch.split(tensor, list(lengths) or [tensor.shape[0] // ranks] * ranks)]
            for tensor, lengths in zip((dense, whole), sizes)
        )
        _exchange(backend, dense, sent, whole, received, is_known=not any(sizes))


def all_to_all(backend: Backend, sources: Tensors, targets: Tensors, is_known: bool = False) -> None:
    """Send the r-th source to rank r, and receive the r-th target from it; tensors may differ in type and layout.

    The r-th source must have as many bytes as rank r's target for this rank, which is compared unless it `is_known`:
    RuntimeError on all ranks if they differ.
    """
    sent = torch.cat([to_contiguous(source).view(-1).view(torch.uint8) for source in sources])
    received = torch.empty(sum(target.nbytes for target in targets), dtype=torch.uint8)
    target_sizes = [target.nbytes for target in targets]
    _exchange(backend, sent, [source.nbytes for source in sources], received, target_sizes, is_known)
    for target, part in zip(targets, torch.split(received, target_sizes), strict=True):
        if target.numel():
            # A view needs memory that is aligned to its type, and a part may begin at any byte: hence the clone.
            target.copy_(part.clone().view(target.dtype).view(target.shape))
