"""Collectives on tensors of any type, layout and size, on top of a backend that works on raw bytes.

`BODIES` has them by the keys of `arguments.METHODS`, which has checked their arguments.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.arguments import Tensors, flatten, reduction_name, transpose
from cpuft.comm.backends.base import Backend, GroupMembership

gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's all-gather of equally large tensors. torch 2.13 warns about the second name, and torch 2.8 has only that."""
scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch's reduce-scatter of one tensor, which has two names, too."""

_CALL_BYTES = 192
"""Size of the text in which ranks compare their calls."""


def to_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory holds its values in order, else (also of a conjugated view) a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


@contextlib.contextmanager
def contiguous_in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor or, if it is not contiguous, a copy that is written back at the end, but not on an exception."""
    dense = to_contiguous(tensor)
    yield dense
    if dense is not tensor:
        tensor.copy_(dense)


def check_ranks_agree(backend: Backend, ranks: Sequence[int], call: str) -> None:
    """Compare the text `call` of all ranks of a group, before a buffer is touched; RuntimeError on all if they differ.

    Collective. `ranks` are world ranks, for the message. The libraries do not compare: with other sizes on another
    rank, oneCCL and MPI return wrong values, hang or end the process.
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


def _reduce_in_place(backend: Backend, size: int, tensor: torch.Tensor, reduction: str) -> None:
    """Reduce a contiguous tensor over the `size` ranks of a group.

    16-bit floats that the backend cannot reduce are sent as float32. Other types and reductions that it lacks (bool,
    and bitwise ones in oneCCL) are gathered and reduced here, which takes `size` times the memory and bytes, and is
    rare.
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
        # As in C++, the sum of bools is their logical or, their product the logical and.
        tensor.copy_(functools.reduce(_REDUCTIONS[base], gathered.unbind(0)))
    if reduction == "avg":
        _divide(tensor, size)


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _divide(tensor: torch.Tensor, size: int) -> None:
    """Divide in place; integers are rounded towards zero, as in C."""
    is_integral = not (tensor.is_floating_point() or tensor.is_complex())
    tensor.div_(size, rounding_mode="trunc" if is_integral else None)


def _all_reduce(backend: Backend, group: GroupMembership, tensors: Tensors, opts: Any) -> None:
    for tensor in tensors:
        if tensor.is_sparse:
            _sum_sparse(backend, group, tensor)
            continue
        with contiguous_in_place(tensor) as dense:
            _reduce_in_place(backend, group.size, dense, reduction_name(opts.reduceOp))


def _sum_sparse(backend: Backend, group: GroupMembership, tensor: torch.Tensor) -> None:
    """Sum a sparse COO tensor over the ranks in place, by gathering indices and values, as torch's gloo does."""
    own = tensor.coalesce()
    count = torch.tensor([own._nnz()])
    counts = torch.empty(group.size, dtype=torch.int64)
    backend.all_gather(count.data_ptr(), counts.data_ptr(), count.nbytes)
    # The values' first dimension is the one that differs, so the indices are turned to have it first, too.
    parts = []
    for source in (own.indices().t(), own.values()):
        targets = [source.new_empty((length, *source.shape[1:])) for length in counts.tolist()]
        _all_gather(backend, group, [targets], [source], None)
        parts.append(torch.cat(targets))
    whole = torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape, check_invariants=True)
    tensor.copy_(whole.coalesce())


def _reduce(backend: Backend, group: GroupMembership, tensors: Tensors, opts: Any) -> None:
    """Reduce on all ranks, which costs as much as an all-reduce; only the tensor of the root changes."""
    whole = to_contiguous(tensors[0]).clone()
    _reduce_in_place(backend, group.size, whole, reduction_name(opts.reduceOp))
    if group.rank == opts.rootRank:
        tensors[0].copy_(whole)


def _reduce_scatter_single(backend: Backend, group: GroupMembership, outputs: Any, inputs: Any, opts: Any) -> None:
    reduction = reduction_name(opts.reduceOp)
    base = "sum" if reduction == "avg" else reduction
    for output, source in zip(flatten(outputs), flatten(inputs), strict=True):
        if not output.numel():
            continue
        whole = to_contiguous(source)
        with contiguous_in_place(output) as dense:
            if backend.can_reduce(whole.dtype, base):
                backend.reduce_scatter(whole.data_ptr(), dense.data_ptr(), dense.numel(), whole.dtype, base)
            else:
                whole = whole.clone()
                _reduce_in_place(backend, group.size, whole, base)
                dense.view(-1).copy_(whole.view(group.size, -1)[group.rank])
            if reduction == "avg":
                _divide(dense, group.size)


def _reduce_scatter(
    backend: Backend, group: GroupMembership, outputs: Tensors, inputs: list[Tensors], opts: Any
) -> None:
    """Reduce each piece over the ranks, and write this rank's to its output; unequal sizes cost twice the bytes."""
    for output, pieces in zip(outputs, inputs, strict=True):
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [piece.numel() for piece in pieces]
        if len({*sizes}) == 1:
            _reduce_scatter_single(backend, group, output, whole, opts)
        else:
            _reduce_in_place(backend, group.size, whole, reduction_name(opts.reduceOp))
            output.copy_(torch.split(whole, sizes)[group.rank].view(output.shape))


def _broadcast_tensor(backend: Backend, tensor: torch.Tensor, root: int) -> None:
    with contiguous_in_place(tensor) as dense:
        if dense.numel():
            backend.broadcast(dense.data_ptr(), dense.nbytes, root)


def _broadcast(backend: Backend, group: GroupMembership, tensors: Tensors, opts: Any) -> None:
    _broadcast_tensor(backend, tensors[0], opts.rootRank)


def _all_gather_single(backend: Backend, group: GroupMembership, outputs: Any, inputs: Any, opts: Any) -> None:
    for output, source in zip(flatten(outputs), flatten(inputs), strict=True):
        if output.numel():
            dense = to_contiguous(source)
            with contiguous_in_place(output) as whole:
                backend.all_gather(dense.data_ptr(), whole.data_ptr(), dense.nbytes)


def _all_gather(backend: Backend, group: GroupMembership, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
    """Write the tensor of rank r to the r-th target; targets of unequal sizes cost a broadcast for each rank."""
    for targets, source in zip(outputs, inputs, strict=True):
        if len({target.nbytes for target in targets}) == 1:
            whole = targets[0].new_empty((len(targets), targets[0].numel()))
            _all_gather_single(backend, group, whole, source, opts)
            for target, part in zip(targets, whole, strict=True):
                target.copy_(part.view(target.shape))
        else:
            targets[group.rank].copy_(source)
            for root, target in enumerate(targets):
                _broadcast_tensor(backend, target, root)


def _all_gather_coalesced(
    backend: Backend, group: GroupMembership, outputs: list[Tensors], inputs: Tensors, opts: Any
) -> None:
    _all_gather(backend, group, transpose(outputs), inputs, opts)


def _exchange(
    backend: Backend,
    source: torch.Tensor,
    sent: Sequence[int],
    target: torch.Tensor,
    received: Sequence[int],
    is_known: bool,
) -> None:
    """Send and receive pieces of these many bytes, which all ranks compare first unless `is_known` from their calls."""
    if not is_known:
        size = len(sent)
        own = torch.tensor([list(sent), list(received)])
        sizes = torch.empty((size, 2, size), dtype=torch.int64)
        backend.all_gather(own.data_ptr(), sizes.data_ptr(), own.nbytes)
        offered, expected = sizes[:, 0], sizes[:, 1].t()
        for sender, receiver in (offered != expected).nonzero().tolist()[:1]:
            raise RuntimeError(
                f"all_to_all: rank {sender} of the group sends {int(offered[sender, receiver])} bytes to rank "
                f"{receiver}, which expects {int(expected[sender, receiver])}"
            )
    backend.all_to_all(source.data_ptr(), sent, target.data_ptr(), received)


def _all_to_all_single(
    backend: Backend,
    group: GroupMembership,
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: Sequence[int],
    source_sizes: Sequence[int],
    opts: Any,
) -> None:
    """Exchange slices along the first dimension, of these lengths for each rank; no lengths mean equal slices."""
    dense = to_contiguous(source)
    with contiguous_in_place(output) as whole:
        sent, received = (
            [part.nbytes for part in torch.split(tensor, list(sizes) or [tensor.shape[0] // group.size] * group.size)]
            for tensor, sizes in ((dense, source_sizes), (whole, output_sizes))
        )
        _exchange(backend, dense, sent, whole, received, is_known=not (source_sizes or output_sizes))


def _all_to_all(
    backend: Backend, group: GroupMembership, outputs: Tensors, inputs: Tensors, opts: Any, is_known: bool = False
) -> None:
    """Send the r-th input to rank r, and receive the r-th output from it; tensors may differ in type and layout."""
    sent = torch.cat([to_contiguous(source).view(-1).view(torch.uint8) for source in inputs])
    received = torch.empty(sum(target.nbytes for target in outputs), dtype=torch.uint8)
    sizes = [target.nbytes for target in outputs]
    _exchange(backend, sent, [source.nbytes for source in inputs], received, sizes, is_known)
    for target, part in zip(outputs, torch.split(received, sizes), strict=True):
        if target.numel():
            # A view needs memory that is aligned to its type, and a part may begin at any byte: hence the clone.
            target.copy_(part.clone().view(target.dtype).view(target.shape))


def _gather(backend: Backend, group: GroupMembership, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
    empty = inputs[0].new_empty(0)
    sources = [inputs[0] if rank == opts.rootRank else empty for rank in range(group.size)]
    _all_to_all(backend, group, flatten(outputs) or [empty] * group.size, sources, opts, is_known=True)


def _scatter(backend: Backend, group: GroupMembership, outputs: Tensors, inputs: list[Tensors], opts: Any) -> None:
    empty = outputs[0].new_empty(0)
    targets = [outputs[0] if rank == opts.rootRank else empty for rank in range(group.size)]
    _all_to_all(backend, group, targets, flatten(inputs) or [empty] * group.size, opts, is_known=True)


def _barrier(backend: Backend, group: GroupMembership, opts: Any) -> None:
    _reduce_in_place(backend, group.size, torch.zeros(1, dtype=torch.int32), "sum")


BODIES: dict[str, Callable[..., None]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather_coalesced,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single,
    "alltoall": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
"""Each gets the backend, the membership and the method's arguments, and blocks until it is done."""
