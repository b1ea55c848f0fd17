"""The watchdog: no collective waits for ever, and a line on standard error names the ranks that are missing.

Each process has one register of pending operations and one watchdog, which all of its process groups share.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from cpuft.comm.liveness import LivenessConnection
from cpuft.errors import RESUMABLE
from cpuft.rank.connection_check import describe_steps
from cpuft.rank.diagnostics import start_reporting, wait_for_stack_dump
from cpuft.rank.process import abort_job, format_failure, remove_shared_memory
from cpuft.rank.world import parse_world

TIMEOUT_VARIABLE = "CPUFT_COMM_TIMEOUT"
"""Environment variable with the timeout of all operations in seconds, which overrides init_process_group's."""
GONE_GRACE_SECONDS = 3.0
"""How long operations may go on after one of their ranks has ended: it may exit while the others still receive."""

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
_EXIT_DELAY_SECONDS = 0.5
_DETECTION_SECONDS = 2.0
"""How long a library's connection error waits for the liveness hub to notice the lost rank, too."""
_CONNECTION_ERRORS = ("connection", "peer", "socket", "timed out", "unreachable", "process failed")
_ENDED = "ended, or cut off"
_MOST_RANKS = 8
_SILENT = "no answer: stopped, or its host is lost"
_HALF_OPERATIONS = ("all_to_all", "all_gather", "reduce_scatter")
"""Collectives that send half as many bytes as an all-reduce of the same tensor."""

_EQUAL_SIZES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "scatter")
"""Collectives in which all ranks pass the same number of bytes, or mostly do."""

_MOST_RECENT = 64
_MOST_CHANNELS = 500
"""Their numbers and names fit into the 128 KiB of a message."""

Call = tuple[str, int]  # name and bytes
Progress = Mapping[str, tuple[int, str]]
"""By channel, the sequence number and name of the last operation that a rank has started."""


@dataclass(frozen=True)
class Operation:
    """A collective, send or receive, as this rank sees it."""

    channel: str
    """What the operation is ordered in: a group ("the world", "group 3"), or one direction and tag between two ranks of
    a group ("the world from 0 to 1 (tag 0)")."""
    sequence: int
    """Its number in the channel, from 1; the same on all ranks that take part."""
    name: str
    """For example all_reduce, barrier, send; "connect" while a group is made."""
    nbytes: int
    """Bytes that this rank contributes or receives."""
    ranks: tuple[int, ...]
    timeout: float
    started: float
    """time.monotonic() when this rank began to wait."""


@dataclass
class OperationRegister:
    """Pending operations, progress by channel, and traffic of this process. Safe to use from several threads."""

    # torch's flight recorder, which `cpuft.rank.diagnostics` reads for groups of torch's own gloo, cannot take its
    # place: it records no process groups that are written in Python.

    pending: dict[int, Operation] = field(default_factory=dict)
    progress: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number and name of the last operation of each channel; the channel that was used last is the last one."""
    recent: deque[tuple[str, int, str, int]] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT))
    """Channel, sequence number, name and bytes of the operations that this rank has begun last."""
    traffic: int = 0
    """What this rank has passed to collectives, in the bytes of an all-reduce: what the caller passed, and not what the
    library's algorithm sends. An operation that is half of an all-reduce counts half of the bytes with which all ranks
    end, so that operations with the same count load a network alike."""
    names: set[str] = field(default_factory=set)
    uncounted: set[tuple[int, ...]] = field(default_factory=set)
    """World ranks of the groups whose bytes do not count in the traffic."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, channel: str, name: str, nbytes: int, ranks: Sequence[int], timeout_seconds: float) -> Operation:
        """Register and return this rank's next operation of a channel, numbered from 1, and count its traffic."""
        with self._lock:
            sequence = self.progress.pop(channel, (0, ""))[0] + 1
            operation = Operation(channel, sequence, name, nbytes, tuple(ranks), timeout_seconds, time.monotonic())
            self.progress[channel] = (sequence, name)
            self.recent.append((channel, sequence, name, nbytes))
            self.pending[id(operation)] = operation
            self.names.add(name)
            whole = nbytes * len(ranks) if name == "all_gather" else nbytes
            if operation.ranks not in self.uncounted:
                self.traffic += whole // 2 if name in _HALF_OPERATIONS else whole
        return operation

    def ignore_traffic(self, ranks: Sequence[int]) -> None:
        """Count later operations of exactly these world ranks, for example those of one host, without their bytes."""
        with self._lock:
            self.uncounted.add(tuple(ranks))

    def end(self, operation: Operation) -> None:
        """Remove an operation that has succeeded or failed from the pending ones; do nothing if it is not pending."""
        with self._lock:
            self.pending.pop(id(operation), None)

    def copy_progress(self) -> dict[str, Any]:
        """Return {"progress": that of the channels used last, "recent": a list of `recent`}, for a message in JSON."""
        with self._lock:
            return {"progress": dict([*self.progress.items()][-_MOST_CHANNELS:]), "recent": list(self.recent)}

    def list_pending(self) -> list[Operation]:
        """Return the pending operations in the order in which they began."""
        with self._lock:
            return list(self.pending.values())

    def take_traffic(self) -> int:
        """Return the traffic since the last call in bytes, and count from zero again."""
        with self._lock:
            taken, self.traffic = self.traffic, 0
        return taken

    def report(self) -> dict[str, object]:
        """Return what stack dumps show, for JSON: "pending" (operations with ages in seconds), "progress", "names"."""
        now = time.monotonic()
        pending = [
            {"channel": one.channel, "sequence": one.sequence, "name": one.name, "seconds": now - one.started}
            | {"ranks": one.ranks}
            for one in self.list_pending()
        ]
        return {"pending": pending, "progress": self.copy_progress()["progress"], "names": sorted(self.names)}

    def forget_group(self, label: str) -> None:
        """Forget the progress in a closed group's channels, so that a later group of the same label counts from 1."""
        with self._lock:
            for channel in [name for name in self.progress if name == label or name.startswith(f"{label} from ")]:
                del self.progress[channel]


def find_overdue(pending: Sequence[Operation], gone: Mapping[int, float], now: float) -> Operation | None:
    """Return the operation that must be given up, the one that began first if there are several; None if there is none.

    That is one whose timeout is over, or one with a rank that has ended, 3 s (GONE_GRACE_SECONDS) after both the rank's
    end and the operation's begin. `gone` has world ranks and when their end was noticed, by time.monotonic(), as `now`.
    """

    def is_overdue(operation: Operation) -> bool:
        ended = [gone[rank] for rank in operation.ranks if rank in gone]
        waited_since_end = now - max(operation.started, min(ended)) if ended else 0.0
        return now - operation.started > operation.timeout or waited_since_end > GONE_GRACE_SECONDS

    return min(filter(is_overdue, pending), key=lambda operation: operation.started, default=None)


def find_missing_ranks(
    operation: Operation, rank: int, answers: Mapping[int, Progress], gone: Mapping[int, float]
) -> dict[int, str]:
    """Return the world ranks that keep an operation from ending, each with its state as text; {} if all have arrived.

    If ranks are lost (in `gone`, or without an answer in `answers`), only they are returned, and otherwise only those
    that are furthest behind ("last at all_reduce #3" or "has not begun"), because others wait for them. `rank` is this
    rank; if it is not rank 0 and even its own answer is missing, only rank 0 is returned, which relays all answers.
    """
    if rank and rank not in answers:  # rank 0 relays all messages: not even this rank's own answer came back
        return {0: _ENDED if 0 in gone else _SILENT}
    others = [other for other in operation.ranks if other != rank]
    lost = {other: _ENDED if other in gone else _SILENT for other in others if other in gone or other not in answers}
    reached = {other: answers[other].get(operation.channel, (0, "")) for other in others if other not in lost}
    last = min((sequence for sequence, _ in reached.values()), default=operation.sequence)
    if lost or last >= operation.sequence:
        return lost
    return {
        other: f"last at {name} #{sequence}" if sequence else "has not begun"
        for other, (sequence, name) in reached.items()
        if sequence == last
    }


def describe_failure(
    operation: Operation, rank: int, missing: Mapping[int, str], now: float, calls: Mapping[int, Call]
) -> str:
    """Return why this rank ends, in a line without newline; `calls` has (name, bytes) of each rank that has arrived."""
    waited = now - operation.started
    names = ", ".join(f"rank {other} ({state})" for other, state in sorted(missing.items()))
    arrived = f"did not arrive: {names}" if missing else "all ranks arrived, so the network or a library hangs"
    remedy = "look at the log of that rank" if missing else "check the interface and the network between the hosts"
    different = set() if missing else {*calls.values()}
    if len({name for name, _ in different}) > 1:
        arrived = f"all ranks arrived, but with different operations: {_describe_calls(calls)}"
        remedy = "let all ranks call the same operations in the same order"
    elif len(different) > 1 and operation.name in _EQUAL_SIZES:
        arrived = f"all ranks arrived, but with different sizes: {_describe_calls(calls)}"
        remedy = "pass tensors of the same shape and type on all ranks"
    return (
        f"cpuft comm: rank {rank}: {operation.name} #{operation.sequence} of {operation.channel} "
        f"({operation.nbytes} bytes) waited {waited:.1f} s of at most {operation.timeout:g}; {arrived}. "
        f"Next: {remedy}, or allow more time with --comm-timeout."
    )


def _describe_calls(calls: Mapping[int, Call]) -> str:
    """Return for example "ranks 0, 2 in all_reduce of 4000 bytes, rank 1 in all_reduce of 4004 bytes"."""
    groups: dict[Call, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call, []).append(rank)
    texts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_RANKS]))}{', ...' * (len(ranks) > _MOST_RANKS)}"
        f" in {name} of {nbytes} bytes"
        for (name, nbytes), ranks in groups.items()
    ]
    return ", ".join(texts[:_MOST_RANKS] + ["..."] * (len(texts) > _MOST_RANKS))


class CollectiveWatchdog:
    """A thread that ends the process when an operation is overdue, after it has asked all ranks for their progress.

    Before that, it writes two lines to standard error, which name the missing ranks for the user and for the launcher,
    and it tells the other ranks, which end as well. It ends the process with os._exit, because destroying a pending
    oneCCL event blocks, and so does finalizing MPI when a rank is gone.
    """

    def __init__(self, register: OperationRegister) -> None:
        self._register = register
        self._rank = 0
        self._connection: LivenessConnection | None = None
        self._gone: dict[int, float] = {}
        self._answers: dict[int, tuple[float, dict[str, tuple[int, str]]]] = {}
        self._recent: dict[int, list[Any]] = {}
        self._gave_up: set[int] = set()
        self._ending = threading.Lock()
        self._closed = threading.Event()

    def start(self, store: Store, rank: int, ranks: tuple[int, ...], is_first: bool) -> None:
        """Connect `ranks`, if there are several, and start the thread; the one with `is_first` runs the liveness hub.

        The first rank waits for all others, but at most 60 s. Raises as `LivenessConnection`: CpuftError, OSError or
        RuntimeError.
        """
        self._rank = rank
        if len(ranks) > 1:
            self._connection = LivenessConnection(store, rank, ranks, is_first, self._handle_message)
            # The hub's thread must answer all ranks before MPI_Init, which holds the GIL until the others are there.
            self._connection.wait_for_all()
        threading.Thread(target=self._run, name="cpuft-comm-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching, because this process needs no more communication; the connection to other ranks is closed."""
        self._closed.set()
        if self._connection:
            self._connection.close()

    def exit_if_rank_lost(self, operation: Operation, error: BaseException) -> None:
        """End the process (code 75) if a rank of the operation has ended; else return, 2 s later if a connection
        failed.
        """
        is_connection_error = any(text in str(error).lower() for text in _CONNECTION_ERRORS)
        deadline = time.monotonic() + (_DETECTION_SECONDS if is_connection_error else 0.0)
        while not self._closed.is_set():
            if any(rank in self._gone for rank in operation.ranks):
                self._give_up(operation)
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def _run(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            overdue = find_overdue(self._register.list_pending(), self._gone, time.monotonic())
            if overdue:
                self._give_up(overdue)

    def _give_up(self, operation: Operation) -> None:
        with self._ending:
            text, missing = self._explain(operation)
            if self._connection:
                why = f"{operation.name} #{operation.sequence}"
                self._connection.send({"end": self._rank, "why": why, "missed": sorted(missing)})
            _write_and_exit(text, missing, not self._gone)

    def _explain(self, operation: Operation, silent: Collection[int] = ()) -> tuple[str, dict[int, str]]:
        """Ask all ranks but the `silent` ones, and return why this rank ends, and the ranks that are missing."""
        self._request_progress(operation, silent)
        recent = time.monotonic() - 2 * _ANSWER_SECONDS
        answers = {rank: progress for rank, (when, progress) in self._answers.items() if when >= recent}
        missing = find_missing_ranks(operation, self._rank, answers, self._gone)
        # Ranks that have given up may have ended since.
        missing = {rank: state for rank, state in missing.items() if rank not in self._gave_up} or missing
        calls = {
            rank: (name, nbytes)
            for rank in operation.ranks
            for channel, sequence, name, nbytes in self._recent.get(rank, ())
            if (channel, sequence) == (operation.channel, operation.sequence)
        }
        return describe_failure(operation, self._rank, missing, time.monotonic(), calls), missing

    def _request_progress(self, operation: Operation, silent: Collection[int]) -> None:
        """Ask all ranks how far they are, and wait up to 2 s for those of the operation that are not `silent`."""
        asked = time.monotonic()
        if self._connection:
            self._connection.send({"ask": self._rank})
        wanted = {*operation.ranks, self._rank} - set(silent)
        while time.monotonic() - asked < _ANSWER_SECONDS and 0 not in self._gone:
            answered = {rank for rank, (when, _) in self._answers.items() if when >= asked}
            if wanted <= answered | set(self._gone):
                break
            time.sleep(0.05)

    def _handle_message(self, message: dict[str, Any]) -> None:
        if self._closed.is_set():
            return
        if "gone" in message:
            self._gone[int(message["gone"])] = time.monotonic()
        elif "ask" in message and self._connection:
            self._connection.send({"answer": self._rank, **self._register.copy_progress()})
        elif "answer" in message:
            progress = {channel: (int(seq), str(name)) for channel, (seq, name) in message["progress"].items()}
            self._answers[int(message["answer"])] = (time.monotonic(), progress)
            self._recent[int(message["answer"])] = message["recent"]
        elif "hub" in message:
            self._gone.setdefault(0, time.monotonic())
        elif "end" in message and message["end"] != self._rank:
            self._gave_up.add(int(message["end"]))
            threading.Thread(target=self._follow, args=(message,), daemon=True).start()

    def _follow(self, message: dict[str, Any]) -> None:
        if not self._ending.acquire(blocking=False):
            return  # this rank is already ending, with a line of its own
        pending = min(self._register.list_pending(), key=lambda operation: operation.started, default=None)
        if pending:
            # The other rank may have asked for another operation, and then not waited for the ranks of this one.
            text, missing = self._explain(pending, silent=[*message["missed"], *self._gave_up])
            _write_and_exit(text, missing, not self._gone)
        reason = f"rank {message['end']} gave up {message['why']}"
        text = f"cpuft comm: rank {self._rank}: ended because {reason}, which this rank had not joined."
        _write_and_exit(text, set(message["missed"]) - {self._rank}, not self._gone)


def _write_and_exit(text: str, missing: Collection[int], is_hang: bool) -> None:
    # This is cpuft.rank's line, too: mpirun may end cpuft.rank before it can write it.
    line = describe_steps(has_succeeded=False)
    line += format_failure(parse_world(os.environ), socket.gethostname(), RESUMABLE, missing)
    with contextlib.suppress(OSError):
        if is_hang:
            wait_for_stack_dump(f"{text}\n{line}\n")
        else:
            os.write(2, f"{text}\n{line}\n".encode())
    # On a thread of its own, because a stuck thread may hold the lock of stdout.
    threading.Thread(target=sys.stdout.flush, daemon=True).start()
    # mpirun kills all ranks when the first one ends, and the others need a moment to write a line of their own.
    time.sleep(_EXIT_DELAY_SECONDS)
    abort_job(os.environ, RESUMABLE)
    remove_shared_memory(os.getpid())
    os._exit(RESUMABLE)


register = OperationRegister()
_watchdog: CollectiveWatchdog | None = None
_lock = threading.Lock()


def start_watchdog(store: Store, group_rank: int, ranks: tuple[int, ...]) -> CollectiveWatchdog:
    """Return the watchdog of this process; the first call starts it, together with the other `ranks`.

    The rank with `group_rank` 0 runs the liveness hub. CpuftError, OSError, RuntimeError: as `LivenessConnection`.
    """
    global _watchdog
    with _lock:
        if _watchdog is None:
            start_reporting(register.report)
            started = CollectiveWatchdog(register)
            try:
                started.start(store, ranks[group_rank], ranks, is_first=group_rank == 0)
            except BaseException:
                started.close()
                raise
            _watchdog = started
        return _watchdog


def stop_watchdog() -> None:
    """Close the watchdog of this process, if there is one; the next group starts a new one."""
    global _watchdog
    with _lock:
        if _watchdog is not None:
            _watchdog.close()
            _watchdog = None


take_traffic = register.take_traffic
"""Returns the bytes passed to cpuft's groups, not to those of other backends, by this rank since the last call."""
