"""Threads that run blocking calls in order, and the Work that torch waits on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]


class Queue:
    """One thread that runs what it is given, in order. It is a daemon: a call that never returns keeps nobody."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cpuft-comm-{name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Run the task after all tasks put before. Tasks handle their own errors."""
        self._queue.put(task)

    def close(self, seconds: float) -> None:
        """End after the tasks put so far; wait for that no longer than so many seconds."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        # Grad mode belongs to a thread, and copies into parameters must not be recorded.
        with torch.no_grad():
            while (task := self._queue.get()) is not None:
                task()
                del task  # a waiting thread must not keep the last task's tensors alive


_idle: list[Queue] = []


def run_aside(task: Callable[[], None]) -> None:
    """Run a task on a thread that nothing else needs: an idle one, or a new one."""
    try:
        own = _idle.pop()
    except IndexError:
        own = Queue("callbacks")

    def run() -> None:
        task()
        _idle.append(own)

    own.put(run)


class QueuedWork(dist.Work):
    """Work whose errors reach Python's wait() and C++ callbacks alike.

    Works made by torch's own `_create_work_from_future` swallow errors in wait(), and `Future.set_exception` hands C++
    a value it cannot read; hence a future whose error is raised in a callback, which both sides understand. Callbacks
    run aside, not on the queue: those of torch's PowerSGD wait there for a collective that the queue has still to run.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None
        self._source = -1
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._trigger: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def complete(self, source: int = -1) -> None:
        """The operation is done; `source` is the rank received from."""
        self._source = source
        self._end()

    def fail(self, error: BaseException) -> None:
        """The operation has failed."""
        self._error = error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._over.set()
            trigger = self._trigger
        if trigger is not None:
            run_aside(lambda: trigger.set_result(None))

    def _unwrap(self, _: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""
        with self._lock:
            if self._future is None:
                self._trigger = torch.futures.Future()
                self._future = self._trigger.then(self._unwrap)
                if self._over.is_set():
                    self._trigger.set_result(None)
            return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; the group's deadline holds, whatever `timeout` says. Raises what the operation raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What the operation raised."""
        return self._error

    def result(self) -> Any:
        """The output tensors, once done."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """The rank a receive was served by."""
        return self._source

    _source_rank = source_rank


class JoinedWork(dist.Work):
    """Several works as one, for coalesced operations."""

    def __init__(self, works: Sequence[QueuedWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are done; raises the first error."""
        return all(work.wait() for work in self._works)

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are over and went well."""
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors of all."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for one in done.value() for tensor in _flat(one.value())])


def _flat(result: Any) -> Tensors:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flat(part)]
