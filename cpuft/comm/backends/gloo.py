"""torch's own gloo backend, with every operation numbered and watched by the watchdog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store

from cpuft.comm import arguments
from cpuft.comm.arguments import METHODS, Method, add_methods, count_bytes, flatten
from cpuft.comm.backends.base import GroupMembership
from cpuft.comm.watchdog import Operation
from cpuft.comm.watched_group import WatchedGroup

_GLOO_EXTRA_SECONDS = 60.0
"""gloo's own timeout is this much longer than the watchdog's, whose message says more."""
MAX_PAIRWISE_RANKS = 16
"""Up to this many ranks gather in pairs; with more, Python would start very many messages one by one."""
_GATHER_TAG = 1 << 30


class GlooWork(dist.Work):
    """Works of gloo whose futures never complete (send, recv, reduce_scatter), watched while someone waits for them.

    `finish` is called once, when all works have succeeded. The future has `outputs`, or else the first work's result.
    """

    def __init__(
        self,
        group: WatchedGroup,
        works: Sequence[dist.Work],
        begin: Callable[[], Operation],
        finish: Callable[[], None] = lambda: None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._group, self._works, self._begin, self._finish, self._outputs = group, works, begin, finish, outputs
        self._done: bool | Exception | None = None
        """How gloo's works have ended: gloo waits for ever, or divides nothing, if it is asked twice."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all works are done; return whether all succeeded, or raise gloo's error. `timeout` is ignored."""
        if self._done is None:
            operation = self._begin()
            try:
                done = [work.wait() for work in self._works]
            except Exception as error:
                self._done = error
                self._group.end(operation, error)
                raise
            self._group.end(operation)
            self._done = all(done)
            self._finish()
        if isinstance(self._done, Exception):
            raise self._done
        return self._done

    def is_completed(self) -> bool:
        """Return whether gloo reports all works as done, successful or not."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a completed future: gloo finishes these works only in wait(). Raises gloo's errors."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs) or self._works[0].result())
        return future

    def source_rank(self) -> int:
        """Return the rank of the group from which the first work has received data."""
        return int(self._works[0].source_rank())

    _source_rank = source_rank


class WatchedGlooGroup(WatchedGroup):
    """A process group with torch's methods that passes every operation on to gloo, and registers its begin and end."""

    def __init__(self, membership: GroupMembership, store: Store, timeout: float) -> None:
        super().__init__(membership, store, timeout)
        gloo_timeout = timedelta(seconds=timeout + _GLOO_EXTRA_SECONDS)
        gloo = ProcessGroupGloo(store, membership.rank, membership.size, timeout=gloo_timeout)
        # An inner group offers the whole interface of a process group without calling this class's methods again.
        self._gloo = _make_plain_group(store, membership)
        for group in (self._gloo, self):  # so that calls of torch's C++ code reach gloo directly
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
            if hasattr(group, "_set_default_backend"):
                group._set_default_backend(ProcessGroup.BackendType.GLOO)

    def name(self) -> str:
        """Return "gloo", the library's name."""
        return "gloo"

    def getBackendName(self) -> str:
        """Return "cpuft_gloo", the name under which torch knows the backend and which `get_backend()` returns."""
        return "cpuft_gloo"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> GlooWork:
        """Start to send the list's one tensor to rank `peer` of the group. RuntimeError: wrong arguments."""
        arguments.check_message("send", self._membership, tensors, peer, tag)
        work = self._gloo.send(tensors, peer, tag)
        return self._watch_point_to_point("send", tensors, self._membership.rank, peer, tag, work)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> GlooWork:
        """Start to receive the list's one tensor from rank `peer` of the group; only wait() completes it. RuntimeError:
        wrong arguments.
        """
        arguments.check_message("recv", self._membership, tensors, peer, tag)
        work = self._gloo.recv(tensors, peer, tag)
        return self._watch_point_to_point("recv", tensors, peer, self._membership.rank, tag, work)

    def _watch_point_to_point(
        self, name: str, tensors: list[torch.Tensor], source: int, target: int, tag: int, work: dist.Work
    ) -> GlooWork:
        place = self.describe_message(source, target, tag)
        return GlooWork(self, [work], partial(self.begin, name, count_bytes(tensors), *place))

    def _run_on_copies(self, name: str, method: Method, given: tuple[Any, ...]) -> GlooWork:
        """Run an operation on contiguous copies of its tensors, and copy the outputs, its first argument, back.

        A mean of reduce_scatter is a sum that wait() divides, since torch 2.8's gloo returns a sum without an error.
        """
        copies, opts = [_to_contiguous(value) for value in given], given[-1]
        is_mean = method.operation == "reduce_scatter" and opts.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            opts.reduceOp = dist.ReduceOp.SUM

        @torch.no_grad()
        def finish() -> None:
            for copy, tensor in zip(flatten(copies[0]), flatten(given[0]), strict=True):
                if is_mean:
                    copy.div_(self._membership.size)
                if copy is not tensor:
                    tensor.copy_(copy)

        work = getattr(self._gloo, name)(*copies)
        begin = partial(self.begin, method.operation, count_bytes(given[method.contribution]))
        return GlooWork(self, [work], begin, finish, flatten(given[0]))

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
        return GlooWork(self, works, partial(self.begin, "all_gather", own.nbytes), outputs=[output])

    def _watch(self, name: str, call: Callable[[], dist.Work], nbytes: int) -> dist.Work:
        operation = self.begin(name, nbytes)
        try:
            work = call()
        except BaseException:
            self.end(operation)
            raise

        def end(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:
                self.end(operation, error)
            else:
                self.end(operation)

        work.get_future().add_done_callback(end)
        return work


def _make_plain_group(store: Store, membership: GroupMembership) -> ProcessGroup:
    if hasattr(ProcessGroup, "_set_default_backend"):
        return ProcessGroup(store, membership.rank, membership.size)
    older: Any = ProcessGroup  # of torch 2.3, which --engine ort needs
    group: ProcessGroup = older(store, membership.rank, membership.size, older.Options("gloo"))
    return group


def _to_contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    return [_to_contiguous(part) for part in value] if isinstance(value, list) else value


_UNSAFE_IF_STRIDED = ("allreduce", "broadcast", "reduce", "scatter")
"""Methods of gloo that silently return wrong values for tensors that are not contiguous, as reduce_scatter does."""


def _make_method(name: str, key: str) -> Callable[..., dist.Work]:
    method = METHODS[key]

    def start(self: WatchedGlooGroup, *given: Any) -> dist.Work:
        method.check(self._membership, *given)
        if key == "all_gather_single" and self._can_gather_in_pairs(*given[:2]):
            return self._gather_in_pairs(*given[:2])
        is_copied = method.operation == "reduce_scatter"
        if name in _UNSAFE_IF_STRIDED:
            tensors = flatten(given[: method.tensors])
            is_copied = not all(tensor.is_sparse or tensor.is_contiguous() for tensor in tensors)
        if is_copied:
            return self._run_on_copies(name, method, given)
        nbytes = count_bytes(given[method.contribution]) if method.tensors else 0
        return self._watch(method.operation, lambda: getattr(self._gloo, name)(*given), nbytes)

    return start


add_methods(WatchedGlooGroup, _make_method)
