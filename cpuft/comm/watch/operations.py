"""What is under way on this rank, and what went before: the facts from which a hang is explained."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Progress = Mapping[str, tuple[int, str]]
"""Last operation a rank has started, by channel: its sequence number and name."""

GONE_GRACE_SECONDS = 3.0
"""A rank may finish its part of a collective and leave while the others still receive: they get this long."""


@dataclass(frozen=True)
class Operation:
    """One operation as this rank sees it."""

    channel: str
    """What it is ordered in: a group, or one direction and tag between two ranks of it."""
    sequence: int
    """Its number in the channel, from 1; equal on all ranks that take part."""
    name: str
    nbytes: int
    """Bytes this rank gives or takes."""
    ranks: tuple[int, ...]
    """All that take part, as ranks of the world."""
    timeout: float
    """Seconds it may take."""
    started: float
    """time.monotonic() when this rank began to wait."""


@dataclass
class Traffic:
    """What this rank has handed to collectives."""

    operations: int = 0
    nbytes: int = 0
    """Payload: what the caller passed, not what the library's algorithm makes of it on the wire."""


@dataclass
class Register:
    """Operations under way, progress by channel, and traffic. Safe to use from several threads."""

    pending: dict[int, Operation] = field(default_factory=dict)
    progress: dict[str, tuple[int, str]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, channel: str, name: str, nbytes: int, ranks: Sequence[int], timeout: float) -> Operation:
        """Number an operation and note that this rank has arrived at it."""
        with self._lock:
            sequence = self.progress.get(channel, (0, ""))[0] + 1
            operation = Operation(channel, sequence, name, nbytes, tuple(ranks), timeout, time.monotonic())
            self.progress[channel] = (sequence, name)
            self.pending[id(operation)] = operation
            self.traffic.operations += 1
            self.traffic.nbytes += nbytes
        return operation

    def end(self, operation: Operation) -> None:
        """The operation is over."""
        with self._lock:
            self.pending.pop(id(operation), None)

    def reached(self) -> dict[str, tuple[int, str]]:
        """A copy of the progress."""
        with self._lock:
            return dict(self.progress)

    def take_traffic(self) -> Traffic:
        """Traffic since the last call."""
        with self._lock:
            taken, self.traffic = self.traffic, Traffic()
        return taken

    def forget(self, label: str) -> None:
        """A group is closed: a later one of the same name numbers from 1."""
        with self._lock:
            for channel in [name for name in self.progress if name == label or name.startswith(f"{label} from ")]:
                del self.progress[channel]

    def snapshot(self) -> list[Operation]:
        """The operations under way."""
        with self._lock:
            return list(self.pending.values())


def find_overdue(pending: Sequence[Operation], gone: Mapping[int, float], now: float) -> Operation | None:
    """The operation to give up: the oldest past its deadline, or one that a rank which has left keeps from ending.

    Parameters
    ----------
    gone: when each rank that has left was missed, on the clock of `now` and `Operation.started`.
    """

    def given_up(operation: Operation) -> bool:
        left = [gone[rank] for rank in operation.ranks if rank in gone]
        waited_since_left = now - max(operation.started, min(left)) if left else 0.0
        return now - operation.started > operation.timeout or waited_since_left > GONE_GRACE_SECONDS

    return min(filter(given_up, pending), key=lambda operation: operation.started, default=None)


def describe_absence(
    operation: Operation, rank: int, answers: Mapping[int, Progress], gone: Mapping[int, float]
) -> dict[int, str]:
    """The ranks of the operation that did not arrive at it, each with what is known of it."""
    absent = {}
    for other in operation.ranks:
        if other in gone:
            absent[other] = "ended"
        elif other != rank and other not in answers:
            absent[other] = "no answer: stopped, or its host is lost"
        elif other != rank:
            sequence, name = answers[other].get(operation.channel, (0, ""))
            if sequence < operation.sequence:
                absent[other] = f"last at {name} #{sequence}" if sequence else "has not begun"
    return absent


def describe_failure(operation: Operation, rank: int, absent: Mapping[int, str], now: float) -> str:
    """The one line that explains why a run ends."""
    waited = now - operation.started
    who = ", ".join(f"rank {other} ({state})" for other, state in sorted(absent.items()))
    missing = f"did not arrive: {who}" if absent else "all ranks arrived: the network or a library is stuck"
    move = "look at the log of that rank" if absent else "check the interface and the network between the hosts"
    return (
        f"cpuft comm: rank {rank}: {operation.name} #{operation.sequence} of {operation.channel} "
        f"({operation.nbytes} bytes) waited {waited:.1f} s of at most {operation.timeout:g}; {missing}. "
        f"Next: {move}, or allow more time with --comm-timeout."
    )
