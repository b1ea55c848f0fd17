"""What the process groups of all backends have in common: the watchdog knows their operations."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cpuft.comm.backends.base import GroupMembership
from cpuft.comm.watchdog import Operation, register, start_watchdog, stop_watchdog


class WatchedGroup(dist.ProcessGroup):
    """A process group that registers operations with the watchdog, which ends the process after `timeout` seconds."""

    def __init__(self, membership: GroupMembership, store: Store, timeout: float) -> None:
        # The constructor that takes a store cannot make subclasses.
        super().__init__(membership.rank, membership.size)  # type: ignore[call-arg]
        self._membership, self._timeout = membership, timeout
        self._watchdog = start_watchdog(store, membership.rank, membership.ranks)

    @property
    def timeout(self) -> timedelta:
        """How long an operation of this group may take."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that have not begun yet."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Close the group without waiting for any other rank; if it is that of all ranks, the watchdog is stopped."""
        register.forget_group(self._membership.label)
        if self._membership.is_world:
            stop_watchdog()

    def begin(self, name: str, nbytes: int, channel: str = "", ranks: tuple[int, ...] = ()) -> Operation:
        """Register and return an operation that has begun, by default in the group's channel and on all its ranks."""
        place, members = channel or self._membership.label, ranks or self._membership.ranks
        return register.begin(place, name, nbytes, members, self._timeout)

    def end(self, operation: Operation, error: Exception | None = None) -> None:
        """Register the end of an operation. With an `error`, end the process if a rank of the operation was lost."""
        if error:
            self._watchdog.exit_if_rank_lost(operation, error)
        register.end(operation)

    def describe_message(self, source: int, target: int, tag: int) -> tuple[str, tuple[int, int]]:
        """Return ("LABEL from 4 to 5 (tag 0)", (4, 5)), with the world ranks of the two ranks of the group."""
        ranks = (self._membership.ranks[source], self._membership.ranks[target])
        return f"{self._membership.label} from {ranks[0]} to {ranks[1]} (tag {tag})", ranks
