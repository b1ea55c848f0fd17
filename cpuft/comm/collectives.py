"""Collectives on tensors of any type, layout and size, on top of a backend that works on raw bytes.

`arguments.METHODS` has checked their arguments.
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
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


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


class Collectives:
    """The collectives of a group, each named by its key in `arguments.METHODS`. They block until they are done."""

    def __init__(self, backend: Backend, group: GroupMembership) -> None:
        self._backend, self._group = backend, group

    def check_ranks_agree(self, call: str) -> None:
        """Compare the text `call` of all ranks, before a buffer is touched; RuntimeError on all if they differ.

        The libraries do not compare: with other sizes on another rank, oneCCL and MPI return wrong values, hang or end
        the process.
        """
        ranks = self._group.ranks
        if len(ranks) == 1:
            return
        text = call.encode()
        if len(text) > _CALL_BYTES:
            text = text[: _CALL_BYTES - 20] + b"... " + hashlib.blake2b(text, digest_size=8).hexdigest().encode()
        sent, received = bytearray(text.ljust(_CALL_BYTES)), bytearray(_CALL_BYTES * len(ranks))
        source, target = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (sent, received))
        self._backend.all_gather(source.data_ptr(), target.data_ptr(), _CALL_BYTES)
        if received == sent * len(ranks):
            return
        callers: dict[str, list[int]] = {}
        for place, rank in enumerate(ranks):
            words = received[place * _CALL_BYTES :][:_CALL_BYTES].decode(errors="replace").rstrip()
            callers.setdefault(words, []).append(rank)
        found = "; ".join(f"rank {', '.join(map(str, who))}: {words}" for words, who in callers.items())
        raise RuntimeError(f"the ranks have called different collectives, or with different sizes ({found})")

    def _reduce_in_place(self, tensor: torch.Tensor, reduction: str) -> None:
        """Reduce a contiguous tensor over the ranks.

        16-bit floats that the backend cannot reduce are sent as float32. Other types and reductions that it lacks
        (bool, and bitwise ones in oneCCL) are gathered and reduced here, which takes as many times the memory and bytes
        as there are ranks, and is rare.
        """
        base = "sum" if reduction == "avg" else reduction
        if tensor.numel() == 0:
            return
        if self._backend.can_reduce(tensor.dtype, base):
            self._backend.all_reduce(tensor.data_ptr(), tensor.numel(), tensor.dtype, base)
        elif tensor.dtype in (torch.bfloat16, torch.float16) and self._backend.can_reduce(torch.float32, base):
            wide = tensor.float()
            self._backend.all_reduce(wide.data_ptr(), wide.numel(), wide.dtype, base)
            tensor.copy_(wide)
        else:
            gathered = tensor.new_empty((self._group.size, *tensor.shape))
            self._backend.all_gather(tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes)
            # As in C++, the sum of bools is their logical or, their product the logical and.
            tensor.copy_(functools.reduce(_REDUCTIONS[base], gathered.unbind(0)))
        if reduction == "avg":
            self._divide(tensor)

    def _divide(self, tensor: torch.Tensor) -> None:
        is_integral = not (tensor.is_floating_point() or tensor.is_complex())
        tensor.div_(self._group.size, rounding_mode="trunc" if is_integral else None)

    def allreduce(self, tensors: Tensors, opts: Any) -> None:
        """Reduce each tensor in place by `opts.reduceOp` (integer means round towards zero); sum sparse ones."""
        for tensor in tensors:
            if tensor.is_sparse:
                self._sum_sparse(tensor)
                continue
            with contiguous_in_place(tensor) as dense:
                self._reduce_in_place(dense, reduction_name(opts.reduceOp))

    allreduce_coalesced = allreduce

    def _sum_sparse(self, tensor: torch.Tensor) -> None:
        """Sum a sparse COO tensor over the ranks in place, by gathering indices and values, as torch's gloo does."""
        own = tensor.coalesce()
        count = torch.tensor([own._nnz()])
        counts = torch.empty(self._group.size, dtype=torch.int64)
        self._backend.all_gather(count.data_ptr(), counts.data_ptr(), count.nbytes)
        # The values' first dimension is the one that differs, so the indices are turned to have it first, too.
        parts = []
        for source in (own.indices().t(), own.values()):
            targets = [source.new_empty((length, *source.shape[1:])) for length in counts.tolist()]
            self.allgather([targets], [source], None)
            parts.append(torch.cat(targets))
        whole = torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape, check_invariants=True)
        tensor.copy_(whole.coalesce())

    def reduce(self, tensors: Tensors, opts: Any) -> None:
        """Reduce the list's one tensor on rank `opts.rootRank`, at the cost of an all-reduce; others do not change."""
        whole = to_contiguous(tensors[0]).clone()
        self._reduce_in_place(whole, reduction_name(opts.reduceOp))
        if self._group.rank == opts.rootRank:
            tensors[0].copy_(whole)

    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any) -> None:
        """Reduce each input over the ranks by `opts.reduceOp`, and write the r-th of its equal parts to its output on
        rank r; both arguments are one tensor, or lists of as many.
        """
        reduction = reduction_name(opts.reduceOp)
        base = "sum" if reduction == "avg" else reduction
        for output, source in zip(flatten(outputs), flatten(inputs), strict=True):
            if not output.numel():
                continue
            whole = to_contiguous(source)
            with contiguous_in_place(output) as dense:
                if self._backend.can_reduce(whole.dtype, base):
                    self._backend.reduce_scatter(whole.data_ptr(), dense.data_ptr(), dense.numel(), whole.dtype, base)
                else:
                    whole = whole.clone()
                    self._reduce_in_place(whole, base)
                    dense.view(-1).copy_(whole.view(self._group.size, -1)[self._group.rank])
                if reduction == "avg":
                    self._divide(dense)

    reduce_scatter_single_coalesced = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> None:
        """Reduce `inputs[i][r]` over the ranks, and write it to `outputs[i]` on rank r; unequal sizes cost double."""
        for output, pieces in zip(outputs, inputs, strict=True):
            whole = torch.cat([piece.reshape(-1) for piece in pieces])
            sizes = [piece.numel() for piece in pieces]
            if len({*sizes}) == 1:
                self.reduce_scatter_single(output, whole, opts)
            else:
                self._reduce_in_place(whole, reduction_name(opts.reduceOp))
                output.copy_(torch.split(whole, sizes)[self._group.rank].view(output.shape))

    def _broadcast_tensor(self, tensor: torch.Tensor, root: int) -> None:
        with contiguous_in_place(tensor) as dense:
            if dense.numel():
                self._backend.broadcast(dense.data_ptr(), dense.nbytes, root)

    def broadcast(self, tensors: Tensors, opts: Any) -> None:
        """Copy the list's one tensor from rank `opts.rootRank` of the group to that of all ranks."""
        self._broadcast_tensor(tensors[0], opts.rootRank)

    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any) -> None:
        """Write the inputs of all ranks, one after another, to the output; for lists, `inputs[i]` to `outputs[i]`."""
        for output, source in zip(flatten(outputs), flatten(inputs), strict=True):
            if output.numel():
                dense = to_contiguous(source)
                with contiguous_in_place(output) as whole:
                    self._backend.all_gather(dense.data_ptr(), whole.data_ptr(), dense.nbytes)

    all_gather_single_coalesced = all_gather_single

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
        """Write `inputs[i]` of rank r to `outputs[i][r]` on all ranks; unequal sizes cost a broadcast for each rank."""
        for targets, source in zip(outputs, inputs, strict=True):
            if len({target.nbytes for target in targets}) == 1:
                whole = targets[0].new_empty((len(targets), targets[0].numel()))
                self.all_gather_single(whole, source, opts)
                for target, part in zip(targets, whole, strict=True):
                    target.copy_(part.view(target.shape))
            else:
                targets[self._group.rank].copy_(source)
                for root, target in enumerate(targets):
                    self._broadcast_tensor(target, root)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
        """Write `inputs[i]` of rank r to `outputs[r][i]` on all ranks. ValueError: lists of unequal lengths."""
        self.allgather(transpose(outputs), inputs, opts)

    def _exchange(
        self, source: torch.Tensor, sent: Sequence[int], target: torch.Tensor, received: Sequence[int], is_known: bool
    ) -> None:
        """Send and receive pieces of these many bytes, which all ranks compare first unless `is_known` from their
        calls.
        """
        if not is_known:
            size = self._group.size
            own = torch.tensor([list(sent), list(received)])
            sizes = torch.empty((size, 2, size), dtype=torch.int64)
            self._backend.all_gather(own.data_ptr(), sizes.data_ptr(), own.nbytes)
            offered, expected = sizes[:, 0], sizes[:, 1].t()
            for sender, receiver in (offered != expected).nonzero().tolist()[:1]:
                raise RuntimeError(
                    f"all_to_all: rank {sender} of the group sends {int(offered[sender, receiver])} bytes to rank "
                    f"{receiver}, which expects {int(expected[sender, receiver])}"
                )
        self._backend.all_to_all(source.data_ptr(), sent, target.data_ptr(), received)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        opts: Any,
    ) -> None:
        """Exchange slices along the first dimension, of these lengths for each rank, or equal ones for [].
        RuntimeError: a rank sends another number of bytes than the receiver expects.
        """
        dense, ranks = to_contiguous(source), self._group.size
        with contiguous_in_place(output) as whole:
            sent, received = (
                [part.nbytes for part in torch.split(tensor, list(sizes) or [tensor.shape[0] // ranks] * ranks)]
                for tensor, sizes in ((dense, source_sizes), (whole, output_sizes))
            )
            self._exchange(dense, sent, whole, received, is_known=not (source_sizes or output_sizes))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any, is_known: bool = False) -> None:
        """Send the r-th input to rank r, and receive the r-th output from it; tensors may differ in type and layout.
        RuntimeError, unless `is_known`: a rank sends another number of bytes than the receiver expects.
        """
        sent = torch.cat([to_contiguous(source).view(-1).view(torch.uint8) for source in inputs])
        received = torch.empty(sum(target.nbytes for target in outputs), dtype=torch.uint8)
        sizes = [target.nbytes for target in outputs]
        self._exchange(sent, [source.nbytes for source in inputs], received, sizes, is_known)
        for target, part in zip(outputs, torch.split(received, sizes), strict=True):
            if target.numel():
                # A view needs memory aligned to its type, and a part may begin at any byte: hence the clone.
                target.copy_(part.clone().view(target.dtype).view(target.shape))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> None:
        """Write the one input of rank r to `outputs[0][r]` on rank `opts.rootRank`; on other ranks `outputs` is []."""
        self.alltoall(flatten(outputs) or self._list_empty(inputs), self._address(inputs, opts), opts, is_known=True)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> None:
        """Write `inputs[0][r]` of rank `opts.rootRank` to the one output of rank r; on other ranks `inputs` is []."""
        self.alltoall(self._address(outputs, opts), flatten(inputs) or self._list_empty(outputs), opts, is_known=True)

    def _list_empty(self, own: Tensors) -> Tensors:
        return [own[0].new_empty(0)] * self._group.size

    def _address(self, own: Tensors, opts: Any) -> Tensors:
        """Return a tensor for each rank: this rank's for the root, and empty ones for the others."""
        return [own[0] if rank == opts.rootRank else empty for rank, empty in enumerate(self._list_empty(own))]

    def barrier(self, opts: Any) -> None:
        """Wait until all ranks have come."""
        self._reduce_in_place(torch.zeros(1, dtype=torch.int32), "sum")
