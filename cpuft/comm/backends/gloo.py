"""torch's own gloo backend, with every operation numbered and watched by the watchdog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from cpuft.comm import arguments
from cpuft.comm.arguments import accept_forms, count_bytes
from cpuft.comm.backends.base import GroupMembership
from cpuft.comm.watchdog import CollectiveWatchdog, Operation, OperationRegister, stop_watchdog

_GLOO_EXTRA_SECONDS = 60.0
"""gloo's own timeout is this much longer than the watchdog's, whose message says more."""
MAX_PAIRWISE_RANKS = 16
"""Up to this many ranks gather in pairs. With more ranks, Python would start very many messages one by one."""
_GATHER_TAG = 1 << 30
"""Tag of the messages of a pairwise gather."""


class GlooWork(dist.Work):
    """Works of gloo whose futures never complete (send, recv, reduce_scatter), watched while someone waits for them.

    Parameters
    ----------
    works: gloo's own works.
    begin, end: register the operation before the wait, and remove it after the wait.
    finish: called once, after all works are done.
    fail: called with the operation and gloo's error if one of them fails.
    outputs: what the future returns; by default the result of the first work.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        begin: Callable[[], Operation],
        end: Callable[[Operation], None],
        finish: Callable[[], None] = lambda: None,
        fail: Callable[[Operation, Exception], None] = lambda operation, error: None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._outputs = outputs
        self._works, self._begin, self._end, self._finish, self._fail = works, begin, end, finish, fail

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all works are done, and return True. Raises gloo's RuntimeError. `timeout` is ignored.

        The operation is watched from the begin to the end of this call. After an error of gloo because a rank was lost,
        `fail` may end the process instead.
        """
        operation = self._begin()
        try:
            done = [work.wait() for work in self._works]
        except RuntimeError as error:
            self._fail(operation, error)
            raise
        finally:
            self._end(operation)
        self._finish()
        self._finish = lambda: None
        return all(done)

    def is_completed(self) -> bool:
        """Return whether gloo reports all works as done, successful or not. Does not wait."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a completed future of the outputs: gloo finishes these works only in wait().

        Raises gloo's RuntimeError instead of returning a failed future.
        """
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs) or self._works[0].result())
        return future

    def source_rank(self) -> int:
        """Return the rank of the group from which data was received. It has a meaning for receives only."""
        return int(self._works[0].source_rank())

    _source_rank = source_rank


class WatchedGlooGroup(dist.ProcessGroup):
    """A process group that passes every operation on to gloo, and registers its begin and end.

    If an operation exceeds the timeout, or one of its ranks is lost, the watchdog ends the process. gloo uses the
    interfaces of GLOO_SOCKET_IFNAME; several names, separated by commas, mean several connections. The collectives
    (`allreduce`, `broadcast` and so on) have torch's signatures and are added at the end of this module. They return a
    Work at once.

    Parameters
    ----------
    timeout: seconds that an operation may take. gloo's own timeout is a minute longer.
    register: where operations are registered from their begin to their end.
    watchdog: closed by `shutdown` if this is the group of all ranks.
    """

    def __init__(
        self,
        store: Store,
        membership: GroupMembership,
        timeout: float,
        register: OperationRegister,
        watchdog: CollectiveWatchdog,
    ) -> None:
        # The constructor that takes a store cannot make subclasses.
        super().__init__(membership.rank, membership.size)  # type: ignore[call-arg]
        gloo_timeout = timedelta(seconds=timeout + _GLOO_EXTRA_SECONDS)
        gloo = ProcessGroupGloo(store, membership.rank, membership.size, timeout=gloo_timeout)
        # An inner group offers the whole interface of a process group without calling this class's methods again.
        self._gloo = _make_plain_group(store, membership)
        self._membership = membership
        self._timeout = timeout
        self._register = register
        self._watchdog = watchdog
        for group in (self._gloo, self):  # so that calls of torch's C++ code reach gloo directly
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            if hasattr(group, "_set_default_backend"):
                group._set_default_backend(ProcessGroup.BackendType.GLOO)

    def name(self) -> str:
        """Return the library's name, "gloo"."""
        return "gloo"

    def getBackendName(self) -> str:
        """Return the name under which torch knows the backend, so that it equals `get_backend()`."""
        return "cpuft_gloo"

    @property
    def timeout(self) -> timedelta:
        """How long an operation of this group may take."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout after which the watchdog gives up later operations. gloo's own timeout stays as it was."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Close the group without waiting for any other rank.

        If it is the group of all ranks, the process's watchdog is stopped. gloo's connections stay open until this
        object is deleted.
        """
        self._register.forget_group(self._membership.label)
        if self._membership.is_world:
            stop_watchdog()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> GlooWork:
        """Start to send a tensor to rank `peer` of the group. The Work's wait() raises gloo's RuntimeErrors."""
        arguments.check_message("send", self._membership, tensors, peer, tag)
        work = self._gloo.send(tensors, peer, tag)
        return self._watch_point_to_point("send", tensors, self._membership.rank, peer, tag, work)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> GlooWork:
        """Start to receive a tensor from rank `peer` of the group, sent with the same tag; it is there after wait().

        The Work's wait() raises gloo's errors as RuntimeError.
        """
        arguments.check_message("recv", self._membership, tensors, peer, tag)
        work = self._gloo.recv(tensors, peer, tag)
        return self._watch_point_to_point("recv", tensors, peer, self._membership.rank, tag, work)

    def _watch_point_to_point(
        self, name: str, tensors: list[torch.Tensor], source: int, target: int, tag: int, work: dist.Work
    ) -> GlooWork:
        ranks = (self._membership.ranks[source], self._membership.ranks[target])
        channel = f"{self._membership.label} from {ranks[0]} to {ranks[1]} (tag {tag})"
        nbytes = count_bytes(tensors)

        def begin() -> Operation:
            return self._register.begin(channel, name, nbytes, ranks, self._timeout)

        return GlooWork([work], begin, self._register.end, fail=self._watchdog.exit_if_rank_lost)

    def _reduce_scatter(self, method: str, output: Any, source: Any, opts: Any) -> GlooWork:
        """Reduce and scatter. A mean is a sum that wait() divides.

        torch 2.8's gloo returns the sum of a tensor where the mean was requested, without an error.
        """
        membership, nbytes = self._membership, count_bytes(source)
        dense = _to_contiguous(output)
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            opts.reduceOp = dist.ReduceOp.SUM

        def begin() -> Operation:
            return self._register.begin(membership.label, "reduce_scatter", nbytes, membership.ranks, self._timeout)

        def finish() -> None:
            if is_mean:
                for tensor in [dense] if isinstance(dense, torch.Tensor) else dense:
                    tensor.div_(membership.size)
            _copy_back(dense, output)

        work = getattr(self._gloo, method)(dense, _to_contiguous(source), opts)
        return GlooWork([work], begin, self._register.end, finish, self._watchdog.exit_if_rank_lost)

    def _run_on_copies(self, method: str, name: str, given: tuple[Any, ...]) -> GlooWork:
        """Run an operation on contiguous copies of its tensors, and copy the outputs, its first argument, back."""
        membership, nbytes = self._membership, count_bytes(given[0])
        copies = [_to_contiguous(value) for value in given]

        def begin() -> Operation:
            return self._register.begin(membership.label, name, nbytes, membership.ranks, self._timeout)

        work = getattr(self._gloo, method)(*copies)
        finish, fail = lambda: _copy_back(copies[0], given[0]), self._watchdog.exit_if_rank_lost
        return GlooWork([work], begin, self._register.end, finish, fail, outputs=given[0])

    def _can_gather_in_pairs(self, output: torch.Tensor, source: torch.Tensor) -> bool:
        size = self._membership.size
        fits = output.dtype == source.dtype and output.numel() == size * source.numel() and output.is_contiguous()
        return fits and source.numel() > 0 and 1 < size <= MAX_PAIRWISE_RANKS

    def _gather_in_pairs(self, output: torch.Tensor, source: torch.Tensor) -> GlooWork:
        """Gather equally large tensors by sends between all pairs of ranks.

        gloo's own gather copies the data twice through buffers of its own; this takes a third of the time.
        """
        membership, own, parts = self._membership, source.contiguous(), output.view(self._membership.size, -1)
        if parts[membership.rank].data_ptr() != own.data_ptr():
            parts[membership.rank].copy_(own.view(-1))
        works = []
        for distance in range(1, membership.size):
            sender = (membership.rank - distance) % membership.size
            works.append(self._gloo.recv([parts[sender]], sender, _GATHER_TAG))
            works.append(self._gloo.send([own], (membership.rank + distance) % membership.size, _GATHER_TAG))

        def begin() -> Operation:
            return self._register.begin(membership.label, "all_gather", own.nbytes, membership.ranks, self._timeout)

        fail = self._watchdog.exit_if_rank_lost
        return GlooWork(works, begin, self._register.end, fail=fail, outputs=[output])

    def _watch(self, name: str, call: Callable[[], dist.Work], nbytes: int) -> dist.Work:
        """Start an operation of gloo, which is registered until its future completes."""
        membership = self._membership
        operation = self._register.begin(membership.label, name, nbytes, membership.ranks, self._timeout)
        try:
            work = call()
        except BaseException:
            self._register.end(operation)
            raise

        def end(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except RuntimeError as error:
                self._watchdog.exit_if_rank_lost(operation, error)
            finally:
                self._register.end(operation)

        work.get_future().add_done_callback(end)
        return work


def _make_plain_group(store: Store, membership: GroupMembership) -> ProcessGroup:
    if hasattr(ProcessGroup, "_set_default_backend"):
        return ProcessGroup(store, membership.rank, membership.size)
    older: Any = ProcessGroup  # of torch 2.3, which --engine ort needs
    group: ProcessGroup = older(store, membership.rank, membership.size, older.Options("gloo"))
    return group


def _to_contiguous(value: Any) -> Any:
    """Return a tensor, or nested lists of tensors, with contiguous copies of those that are not contiguous."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return [_to_contiguous(part) for part in value] if isinstance(value, list) else value


def _is_contiguous(value: Any) -> bool:
    """Return whether a tensor, or all tensors in nested lists, are contiguous or sparse."""
    if isinstance(value, torch.Tensor):
        return value.is_sparse or value.is_contiguous()
    return all(map(_is_contiguous, value))


@torch.no_grad()
def _copy_back(copies: Any, tensors: Any) -> None:
    if isinstance(tensors, list):
        for copy, tensor in zip(copies, tensors, strict=True):
            _copy_back(copy, tensor)
    elif copies is not tensors:
        tensors.copy_(copies)


_UNSAFE_IF_STRIDED = ("allreduce", "broadcast", "reduce", "scatter")
"""Methods of gloo that silently return wrong values for tensors that are not contiguous, as reduce_scatter does."""


@dataclass(frozen=True)
class _Method:
    """What WatchedGlooGroup must know of a method of ProcessGroup."""

    operation: str
    """Its name in messages."""
    check: Callable[..., str]
    """The check of its arguments. gloo itself checks only a part of them, and a wrong one may end the process."""
    options: Callable[[], Any]
    tensors: int = 1
    """Number of its arguments before the options."""
    lists: bool = True
    """Whether the arguments are lists of tensors."""
    contribution: int = 0
    """Index of the argument that is this rank's contribution."""


_GATHER_SINGLE = _Method(
    "all_gather",
    lambda group, output, source, opts: arguments.check_all_gather_single(group, [output], [source], opts),
    AllgatherOptions,
    2,
    lists=False,
    contribution=1,
)
_GATHER_COALESCED = _Method("all_gather", arguments.check_all_gather_single, AllgatherOptions, 2, contribution=1)
_SCATTER_SINGLE = _Method(
    "reduce_scatter",
    lambda group, output, source, opts: arguments.check_reduce_scatter_single(group, [output], [source], opts),
    ReduceScatterOptions,
    2,
    lists=False,
    contribution=1,
)
_SCATTER_COALESCED = _Method(
    "reduce_scatter", arguments.check_reduce_scatter_single, ReduceScatterOptions, 2, contribution=1
)
_ALL_TO_ALL_SINGLE = _Method(
    "all_to_all", arguments.check_all_to_all_single, AllToAllOptions, 4, lists=False, contribution=1
)
_METHODS = {
    "allreduce": _Method("all_reduce", arguments.check_all_reduce, AllreduceOptions),
    "allreduce_coalesced": _Method("all_reduce", arguments.check_coalesced, AllreduceCoalescedOptions),
    "broadcast": _Method("broadcast", arguments.check_broadcast, BroadcastOptions),
    "reduce": _Method("reduce", arguments.check_reduce, ReduceOptions),
    "allgather": _Method("all_gather", arguments.check_all_gather, AllgatherOptions, 2, contribution=1),
    "allgather_coalesced": _Method("all_gather", lambda *_: "", AllgatherOptions, 2, contribution=1),
    "all_gather_single": _GATHER_SINGLE,
    "all_gather_single_coalesced": _GATHER_COALESCED,
    "reduce_scatter": _Method(
        "reduce_scatter", arguments.check_reduce_scatter, ReduceScatterOptions, 2, contribution=1
    ),
    "reduce_scatter_single": _SCATTER_SINGLE,
    "reduce_scatter_single_coalesced": _SCATTER_COALESCED,
    "alltoall": _Method("all_to_all", arguments.check_all_to_all, AllToAllOptions, 2, contribution=1),
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
    "gather": _Method("gather", arguments.check_gather, GatherOptions, 2, contribution=1),
    "scatter": _Method("scatter", arguments.check_scatter, ScatterOptions, 2),
    "barrier": _Method("barrier", arguments.check_barrier, BarrierOptions, 0),
    # The names of these methods in torch before 2.13.
    "_allgather_base": _GATHER_SINGLE,
    "allgather_into_tensor_coalesced": _GATHER_COALESCED,
    "_reduce_scatter_base": _SCATTER_SINGLE,
    "reduce_scatter_tensor_coalesced": _SCATTER_COALESCED,
    "alltoall_base": _ALL_TO_ALL_SINGLE,
}


def _make_watched_method(name: str, method: _Method) -> Callable[..., dist.Work]:
    """Return a method of WatchedGlooGroup."""

    def start(self: WatchedGlooGroup, *given: Any) -> dist.Work:
        method.check(self._membership, *given)
        if method.operation == "reduce_scatter":
            return self._reduce_scatter(name, *given)
        if method is _GATHER_SINGLE and self._can_gather_in_pairs(*given[:2]):
            return self._gather_in_pairs(*given[:2])
        if name in _UNSAFE_IF_STRIDED and not _is_contiguous(given[: method.tensors]):
            return self._run_on_copies(name, method.operation, given)
        nbytes = count_bytes(given[method.contribution]) if method.tensors else 0
        return self._watch(method.operation, lambda: getattr(self._gloo, name)(*given), nbytes)

    return accept_forms(method.options, method.tensors, method.lists)(start)


for _name, _method in _METHODS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(WatchedGlooGroup, _name, _make_watched_method(_name, _method))
