"""A c10d process group over a backend of blocking collectives, which run on threads beside computing."""

# torch's stub lists the overloads that its C++ class accepts; torch calls a subclass with the first one only.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cpuft.comm.arguments import METHODS, Tensors, add_methods, check_message, count_bytes, flatten
from cpuft.comm.backends.base import Backend, GroupMembership
from cpuft.comm.collectives import Collectives, contiguous_in_place, to_contiguous
from cpuft.comm.watched_group import WatchedGroup

T = TypeVar("T")
_CLOSE_SECONDS = 1.0
_COLLECTIVES = "collectives"


class ProgressThread:
    """A thread that runs tasks in order, without autograd: a daemon, so that a call that hangs blocks no exit."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cpuft-comm-{name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Run the task after those put before; it must handle its errors, because an exception ends the thread."""
        self._queue.put(task)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run a task that may raise after those put before, and return a future of its result or exception."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)

        self.put(run)
        return future

    def close(self, seconds: float) -> None:
        """End the thread after the tasks put so far, and wait at most this long for its end. Later tasks never run."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        # Grad mode is a property of a thread, and copies into parameters must not be recorded by autograd.
        with torch.no_grad():
            while (task := self._queue.get()) is not None:
                task()
                del task  # a waiting thread must not keep the last task's tensors alive


_idle_threads: list[ProgressThread] = []


def _take_thread() -> ProgressThread:
    try:
        return _idle_threads.pop()
    except IndexError:
        return ProgressThread("helper")


def _run_callbacks(task: Callable[[], None]) -> None:
    thread = _take_thread()

    def run() -> None:
        task()
        _idle_threads.append(thread)

    thread.put(run)


class QueuedWork(dist.Work):
    """The Work of a queued operation. Its errors reach Python's wait() and C++ callbacks alike."""

    # Works made by torch's own `_create_work_from_future` swallow errors in wait(), and `Future.set_exception` passes
    # C++ a value that it cannot read. So the error is raised in a callback of a future, which both sides understand.
    # Callbacks run on a thread of their own and not on the group's: those of torch's PowerSGD wait for a collective
    # that the group's thread has still to run.

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._source: Future[int] = Future()
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def complete(self, source: int = -1) -> None:
        """Mark the operation as successful; `source` is the rank of the group that sent the data, -1 if none did."""
        self._source.set_result(source)

    def fail(self, error: BaseException) -> None:
        """Mark the operation as failed: wait() and the future raise `error`."""
        self._source.set_exception(error)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors, the same one in each call; its value() raises an operation's error."""
        with self._lock:
            if self._future is None:
                trigger: torch.futures.Future[Any] = torch.futures.Future()
                self._future = trigger.then(lambda _: self.result())
                if self._source.done():
                    trigger.set_result(None)
                else:
                    self._source.add_done_callback(lambda _: _run_callbacks(lambda: trigger.set_result(None)))
            return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done; return True or raise its error. `timeout` is ignored."""
        self._source.result()
        return True

    def synchronize(self) -> None:
        """Block until the operation is done; raises its error."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        return self._source.done()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded; False while it is not done."""
        return self._source.done() and not self._source.exception()

    def exception(self) -> BaseException | None:
        """Return the operation's error; None if it has succeeded or is not done."""
        return self._source.exception() if self._source.done() else None

    def result(self) -> Any:
        """Wait for the operation; return its output tensors in the form in which they were passed. Raises its error."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the rank of the group that sent the data; -1 for collectives, and while the operation is not done."""
        return self._source.result() if self.is_success() else -1

    _source_rank = source_rank


class _CoalescedWork(dist.Work):
    """The Work of several operations that were launched together; its future has one flat list of all outputs."""

    def __init__(self, works: Sequence[QueuedWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait() for work in self._works)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for one in done.value() for tensor in flatten(one.value())])


def _begin_span(name: str, tensors: Tensors) -> Callable[[], object]:
    """Begin an event of torch's profiler, as torch's own groups do. Returns what ends it, on any thread."""
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():
        return lambda: None
    span = autograd._record_function_with_args_enter(name, *tensors)
    return functools.partial(autograd._record_function_with_args_exit, span)


class CollectiveGroup(WatchedGroup):
    """The process group of the backends ccl and mpi, with torch's methods; `connect` makes the backend.

    Operations return at once a QueuedWork, whose wait() raises the backend's error, mostly a RuntimeError. Until then
    the tensors must not be changed. Those that are not contiguous are copied. Wrong arguments raise RuntimeError at
    once, and a reduceOp that only NCCL has (PREMUL_SUM) NotImplementedError. Calls that do not fit those of the other
    ranks raise RuntimeError on all ranks, from wait(), before a tensor is read or written.

    Collectives run in order on one thread. Sends and receives have a thread for each peer, direction and tag, because a
    blocking send may wait for a receive that the peer posts later. It is free for others when nothing waits for it.
    """

    def __init__(
        self,
        connect: Callable[[Store, int, int, str], Backend],
        membership: GroupMembership,
        store: Store,
        timeout: float,
    ) -> None:
        super().__init__(membership, store, timeout)
        operation = self.begin("connect", 0, f"{membership.label} from nothing")
        try:
            self._backend = connect(store, membership.rank, membership.size, membership.label)
        finally:
            self.end(operation)
        self._collectives = Collectives(self._backend, membership)
        self._threads: dict[str, tuple[ProgressThread, int]] = {}
        """Each channel's thread and the number of its tasks that have not ended."""
        self._lock = threading.Lock()
        self._coalesced: list[QueuedWork] | None = None
        self.compares_calls: bool = getattr(dist.group.WORLD, "compares_calls", True)
        """Whether the ranks compare their calls before each collective; the same on all ranks."""
        self._group_name = membership.label
        self._group_description = ""

    # torch's C++ class keeps these names in its own backends, of which this group has none.
    def name(self) -> str:
        """Return the backend's name, ccl or mpi."""
        return self._backend.name

    getBackendName = name

    def getGroupName(self) -> str:
        """Return the name that torch gave the group; until then its label, for example "the world"."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set the group's name, as torch does after creation."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._group_description

    def setGroupDesc(self, text: str) -> None:
        """Set the group's description, as torch does after creation."""
        self._group_description = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def shutdown(self) -> None:
        """Close the group without waiting for other ranks; its threads get a second each to finish what was queued."""
        with self._lock:
            threads, self._threads = self._threads, {}
        for thread, _ in threads.values():
            thread.close(_CLOSE_SECONDS)
        self._backend.close()
        super().shutdown()

    abort = shutdown

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> _CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return _CoalescedWork(works)

    def _launch(
        self,
        name: str,
        payload: Tensors,
        result: Any,
        body: Callable[[], int | None],
        channel: str = "",
        ranks: tuple[int, ...] = (),
    ) -> QueuedWork:
        """Queue an operation, by default of the group, and return its Work; `body` returns the rank of the sender."""
        work = QueuedWork(result)
        nbytes = count_bytes(payload)
        key = f"{name} {channel}" if channel else _COLLECTIVES
        end_span = _begin_span(f"{self.name()}:{name}", payload)

        def task() -> None:
            operation = self.begin(name, nbytes, channel, ranks)
            try:
                try:
                    source = body()
                finally:
                    end_span()
            except Exception as error:
                self.end(operation, error)
                work.fail(error)
            else:
                self.end(operation)
                work.complete(-1 if source is None else source)
            if channel:
                self._release_thread(key)

        with self._lock:
            thread, tasks = self._threads.get(key) or (_take_thread() if channel else ProgressThread(key), 0)
            self._threads[key] = thread, tasks + 1
            thread.put(task)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _release_thread(self, key: str) -> None:
        with self._lock:
            thread, tasks = self._threads.pop(key, (None, 0))
            if thread and tasks > 1:
                self._threads[key] = thread, tasks - 1
            elif thread:
                _idle_threads.append(thread)

    def _launch_collective(self, key: str, given: tuple[Any, ...]) -> QueuedWork:
        """Queue a collective; an error of its check is raised, and also told to the ranks that wait for this one."""
        method = METHODS[key]

        def agree(call: str) -> None:
            if self.compares_calls:
                self._collectives.check_ranks_agree(call)

        try:
            call = method.check(self._membership, *given)
        except RuntimeError as error:
            refusal = str(error)
            self._launch(method.operation, [], [], lambda: agree(refusal))
            raise

        def checked_body() -> None:
            agree(call)
            getattr(self._collectives, key)(*given)

        payload, result = (given[method.contribution], given[0]) if method.tensors else ([], [torch.zeros(1)])
        return self._launch(method.operation, flatten(payload), result, checked_body)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> QueuedWork:
        """Start to send the list's one tensor to a rank of the group; the Work may end before it is there.
        RuntimeError: wrong arguments.
        """
        check_message("send", self._membership, tensors, peer, tag)

        def body() -> int:
            dense = to_contiguous(tensors[0])
            self._backend.send(dense.data_ptr(), dense.nbytes, peer, tag)
            return self._membership.rank

        place = self.describe_message(self._membership.rank, peer, tag)
        return self._launch("send", tensors, tensors, body, *place)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> QueuedWork:
        """Start to receive the list's one tensor from rank `peer` of the group; wait() raises RuntimeError or
        ValueError for a longer message. RuntimeError: wrong arguments.
        """
        body = self._make_receiver(tensors, peer, tag)
        place = self.describe_message(peer, self._membership.rank, tag)
        return self._launch("recv", tensors, tensors, body, *place)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> QueuedWork:
        """Start to receive the list's one tensor from any rank, which the Work's `source_rank()` returns. With ccl,
        wait() raises CpuftError. RuntimeError: wrong arguments.
        """
        body, channel = self._make_receiver(tensors, None, tag), f"{self._membership.label} from any (tag {tag})"
        return self._launch("recvAnySource", tensors, tensors, body, channel, self._membership.ranks)

    def _make_receiver(self, tensors: Tensors, peer: int | None, tag: int) -> Callable[[], int]:
        check_message("recv", self._membership, tensors, peer, tag)

        def body() -> int:
            with contiguous_in_place(tensors[0]) as dense:
                return self._backend.recv(dense.data_ptr(), dense.nbytes, peer, tag)

        return body


def _make_method(name: str, key: str) -> Callable[..., dist.Work]:
    return lambda self, *given: self._launch_collective(key, given)


add_methods(CollectiveGroup, _make_method)
