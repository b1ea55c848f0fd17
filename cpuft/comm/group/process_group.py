"""A c10d process group over a library's blocking collectives."""

# torch's stub lists the overloads its C++ class accepts; torch calls a subclass with the first one only.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cpuft.comm.group import reduction, transfers
from cpuft.comm.group.queued import QueuedGroup, Tensors
from cpuft.comm.group.queues import QueuedWork


class CollectiveGroup(QueuedGroup):
    """Operations of one group, which overlap with computing.

    Tensors may be of any layout; those that are not contiguous are copied on the way.
    """

    def allreduce(self, tensors: Tensors, opts: Any = None) -> QueuedWork:
        """Reduce each tensor over the ranks, in place."""
        name = reduction.reduction_name(opts.reduceOp) if opts else "sum"

        def body() -> None:
            for tensor in tensors:
                with transfers.in_place(tensor) as dense:
                    reduction.all_reduce(self._library, self._member.size, dense, name)

        return self._launch("all_reduce", tensors, tensors, body)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> QueuedWork:
        """Reduce to one rank; the tensors of the others stay as they are."""
        name = reduction.reduction_name(opts.reduceOp)

        def body() -> None:
            for tensor in tensors:
                whole = tensor.clone(memory_format=torch.contiguous_format)
                reduction.all_reduce(self._library, self._member.size, whole, name)
                if self._member.rank == opts.rootRank:
                    tensor.copy_(whole)

        return self._launch("reduce", tensors, tensors, body)

    def broadcast(self, tensors: Tensors, opts: Any) -> QueuedWork:
        """Copy the root's tensors to all."""

        def body() -> None:
            for tensor in tensors:
                with transfers.in_place(tensor) as dense:
                    transfers.broadcast(self._library, dense, opts.rootRank)

        return self._launch("broadcast", tensors, tensors, body)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> QueuedWork:
        """Give every rank the tensors of all, which may differ in size."""

        def body() -> None:
            for places, source in zip(outputs, inputs, strict=True):
                transfers.all_gather(self._library, self._member.rank, source, places)

        return self._launch("all_gather", inputs, outputs, body)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> QueuedWork:
        """The same for several inputs; `outputs` is a list for each rank, of a tensor for each input."""
        return self.allgather([list(places) for places in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> QueuedWork:
        """Give every rank the equal tensors of all, one after another in `output`."""
        return self._gather_single([output], [source], output)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> QueuedWork:
        """The same for several tensors."""
        return self._gather_single(outputs, inputs, outputs)

    def _gather_single(self, outputs: Tensors, inputs: Tensors, result: Any) -> QueuedWork:
        def body() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                transfers.all_gather_single(self._library, source, output)

        return self._launch("all_gather", inputs, result, body)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> QueuedWork:
        """Reduce lists of tensors, of which rank r gets the r-th; they may differ in size."""
        name = reduction.reduction_name(opts.reduceOp) if opts else "sum"

        def body() -> None:
            for output, pieces in zip(outputs, inputs, strict=True):
                transfers.reduce_scatter(self._library, self._member.rank, pieces, output, name)

        return self._launch("reduce_scatter", [piece for pieces in inputs for piece in pieces], outputs, body)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> QueuedWork:
        """Reduce a tensor of `size` equal parts, of which rank r gets the r-th."""
        return self._scatter_single([output], [source], opts, output)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> QueuedWork:
        """The same for several tensors."""
        return self._scatter_single(outputs, inputs, opts, outputs)

    def _scatter_single(self, outputs: Tensors, inputs: Tensors, opts: Any, result: Any) -> QueuedWork:
        name = reduction.reduction_name(opts.reduceOp) if opts else "sum"

        def body() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                with transfers.in_place(output) as dense:
                    reduction.reduce_scatter(self._library, self._member.rank, source.contiguous(), dense, name)

        return self._launch("reduce_scatter", inputs, result, body)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> QueuedWork:
        """Send the r-th input to rank r, and receive the r-th output from it."""
        return self._launch("all_to_all", inputs, outputs, lambda: transfers.all_to_all(self._library, inputs, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        opts: Any = None,
    ) -> QueuedWork:
        """The same with parts along the first dimension; no sizes mean equal parts."""

        def body() -> None:
            sizes = source_sizes, output_sizes
            transfers.all_to_all_single(self._library, source, output, sizes, self._member.size)

        return self._launch("all_to_all", [source], output, body)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> QueuedWork:
        """Give the root the tensors of all."""

        def body() -> None:
            places = outputs[0] if outputs else []
            transfers.gather(self._library, self._member.size, opts.rootRank, inputs[0], places)

        return self._launch("gather", inputs, outputs, body)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> QueuedWork:
        """Give rank r the root's r-th tensor."""

        def body() -> None:
            pieces = inputs[0] if inputs else []
            transfers.scatter(self._library, self._member.size, opts.rootRank, pieces, outputs[0])

        return self._launch("scatter", outputs, outputs, body)

    def barrier(self, opts: Any = None) -> QueuedWork:
        """Wait for all ranks."""
        token = torch.zeros(1, dtype=torch.int32)
        body = lambda: reduction.all_reduce(self._library, self._member.size, token, "sum")  # noqa: E731
        return self._launch("barrier", [], [token], body)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> QueuedWork:
        """Send to one rank of the group."""

        def body() -> int:
            for tensor in map(torch.Tensor.contiguous, tensors):
                self._library.send(tensor.data_ptr(), tensor.nbytes, peer, tag)
            return self._member.rank

        return self._point_to_point("send", tensors, self._member.rank, peer, tag, body)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> QueuedWork:
        """Receive from one rank of the group."""
        body = self._receiver(tensors, peer, tag)
        return self._point_to_point("recv", tensors, peer, self._member.rank, tag, body)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> QueuedWork:
        """Receive from whichever rank sends first."""
        channel = f"{self._member.label} from any (tag {tag})"
        return self._launch("recv", tensors, tensors, self._receiver(tensors, None, tag), channel, self._member.ranks)

    def _receiver(self, tensors: Tensors, peer: int | None, tag: int) -> Callable[[], int]:
        def body() -> int:
            source = -1
            for tensor in tensors:
                with transfers.in_place(tensor) as dense:
                    source = self._library.recv(dense.data_ptr(), dense.nbytes, peer, tag)
            return source

        return body
