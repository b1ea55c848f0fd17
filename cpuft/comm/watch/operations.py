"""What is under way on this rank, and what went before: the facts from which a hang is explained."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Progress = Mapping[str, tuple[int, str]]
"""Last operation a rank has started, by channel: its sequence number and name."""

_LOST = "ended, or cut off"
_SILENT = "no answer: stopped, or its host is lost"
_HALVES = ("all_to_all", "all_gather", "reduce_scatter")
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
    """Payload as an all-reduce's: what the caller passed, not what the library's algorithm makes of it on the wire. Of
    halves of an all-reduce it is half of what all ranks end with, so that operations of as many bytes load a link
    alike."""


@dataclass
class Register:
    """Operations under way, progress by channel, and traffic. Safe to use from several threads."""

    pending: dict[int, Operation] = field(default_factory=dict)
    progress: dict[str, tuple[int, str]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    names: set[str] = field(default_factory=set)
    """Names of all operations that this rank has ever begun."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, channel: str, name: str, nbytes: int, ranks: Sequence[int], timeout: float) -> Operation:
        """Number an operation and note that this rank has arrived at it."""
        with self._lock:
            sequence = self.progress.get(channel, (0, ""))[0] + 1
            operation = Operation(channel, sequence, name, nbytes, tuple(ranks), timeout, time.monotonic())
            self.progress[channel] = (sequence, name)
            self.pending[id(operation)] = operation
            self.names.add(name)
            self.traffic.operations += 1
            whole = nbytes * len(ranks) if name == "all_gather" else nbytes
            self.traffic.nbytes += whole // 2 if name in _HALVES else whole
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

    def report(self) -> dict[str, object]:
        """What is under way and how far each channel is, for who looks from outside: `cpuft.rank.reporting`."""
        now = time.monotonic()
        pending = [
            {"channel": one.channel, "sequence": one.sequence, "name": one.name, "seconds": now - one.started}
            | {"ranks": one.ranks}
            for one in self.snapshot()
        ]
        return {"pending": pending, "progress": self.reached(), "names": sorted(self.names)}

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
    """The ranks that keep the operation from ending, each with what is known of it.

    Those that are behind because they wait themselves are left out: for a rank that is lost, or one further behind.
    """
    if rank and rank not in answers:  # rank 0 relays all that is said: not even our own answer came back
        return {0: _LOST if 0 in gone else _SILENT}
    others = [other for other in operation.ranks if other != rank]
    lost = {other: _LOST if other in gone else _SILENT for other in others if other in gone or other not in answers}
    reached = {other: answers[other].get(operation.channel, (0, "")) for other in others if other not in lost}
    last = min((sequence for sequence, _ in reached.values()), default=operation.sequence)
    if lost or last >= operation.sequence:
        return lost
    return {
        other: f"last at {name} #{sequence}" if sequence else "has not begun"
        for other, (sequence, name) in reached.items()
        if sequence == last
    }


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
