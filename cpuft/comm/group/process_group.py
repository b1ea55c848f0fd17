"""A c10d process group over a library's blocking collectives."""

# torch's stub lists the overloads its C++ class accepts; torch calls a subclass with the first one only.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.group import reduction, transfers
from cpuft.comm.group.collectives import Collectives
from cpuft.comm.group.queues import JoinedWork, Lane, LaneWork
from cpuft.comm.group.session import close_watch
from cpuft.comm.watch.deadlines import Watch
from cpuft.comm.watch.operations import Register

Tensors = list[torch.Tensor]
_CLOSE_SECONDS = 1.0
_LANE = "collectives"


@dataclass(frozen=True)
class Membership:
    """A group as one of its ranks sees it."""

    label: str
    rank: int
    ranks: tuple[int, ...]
    """Ranks of the world, in the group's order."""
    is_world: bool

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)


class CollectiveGroup(dist.ProcessGroup):
    """Operations of one group, run in order on a thread of its own, so that they overlap with computing.

    Sends and receives have a thread for each peer, direction and tag: a blocking send may wait for a receive that the
    peer posts later. Tensors may be of any layout; those that are not contiguous are copied on the way.
    """

    def __init__(
        self,
        library: Collectives,
        member: Membership,
        timeout: float,
        register: Register,
        watch: Watch,
    ) -> None:
        # The constructor that takes a store cannot make subclasses.
        super().__init__(member.rank, member.size)  # type: ignore[call-arg]
        self._library = library
        self._member = member
        self._timeout = timeout
        self._register = register
        self._watch = watch
        self._lanes: dict[str, Lane] = {}
        self._coalesced: list[LaneWork] | None = None
        self._group_name = member.label
        self._group_desc = ""

    # Names: the C++ class keeps them in its backends, of which this one has none.
    def getBackendName(self) -> str:
        """What torch calls the backend."""
        return self._library.name

    def getGroupName(self) -> str:
        """The unique name torch gave the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set by torch after creation."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._group_desc

    def setGroupDesc(self, text: str) -> None:
        """Set by torch after creation."""
        self._group_desc = text

    def name(self) -> str:
        """What torch calls the backend."""
        return self._library.name

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations to come."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Close the group without waiting for any other rank."""
        for lane in self._lanes.values():
            lane.close(_CLOSE_SECONDS)
        self._library.close()
        self._register.forget(self._member.label)
        if self._member.is_world:
            close_watch()

    abort = shutdown

    def allreduce(self, tensors: Tensors, opts: Any = None) -> LaneWork:
        """Reduce each tensor over the ranks, in place."""
        name = reduction.reduction_name(opts.reduceOp) if opts else "sum"

        def body() -> None:
            for tensor in tensors:
                with transfers.in_place(tensor) as dense:
                    reduction.all_reduce(self._library, self._member.size, dense, name)

        return self._launch("all_reduce", tensors, tensors, body)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> LaneWork:
        """Reduce to one rank; the tensors of the others stay as they are."""
        name = reduction.reduction_name(opts.reduceOp)

        def body() -> None:
            for tensor in tensors:
                whole = tensor.clone(memory_format=torch.contiguous_format)
                reduction.all_reduce(self._library, self._member.size, whole, name)
                if self._member.rank == opts.rootRank:
                    tensor.copy_(whole)

        return self._launch("reduce", tensors, tensors, body)

    def broadcast(self, tensors: Tensors, opts: Any) -> LaneWork:
        """Copy the root's tensors to all."""

        def body() -> None:
            for tensor in tensors:
                with transfers.in_place(tensor) as dense:
                    transfers.broadcast(self._library, dense, opts.rootRank)

        return self._launch("broadcast", tensors, tensors, body)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> LaneWork:
        """Give every rank the tensors of all, which may differ in size."""

        def body() -> None:
            for places, source in zip(outputs, inputs, strict=True):
                transfers.all_gather(self._library, self._member.rank, source, places)

        return self._launch("all_gather", inputs, outputs, body)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> LaneWork:
        """The same for several inputs; `outputs` is a list for each rank, of a tensor for each input."""
        return self.allgather([list(places) for places in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> LaneWork:
        """Give every rank the equal tensors of all, one after another in `output`."""
        return self._gather_single([output], [source], output)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LaneWork:
        """The same for several tensors."""
        return self._gather_single(outputs, inputs, outputs)

    def _gather_single(self, outputs: Tensors, inputs: Tensors, result: Any) -> LaneWork:
        def body() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                transfers.all_gather_single(self._library, source, output)

        return self._launch("all_gather", inputs, result, body)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> LaneWork:
        """Reduce lists of tensors, of which rank r gets the r-th; they may differ in size."""
        name = reduction.reduction_name(opts.reduceOp) if opts else "sum"

        def body() -> None:
            for output, pieces in zip(outputs, inputs, strict=True):
                transfers.reduce_scatter(self._library, self._member.rank, pieces, output, name)

        return self._launch("reduce_scatter", [piece for pieces in inputs for piece in pieces], outputs, body)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> LaneWork:
        """Reduce a tensor of `size` equal parts, of which rank r gets the r-th."""
        return self._scatter_single([output], [source], opts, output)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LaneWork:
        """The same for several tensors."""
        return self._scatter_single(outputs, inputs, opts, outputs)

    def _scatter_single(self, outputs: Tensors, inputs: Tensors, opts: Any, result: Any) -> LaneWork:
        name = reduction.reduction_name(opts.reduceOp) if opts else "sum"

        def body() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                with transfers.in_place(output) as dense:
                    reduction.reduce_scatter(self._library, self._member.rank, source.contiguous(), dense, name)

        return self._launch("reduce_scatter", inputs, result, body)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> LaneWork:
        """Send the r-th input to rank r, and receive the r-th output from it."""
        return self._launch("all_to_all", inputs, outputs, lambda: transfers.all_to_all(self._library, inputs, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        opts: Any = None,
    ) -> LaneWork:
        """The same with parts along the first dimension; no sizes mean equal parts."""

        def body() -> None:
            sent = transfers.split(source.contiguous(), source_sizes, self._member.size)
            with transfers.in_place(output) as dense:
                received = transfers.split(dense, output_sizes, self._member.size)
                transfers.all_to_all(self._library, sent, received)

        return self._launch("all_to_all", [source], output, body)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> LaneWork:
        """Give the root the tensors of all."""

        def body() -> None:
            places = outputs[0] if outputs else []
            transfers.gather(self._library, self._member.size, opts.rootRank, inputs[0], places)

        return self._launch("gather", inputs, outputs, body)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> LaneWork:
        """Give rank r the root's r-th tensor."""

        def body() -> None:
            pieces = inputs[0] if inputs else []
            transfers.scatter(self._library, self._member.size, opts.rootRank, pieces, outputs[0])

        return self._launch("scatter", outputs, outputs, body)

    def barrier(self, opts: Any = None) -> LaneWork:
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

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> LaneWork:
        """Send to one rank of the group."""

        def body() -> int:
            for tensor in map(torch.Tensor.contiguous, tensors):
                self._library.send(tensor.data_ptr(), tensor.nbytes, peer, tag)
            return self._member.rank

        return self._point_to_point("send", tensors, self._member.rank, peer, tag, body)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> LaneWork:
        """Receive from one rank of the group."""
        body = self._receiver(tensors, peer, tag)
        return self._point_to_point("recv", tensors, peer, self._member.rank, tag, body)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> LaneWork:
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

    def _point_to_point(
        self, name: str, tensors: Tensors, source: int, target: int, tag: int, body: Callable[[], int]
    ) -> LaneWork:
        ranks = (self._member.ranks[source], self._member.ranks[target])
        channel = f"{self._member.label} from {ranks[0]} to {ranks[1]} (tag {tag})"
        return self._launch(name, tensors, tensors, body, channel, ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> JoinedWork:
        works, self._coalesced = self._coalesced or [], None
        return JoinedWork(works)

    def _launch(
        self,
        name: str,
        payload: Tensors,
        result: Any,
        body: Callable[[], int | None],
        channel: str = "",
        ranks: tuple[int, ...] = (),
    ) -> LaneWork:
        """Queue an operation. `channel` and `ranks` are those of the group unless given."""
        work = LaneWork(result)
        nbytes = sum(tensor.nbytes for tensor in payload)
        lane = f"{name} {channel}" if channel else _LANE

        def task() -> None:
            operation = self._register.begin(
                channel or self._member.label, name, nbytes, ranks or self._member.ranks, self._timeout
            )
            try:
                source = body()
            except Exception as error:
                self._watch.blame_the_gone(operation, error)
                self._register.end(operation)
                work.fail(error)
            else:
                self._register.end(operation)
                work.complete(-1 if source is None else source)

        if lane not in self._lanes:
            self._lanes[lane] = Lane(lane)
        self._lanes[lane].put(task)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
