"""A c10d process group that runs its operations in order on threads of its own."""

# torch's stub lists the overloads its C++ class accepts; torch calls a subclass with the first one only.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.group.collectives import Collectives
from cpuft.comm.group.queues import JoinedWork, Queue, QueuedWork
from cpuft.comm.group.session import close_watch
from cpuft.comm.watch.deadlines import Watch
from cpuft.comm.watch.operations import Register

Tensors = list[torch.Tensor]
_CLOSE_SECONDS = 1.0
_COLLECTIVES = "collectives"


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


class QueuedGroup(dist.ProcessGroup):
    """What torch asks of any group: its names, its end, and operations that are launched and waited for.

    Sends and receives have a thread for each peer, direction and tag: a blocking send may wait for a receive that the
    peer posts later.
    """

    def __init__(
        self, library: Collectives, member: Membership, timeout: float, register: Register, watch: Watch
    ) -> None:
        # The constructor that takes a store cannot make subclasses.
        super().__init__(member.rank, member.size)  # type: ignore[call-arg]
        self._library = library
        self._member = member
        self._timeout = timeout
        self._register = register
        self._watch = watch
        self._queues: dict[str, Queue] = {}
        self._coalesced: list[QueuedWork] | None = None
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
        for own in self._queues.values():
            own.close(_CLOSE_SECONDS)
        self._library.close()
        self._register.forget(self._member.label)
        if self._member.is_world:
            close_watch()

    abort = shutdown

    def _point_to_point(
        self, name: str, tensors: Tensors, source: int, target: int, tag: int, body: Callable[[], int]
    ) -> QueuedWork:
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
    ) -> QueuedWork:
        """Queue an operation. `channel` and `ranks` are those of the group unless given."""
        work = QueuedWork(result)
        nbytes = sum(tensor.nbytes for tensor in payload)
        key = f"{name} {channel}" if channel else _COLLECTIVES

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

        if key not in self._queues:
            self._queues[key] = Queue(key)
        self._queues[key].put(task)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
