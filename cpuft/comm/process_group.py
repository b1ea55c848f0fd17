"""A c10d process group over any backend of blocking collectives.

Operations are queued to threads of the group, so that they overlap with computing. torch waits on their Work
objects and Futures.
"""

# torch's stub lists the overloads that its C++ class accepts; torch calls a subclass with the first one only.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
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
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from cpuft.comm import arguments
from cpuft.comm import tensors as collectives
from cpuft.comm.arguments import accept_forms, count_bytes, reduction_name
from cpuft.comm.backends.base import Backend, GroupMembership
from cpuft.comm.watchdog import CollectiveWatchdog, OperationRegister, stop_watchdog

Tensors = list[torch.Tensor]
_CLOSE_SECONDS = 1.0
_COLLECTIVES = "collectives"


class ProgressThread:
    """A thread that runs tasks in order, without autograd. Making one starts it.

    It is a daemon, so that a call that never returns does not block the exit.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cpuft-comm-{name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Run the task after all tasks that were put before; return at once.

        Tasks must handle their own errors: an exception ends the thread, and later tasks never run.
        """
        self._queue.put(task)

    def close(self, seconds: float) -> None:
        """End the thread after the tasks put so far, and wait at most this many seconds for its end.

        Tasks that are put later never run.
        """
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        # Grad mode is a property of a thread, and copies into parameters must not be recorded by autograd.
        with torch.no_grad():
            while (task := self._queue.get()) is not None:
                task()
                del task  # a waiting thread must not keep the last task's tensors alive


_idle_threads: list[ProgressThread] = []


def _run_callbacks(task: Callable[[], None]) -> None:
    """Run a task on an idle thread, or on a new one if there is none."""
    try:
        thread = _idle_threads.pop()
    except IndexError:
        thread = ProgressThread("callbacks")

    def run() -> None:
        task()
        _idle_threads.append(thread)

    thread.put(run)


class QueuedWork(dist.Work):
    """The Work of a queued operation. Its errors reach Python's wait() and C++ callbacks alike.

    `result` is what the future and `result()` return: the output tensors, in the form in which the caller passed them.

    Works made by torch's own `_create_work_from_future` swallow errors in wait(), and `Future.set_exception` passes C++
    a value that it cannot read. So the error is raised in a callback of a future, which both sides understand.
    Callbacks run on a thread of their own and not on the group's: those of torch's PowerSGD wait for a collective that
    the group's thread has still to run.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None
        self._source = -1
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._trigger: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def complete(self, source: int = -1) -> None:
        """Mark the operation as successful, which ends wait() and completes the future.

        `source` is the rank of the group from which data was received; -1 if none was.
        """
        self._source = source
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Mark the operation as failed: wait() and the future raise `error`."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._done.set()
            trigger = self._trigger
        if trigger is not None:
            _run_callbacks(lambda: trigger.set_result(None))

    def _unwrap(self, _: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors, the same one in each call.

        Its value() raises the error of a failed operation.
        """
        with self._lock:
            if self._future is None:
                self._trigger = torch.futures.Future()
                self._future = self._trigger.then(self._unwrap)
                if self._done.is_set():
                    self._trigger.set_result(None)
            return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done, and return True. Raises the operation's error.

        `timeout` is ignored, because the watchdog enforces the group's timeout.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Block until the operation is done. Raises the operation's error."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded; False while it is not done."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error; None if it has succeeded or is not done. Does not wait."""
        return self._error

    def result(self) -> Any:
        """Wait for the operation and return its output tensors, in the form in which they were passed.

        Raises the operation's error.
        """
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the rank of the group from which data was received; for a send, the sender, which is this rank.

        The result is -1 for collectives, and as long as the operation is not done. Does not wait.
        """
        return self._source

    _source_rank = source_rank


class CoalescedWork(dist.Work):
    """The Work of several operations that were launched together."""

    def __init__(self, works: Sequence[QueuedWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all operations are done, and return True. Raises the first error. `timeout` is ignored."""
        return all(work.wait() for work in self._works)

    def synchronize(self) -> None:
        """Block until all operations are done. Raises the first error."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all operations have succeeded or failed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all operations have succeeded; False while one is not done."""
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of one flat list of all output tensors. Its value() raises an operation's error."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for one in done.value() for tensor in _flatten(one.value())])


def _flatten(result: Any) -> Tensors:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flatten(part)]


def _begin_span(name: str, tensors: Tensors) -> Callable[[], object]:
    """Begin an event of torch's profiler, as torch's own groups do. Returns what ends it, on any thread."""
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():
        return lambda: None
    return functools.partial(
        autograd._record_function_with_args_exit, autograd._record_function_with_args_enter(name, *tensors)
    )


class CollectiveGroup(dist.ProcessGroup):
    """The process group of the backends ccl and mpi.

    Operations return at once a QueuedWork, whose wait() blocks until this rank's part is done, and raises the backend's
    error, mostly a RuntimeError. Until then the tensors must not be changed. `opts` is torch's object of options, of
    which `reduceOp` (default: sum) and `rootRank` (a rank of the group) are used; a reduceOp that only NCCL has
    (PREMUL_SUM) raises NotImplementedError at once. Other forms of the arguments, such as `root=0`, are accepted as by
    torch's groups. If the timeout passes or a rank is lost, the watchdog ends the process.

    Wrong arguments raise RuntimeError at once. Calls that do not fit those of the other ranks raise it on all ranks,
    from wait(), before a tensor is read or written, unless `compares_calls` is false.

    Tensors may have any layout; those that are not contiguous are copied. Collectives run in order on one thread. Sends
    and receives have a thread for each peer, direction and tag, because a blocking send may wait for a receive that the
    peer posts later.

    Parameters
    ----------
    timeout: seconds that an operation may take.
    register: where operations are registered from their begin to their end.
    watchdog: closed by `shutdown` if this is the group of all ranks.
    """

    def __init__(
        self,
        backend: Backend,
        membership: GroupMembership,
        timeout: float,
        register: OperationRegister,
        watchdog: CollectiveWatchdog,
    ) -> None:
        # The constructor that takes a store cannot make subclasses.
        super().__init__(membership.rank, membership.size)  # type: ignore[call-arg]
        self._backend = backend
        self._membership = membership
        self._timeout = timeout
        self._register = register
        self._watchdog = watchdog
        self._threads: dict[str, ProgressThread] = {}
        self._coalesced: list[QueuedWork] | None = None
        self.compares_calls = True
        """Whether the ranks compare their calls before each collective; the same on all ranks."""
        self._group_name = membership.label
        self._group_description = ""

    # torch's C++ class keeps these names in its own backends, of which this group has none.
    def name(self) -> str:
        """Return the backend's name, ccl or mpi."""
        return self._backend.name

    getBackendName = name

    def getGroupName(self) -> str:
        """Return the unique name that torch gave the group; until then its label, for example "the world"."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set the group's name. torch calls this after creation."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Return the group's description; "" until torch sets one."""
        return self._group_description

    def setGroupDesc(self, text: str) -> None:
        """Set the group's description. torch calls this after creation."""
        self._group_description = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def timeout(self) -> timedelta:
        """How long an operation of this group may take."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that have not begun yet."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Close the group without waiting for any other rank; its threads get a second each to finish what was queued.

        If it is the group of all ranks, the process's watchdog is stopped, too.
        """
        for thread in self._threads.values():
            thread.close(_CLOSE_SECONDS)
        self._backend.close()
        self._register.forget_group(self._membership.label)
        if self._membership.is_world:
            stop_watchdog()

    abort = shutdown

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def _launch(
        self,
        name: str,
        payload: Tensors,
        result: Any,
        body: Callable[[], int | None],
        channel: str = "",
        ranks: tuple[int, ...] = (),
    ) -> QueuedWork:
        """Queue an operation and return its Work.

        Parameters
        ----------
        name: of the operation, in messages.
        payload: this rank's contribution, whose bytes are counted.
        result: the output tensors.
        body: runs the operation; returns the rank it received from, or None.
        channel, ranks: what the operation is ordered in and the world ranks that take part; by default the group.
        """
        work = QueuedWork(result)
        nbytes = count_bytes(payload)
        key = f"{name} {channel}" if channel else _COLLECTIVES
        end_span = _begin_span(f"{self.name()}:{name}", payload)

        def task() -> None:
            operation = self._register.begin(
                channel or self._membership.label, name, nbytes, ranks or self._membership.ranks, self._timeout
            )
            try:
                try:
                    source = body()
                finally:
                    end_span()
            except Exception as error:
                self._watchdog.exit_if_rank_lost(operation, error)
                self._register.end(operation)
                work.fail(error)
            else:
                self._register.end(operation)
                work.complete(-1 if source is None else source)

        if key not in self._threads:
            self._threads[key] = ProgressThread(key)
        self._threads[key].put(task)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _launch_collective(
        self,
        name: str,
        payload: Tensors,
        result: Any,
        check: Callable[..., str],
        given: tuple[Any, ...],
        body: Callable[[], None],
    ) -> QueuedWork:
        """Check a collective's arguments, and queue it; before its body runs, all ranks compare what they have called.

        Parameters
        ----------
        check, given: the check of `arguments` and the arguments that it gets. If it refuses them, its error is raised,
            and told to the ranks that wait for this one.
        """

        def agree(call: str) -> None:
            if self.compares_calls:
                collectives.check_ranks_agree(self._backend, self._membership.ranks, call)

        try:
            call = check(self._membership, *given)
        except RuntimeError as error:
            refusal = str(error)
            self._launch(name, [], [], lambda: agree(refusal))
            raise

        def checked_body() -> None:
            agree(call)
            body()

        return self._launch(name, payload, result, checked_body)

    @accept_forms(AllreduceOptions)
    def allreduce(self, tensors: Tensors, opts: Any) -> QueuedWork:
        """Start to reduce a tensor, the only one of the list, over the ranks by opts.reduceOp, in place.

        A sparse tensor can be summed. The Work's result is `tensors`. Raises NotImplementedError: the reduction exists
        in NCCL only (PREMUL_SUM).
        """
        return self._all_reduce(arguments.check_all_reduce, tensors, opts)

    @accept_forms(AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> QueuedWork:
        """Start to reduce tensors of one type, which may differ in size, as `allreduce` does."""
        return self._all_reduce(arguments.check_coalesced, tensors, opts)

    def _all_reduce(self, check: Callable[..., str], tensors: Tensors, opts: Any) -> QueuedWork:
        rank, size = self._membership.rank, self._membership.size

        def body() -> None:
            for tensor in tensors:
                if tensor.is_sparse:
                    collectives.all_reduce_sparse(self._backend, rank, size, tensor)
                    continue
                with collectives.contiguous_in_place(tensor) as dense:
                    collectives.all_reduce(self._backend, size, dense, reduction_name(opts.reduceOp))

        return self._launch_collective("all_reduce", tensors, tensors, check, (tensors, opts), body)

    @accept_forms(ReduceOptions)
    def reduce(self, tensors: Tensors, opts: Any) -> QueuedWork:
        """Start to reduce a tensor, the only one of the list, to rank opts.rootRank by opts.reduceOp, in place.

        The tensors of the other ranks do not change. This costs as much as an all-reduce. The Work's result is
        `tensors`.

        Raises NotImplementedError: the reduction exists in NCCL only (PREMUL_SUM).
        """

        def body() -> None:
            whole = collectives.to_contiguous(tensors[0]).clone()
            collectives.all_reduce(self._backend, self._membership.size, whole, reduction_name(opts.reduceOp))
            if self._membership.rank == opts.rootRank:
                tensors[0].copy_(whole)

        return self._launch_collective("reduce", tensors, tensors, arguments.check_reduce, (tensors, opts), body)

    @accept_forms(BroadcastOptions)
    def broadcast(self, tensors: Tensors, opts: Any) -> QueuedWork:
        """Start to copy the tensor of rank opts.rootRank, the only one of the list, into those of all ranks.

        The Work's result is `tensors`.
        """

        def body() -> None:
            with collectives.contiguous_in_place(tensors[0]) as dense:
                collectives.broadcast(self._backend, dense, opts.rootRank)

        return self._launch_collective("broadcast", tensors, tensors, arguments.check_broadcast, (tensors, opts), body)

    @accept_forms(AllgatherOptions, 2)
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> QueuedWork:
        """Start to give every rank the tensors of all ranks, which may differ in size. The Work's result is `outputs`.

        Parameters
        ----------
        outputs: for each input, a list of one tensor for each rank, with the shape and type of that rank's input.
        inputs: this rank's tensors.
        """

        def body() -> None:
            for targets, source in zip(outputs, inputs, strict=True):
                collectives.all_gather(self._backend, self._membership.rank, source, targets)

        given = outputs, inputs, opts
        return self._launch_collective("all_gather", inputs, outputs, arguments.check_all_gather, given, body)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> QueuedWork:
        """Start to gather several inputs. `outputs` holds a list for each rank, with a tensor for each input.

        The Work's result holds the same tensors with a list for each input. Raises RuntimeError: the lists differ in
        length.
        """
        if any(len(targets) != len(inputs) for targets in outputs):
            raise RuntimeError("all_gather: requires input/output tensor lists to have the same length")
        return self.allgather([list(targets) for targets in zip(*outputs, strict=True)], inputs, opts)

    @accept_forms(AllgatherOptions, 2, lists=False)
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> QueuedWork:
        """Start to give every rank the equally large tensors of all ranks, one after another in `output`.

        `output` has the elements of `source` times the number of ranks. It is the Work's result.
        """
        return self._gather_single([output], [source], output)

    @accept_forms(AllgatherOptions, 2)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> QueuedWork:
        """Start to give every rank several equally large tensors of all ranks.

        The n-th output gets the n-th inputs of all ranks, one after another. The Work's result is `outputs`.
        """
        return self._gather_single(outputs, inputs, outputs)

    def _gather_single(self, outputs: Tensors, inputs: Tensors, result: Any) -> QueuedWork:
        def body() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                collectives.all_gather_single(self._backend, source, output)

        given = outputs, inputs, None
        return self._launch_collective("all_gather", inputs, result, arguments.check_all_gather_single, given, body)

    @accept_forms(ReduceScatterOptions, 2)
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> QueuedWork:
        """Start to reduce lists of tensors, of which rank r gets the r-th one; they may differ in size.

        The Work's result is `outputs`.

        Parameters
        ----------
        outputs: one tensor for each list, with the shape of this rank's tensor in it.
        inputs: lists of one tensor for each rank.
        opts: reduceOp is the reduction.

        Raises NotImplementedError: the reduction exists in NCCL only (PREMUL_SUM).
        """

        def body() -> None:
            reduction = reduction_name(opts.reduceOp)
            for output, pieces in zip(outputs, inputs, strict=True):
                collectives.reduce_scatter(self._backend, self._membership.rank, pieces, output, reduction)

        given = outputs, inputs, opts
        payload = [piece for pieces in inputs for piece in pieces]
        return self._launch_collective("reduce_scatter", payload, outputs, arguments.check_reduce_scatter, given, body)

    @accept_forms(ReduceScatterOptions, 2, lists=False)
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> QueuedWork:
        """Start to reduce a tensor of as many equal parts as ranks, of which rank r gets the r-th one in `output`.

        The reduction is opts.reduceOp. The Work's result is `output`.

        Raises NotImplementedError: the reduction exists in NCCL only (PREMUL_SUM).
        """
        return self._scatter_single([output], [source], opts, output)

    @accept_forms(ReduceScatterOptions, 2)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> QueuedWork:
        """Start to reduce several tensors of as many equal parts as ranks.

        Rank r gets the r-th part of the n-th input in the n-th output. The reduction is opts.reduceOp. The Work's
        result is `outputs`.

        Raises NotImplementedError: the reduction exists in NCCL only (PREMUL_SUM).
        """
        return self._scatter_single(outputs, inputs, opts, outputs)

    def _scatter_single(self, outputs: Tensors, inputs: Tensors, opts: Any, result: Any) -> QueuedWork:
        def body() -> None:
            reduction, rank = reduction_name(opts.reduceOp), self._membership.rank
            for output, source in zip(outputs, inputs, strict=True):
                whole = collectives.to_contiguous(source)
                with collectives.contiguous_in_place(output) as dense:
                    collectives.reduce_scatter_single(self._backend, rank, whole, dense, reduction)

        check, given = arguments.check_reduce_scatter_single, (outputs, inputs, opts)
        return self._launch_collective("reduce_scatter", inputs, result, check, given, body)

    @accept_forms(AllToAllOptions, 2)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> QueuedWork:
        """Start to send the r-th input to rank r, and to receive the r-th output from it.

        The Work's result is `outputs`.
        """
        body = lambda: collectives.all_to_all(self._backend, inputs, outputs)  # noqa: E731
        given = outputs, inputs, opts
        return self._launch_collective("all_to_all", inputs, outputs, arguments.check_all_to_all, given, body)

    @accept_forms(AllToAllOptions, 4, lists=False)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
        opts: Any,
    ) -> QueuedWork:
        """Start to send slices along the first dimension of `source` to all ranks, and to receive slices of `output`.

        The Work's result is `output`.

        Parameters
        ----------
        output_sizes, source_sizes: length of each rank's slice, in elements of the first dimension. An empty list means
            equal slices.
        """

        def body() -> None:
            sizes = source_sizes, output_sizes
            collectives.all_to_all_single(self._backend, source, output, sizes, self._membership.size)

        check, given = arguments.check_all_to_all_single, (output, source, output_sizes, source_sizes, opts)
        return self._launch_collective("all_to_all", [source], output, check, given, body)

    @accept_forms(GatherOptions, 2)
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> QueuedWork:
        """Start to send the tensors of all ranks to rank opts.rootRank of the group. The Work's result is `outputs`.

        Parameters
        ----------
        outputs: on the root, a list that holds a list of one tensor for each rank; empty on the other ranks.
        inputs: a list of this rank's tensor.
        """

        def body() -> None:
            targets = outputs[0] if outputs else []
            collectives.gather(self._backend, self._membership.size, opts.rootRank, inputs[0], targets)

        given = outputs, inputs, opts
        return self._launch_collective("gather", inputs, outputs, arguments.check_gather, given, body)

    @accept_forms(ScatterOptions, 2)
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> QueuedWork:
        """Start to send the r-th tensor of rank opts.rootRank of the group to rank r. The Work's result is `outputs`.

        Parameters
        ----------
        outputs: a list of the tensor that receives this rank's part.
        inputs: on the root, a list that holds a list of one tensor for each rank; empty on the other ranks.
        """

        def body() -> None:
            sources = inputs[0] if inputs else []
            collectives.scatter(self._backend, self._membership.size, opts.rootRank, sources, outputs[0])

        given = outputs, inputs, opts
        return self._launch_collective("scatter", outputs, outputs, arguments.check_scatter, given, body)

    @accept_forms(BarrierOptions, 0)
    def barrier(self, opts: Any) -> QueuedWork:
        """Start to wait for all ranks: the Work is done when all of them have called this.

        Its result is a list of one tensor without meaning.
        """
        token = torch.zeros(1, dtype=torch.int32)
        body = lambda: collectives.all_reduce(self._backend, self._membership.size, token, "sum")  # noqa: E731
        return self._launch_collective("barrier", [], [token], arguments.check_barrier, (opts,), body)

    # The names of these methods in torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> QueuedWork:
        """Start to send a tensor, the only one of the list, to rank `peer`, which receives it with the same tag.

        The Work may be done before the peer has received it. Its result is `tensors`.
        """

        arguments.check_message("send", self._membership, tensors, peer, tag)

        def body() -> int:
            dense = collectives.to_contiguous(tensors[0])
            self._backend.send(dense.data_ptr(), dense.nbytes, peer, tag)
            return self._membership.rank

        return self._launch_point_to_point("send", tensors, self._membership.rank, peer, tag, body)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> QueuedWork:
        """Start to receive a tensor, the only one of the list, from rank `peer` of the group, sent with the same tag.

        The Work's result is `tensors`. Its wait() raises an error if the message is longer than the tensor, and with
        ccl also if it is shorter.
        """
        body = self._make_receiver(tensors, peer, tag)
        return self._launch_point_to_point("recv", tensors, peer, self._membership.rank, tag, body)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> QueuedWork:
        """Start to receive a tensor with this tag from the rank that sends first.

        `source_rank()` of the Work returns that rank, and its result is `tensors`. The backend ccl cannot do this:
        wait() then raises CpuftError.
        """
        body, channel = self._make_receiver(tensors, None, tag), f"{self._membership.label} from any (tag {tag})"
        return self._launch("recvAnySource", tensors, tensors, body, channel, self._membership.ranks)

    def _make_receiver(self, tensors: Tensors, peer: int | None, tag: int) -> Callable[[], int]:
        arguments.check_message("recv", self._membership, tensors, peer, tag)

        def body() -> int:
            with collectives.contiguous_in_place(tensors[0]) as dense:
                return self._backend.recv(dense.data_ptr(), dense.nbytes, peer, tag)

        return body

    def _launch_point_to_point(
        self, name: str, tensors: Tensors, source: int, target: int, tag: int, body: Callable[[], int]
    ) -> QueuedWork:
        ranks = (self._membership.ranks[source], self._membership.ranks[target])
        channel = f"{self._membership.label} from {ranks[0]} to {ranks[1]} (tag {tag})"
        return self._launch(name, tensors, tensors, body, channel, ranks)
