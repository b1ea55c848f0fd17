"""torch's own gloo backend, with every operation numbered and watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store

from cpuft.comm.group.queued import Membership
from cpuft.comm.group.session import close_watch
from cpuft.comm.watch.deadlines import Watch
from cpuft.comm.watch.operations import Operation, Register

_LATER_SECONDS = 60.0
"""gloo's own timeout comes after the watchdog's, whose line says more."""
_MOST_PAIRED = 16
"""Ranks that gather in pairs: of many, messages would be small and a great many."""
_GATHERING = 1 << 30
"""The tag of what they send."""


def connect_gloo(store: Store, rank: int, size: int, timeout: float) -> ProcessGroupGloo:
    """torch's gloo backend over the interfaces of GLOO_SOCKET_IFNAME (several names: several connections)."""
    return ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout + _LATER_SECONDS))


class WatchedWork(dist.Work):
    """Works of gloo whose futures never complete (send, recv, reduce_scatter), watched while they are waited for."""

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
        """Block until done."""
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
        """Whether it is over."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is complete: waits, since gloo finishes these works in wait()."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs) or self._works[0].result())
        return future

    def source_rank(self) -> int:
        """The rank a receive was served by."""
        return int(self._works[0].source_rank())

    _source_rank = source_rank


def _wrap(gloo: ProcessGroupGloo, store: Store, member: Membership) -> ProcessGroup:
    """A group that is gloo's, and nothing else."""
    if hasattr(ProcessGroup, "_set_default_backend"):
        group = ProcessGroup(store, member.rank, member.size)
    else:  # torch 2.3, of --engine ort
        older: Any = ProcessGroup
        group = older(store, member.rank, member.size, older.Options("gloo"))
    _hand_on(group, gloo)
    return group


def _hand_on(group: ProcessGroup, gloo: ProcessGroupGloo) -> None:
    """Let gloo do what torch asks a group for from C++."""
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if hasattr(group, "_set_default_backend"):
        group._set_default_backend(ProcessGroup.BackendType.GLOO)


class WatchedGloo(dist.ProcessGroup):
    """Hands every operation on to gloo, and notes when it begins and ends."""

    def __init__(
        self, gloo: ProcessGroupGloo, store: Store, member: Membership, timeout: float, register: Register, watch: Watch
    ) -> None:
        # The constructor that takes a store cannot make subclasses.
        super().__init__(member.rank, member.size)  # type: ignore[call-arg]
        # The full interface of a process group, without a second trip through this class's methods.
        self._gloo = _wrap(gloo, store, member)
        self._member = member
        self._timeout = timeout
        self._register = register
        self._watch = watch
        # What torch calls from C++ past this class goes to gloo itself.
        _hand_on(self, gloo)

    def name(self) -> str:
        """What torch calls the backend."""
        return "gloo"

    def getBackendName(self) -> str:
        """What torch calls the backend."""
        return "gloo"

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations to come."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Close the group without waiting for any other rank."""
        self._register.forget(self._member.label)
        if self._member.is_world:
            close_watch()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> WatchedWork:
        """Send to one rank of the group."""
        return self._point_to_point("send", tensors, self._member.rank, peer, tag, self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> WatchedWork:
        """Receive from one rank of the group."""
        return self._point_to_point("recv", tensors, peer, self._member.rank, tag, self._gloo.recv(tensors, peer, tag))

    def _point_to_point(
        self, name: str, tensors: list[torch.Tensor], source: int, target: int, tag: int, work: dist.Work
    ) -> WatchedWork:
        ranks = (self._member.ranks[source], self._member.ranks[target])
        channel = f"{self._member.label} from {ranks[0]} to {ranks[1]} (tag {tag})"
        nbytes = _payload(tensors)

        def begin() -> Operation:
            return self._register.begin(channel, name, nbytes, ranks, self._timeout)

        return WatchedWork([work], begin, self._register.end)

    def _reduce_scatter(self, method: str, output: Any, source: Any, opts: Any = None) -> WatchedWork:
        """A mean is a sum that wait() divides: torch 2.8's gloo leaves a tensor's sum undivided and says nothing."""
        member, payload = self._member, _payload(source)
        opts = opts or dist.ReduceScatterOptions()
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            opts.reduceOp = dist.ReduceOp.SUM

        def begin() -> Operation:
            return self._register.begin(member.label, "reduce_scatter", payload, member.ranks, self._timeout)

        def finish() -> None:
            if is_mean:
                for tensor in [output] if isinstance(output, torch.Tensor) else output:
                    tensor.div_(member.size)

        return WatchedWork([getattr(self._gloo, method)(output, source, opts)], begin, self._register.end, finish)

    def _gathers_in_pairs(self, output: torch.Tensor, source: torch.Tensor) -> bool:
        size = self._member.size
        fits = output.dtype == source.dtype and output.numel() == size * source.numel() and output.is_contiguous()
        return fits and source.numel() > 0 and 1 < size <= _MOST_PAIRED

    def _gather(self, output: torch.Tensor, source: torch.Tensor) -> WatchedWork:
        """gloo's own goes through memory of its own twice: what pairs send each other takes a third of the time."""
        member, mine, parts = self._member, source.contiguous(), output.view(self._member.size, -1)
        if parts[member.rank].data_ptr() != mine.data_ptr():
            parts[member.rank].copy_(mine.view(-1))
        works = []
        for ahead in range(1, member.size):
            behind = (member.rank - ahead) % member.size
            works.append(self._gloo.recv([parts[behind]], behind, _GATHERING))
            works.append(self._gloo.send([mine], (member.rank + ahead) % member.size, _GATHERING))

        def begin() -> Operation:
            return self._register.begin(member.label, "all_gather", mine.nbytes, member.ranks, self._timeout)

        return WatchedWork(works, begin, self._register.end, fail=self._watch.blame_the_gone, outputs=[output])

    def _watched(self, name: str, call: Callable[[], dist.Work], payload: int) -> dist.Work:
        member = self._member
        operation = self._register.begin(member.label, name, payload, member.ranks, self._timeout)
        try:
            work = call()
        except BaseException:
            self._register.end(operation)
            raise

        def over(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except RuntimeError as error:
                self._watch.blame_the_gone(operation, error)
            finally:
                self._register.end(operation)

        work.get_future().add_done_callback(over)
        return work


def _payload(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_payload(part) for part in value) if isinstance(value, list) else 0


_OPERATIONS = {
    # method of ProcessGroup -> (what messages call it, which argument is this rank's own contribution)
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", -1),
}


def _watched_method(method: str, name: str, contribution: int) -> Callable[..., dist.Work]:
    def call(self: WatchedGloo, *arguments: Any, **options: Any) -> dist.Work:
        if name == "reduce_scatter":
            return self._reduce_scatter(method, *arguments, **options)
        if method in ("all_gather_single", "_allgather_base") and self._gathers_in_pairs(*arguments[:2]):
            return self._gather(*arguments[:2])
        payload = _payload(arguments[contribution]) if contribution >= 0 else 0
        return self._watched(name, lambda: getattr(self._gloo, method)(*arguments, **options), payload)

    return call


for _method, (_name, _contribution) in _OPERATIONS.items():
    if hasattr(dist.ProcessGroup, _method):
        setattr(WatchedGloo, _method, _watched_method(_method, _name, _contribution))
