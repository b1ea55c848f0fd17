"""Hierarchical means: gradients are averaged within each host first, and then between the hosts in compressed form.

Otherwise a host would send compressed gradients once for each of its ranks. The ranks add up their gradients in fp32;
the host's first rank, its leader, averages them with the other leaders, keeps the error feedback, and copies the mean.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.compression.int8 import all_gather
from cpuft.comm.process_group import ProgressThread, QueuedWork
from cpuft.comm.watchdog import Operation, register
from cpuft.compressions import COMPRESSIONS_WITH_FEEDBACK
from cpuft.rank.world import World, parse_world

Reduce = Callable[[Any], torch.futures.Future[torch.Tensor]]
"""Takes a bucket (`cpuft.train.arena.Bucket`); returns a future of its buffer, in which the gradients are then the mean
over the ranks, in their own type. All ranks call it in the same order of buckets."""

_CHANNEL = "hierarchical means"


def count_ranks_per_host(places: Sequence[tuple[int, int]]) -> int:
    """Return the number of ranks on each host, 2 or more, if it is equal and a host's ranks are consecutive, else 0.

    `places` are each rank's local rank and number of ranks on its host. A single host gives 0, too.
    """
    local_size = places[0][1]
    if not 1 < local_size < len(places) or len(places) % local_size:
        return 0
    return local_size if all(place == (n % local_size, local_size) for n, place in enumerate(places)) else 0


def find_ranks_per_host(world: World) -> int:
    """Return `count_ranks_per_host` of the ranks. Collective."""
    if world.local_size == world.size:
        return 0
    places = torch.empty((world.size, 2), dtype=torch.int64)
    all_gather(places.view(-1), torch.tensor([world.local_rank, world.local_size]))
    return count_ranks_per_host([(int(local_rank), int(local_size)) for local_rank, local_size in places])


@dataclass(frozen=True)
class HostGroups:
    """The process groups of hierarchical means, as one rank sees them.

    All ranks of a group must start its operations in the same order. So sums and copies have a group each: a copy waits
    for the network, and the sums of later gradients must not wait for the copy.
    """

    sums: dist.ProcessGroup
    """The ranks of this host, which add up their gradients."""
    copies: dist.ProcessGroup
    """The ranks of this host, which receive the means."""
    leaders: dist.ProcessGroup | None
    """The first ranks of all hosts; None on the other ranks."""
    leader: int
    """The world rank of this host's first rank."""
    ranks: int
    timeout: timedelta

    def begin_mean(self) -> Operation:
        """Register that this rank waits for all ranks: operations of the subgroups name only some of them.

        Give the operation to `register.end` afterwards.
        """
        return register.begin(_CHANNEL, "mean", 0, range(self.ranks), self.timeout.total_seconds())

    def average(
        self, numbers: torch.Tensor, average_between_hosts: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    ) -> torch.Tensor:
        """Return the mean of all ranks' fp32 numbers, the same bits on all of them, and overwrite `numbers`.

        Collective; it blocks. Leaders average their hosts' means by `average_between_hosts(mean, group of leaders)`.
        """
        operation = self.begin_mean()
        try:
            dist.reduce(numbers, self.leader, group=self.sums)
            if self.leaders is not None:
                numbers = average_between_hosts(numbers.div_(self.sums.size()), self.leaders)
            dist.broadcast(numbers, self.leader, group=self.copies)
        finally:
            register.end(operation)
        return numbers


def make_host_groups(compression: str) -> HostGroups | None:
    """Make the groups of hierarchical means; None unless several hosts have the same number of ranks each, 2 or more.

    Collective. None also for compressions other than int8 and powersgd.
    """
    world = parse_world(os.environ)
    if compression not in COMPRESSIONS_WITH_FEEDBACK or not (per_host := find_ranks_per_host(world)):
        return None
    untyped: Any = dist  # torch has no types for new_subgroups, nor for the timeout of cpuft's groups
    timeout: timedelta = untyped.group.WORLD.timeout
    sums, _ = untyped.new_subgroups(per_host, timeout=timeout)
    copies, _ = untyped.new_subgroups(per_host, timeout=timeout)
    leaders = dist.new_group(list(range(0, world.size, per_host)), timeout=timeout)
    leader = world.rank // per_host * per_host
    register.ignore_traffic(range(leader, leader + per_host))
    return HostGroups(sums, copies, leaders if world.rank == leader else None, leader, world.size, timeout)


@dataclass(eq=False)
class _BucketUnderWay:
    bucket: Any
    numbers: torch.Tensor
    """This rank's gradients in fp32, and on the leader the sum of the host's ranks when `added` is done."""
    added: Any
    operation: Operation
    work: QueuedWork
    mean: torch.futures.Future[torch.Tensor] | None = None
    """The mean over all hosts; None on ranks that are no leaders."""


class HierarchicalReducer:
    """Averages buckets over all ranks, within each host first. One reducer belongs to one model.

    The backward pass only starts the sums; two threads do everything else, so that it waits for no message.
    """

    def __init__(self, hosts: HostGroups, reduce_between_hosts: Reduce | None) -> None:
        self._hosts, self._reduce_between_hosts = hosts, reduce_between_hosts
        self._sums, self._copies = ProgressThread("host sums"), ProgressThread("host copies")
        self._lock = threading.Lock()
        self._under_way: list[_BucketUnderWay] = []
        """Buckets whose works are not done. Three threads use it, under the lock."""

    @torch.no_grad()
    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; return a future of its buffer, which then has the mean over all ranks.

        An error is raised by the futures of all buckets that are under way.
        """
        # A sum in bf16 would lose more than int8 does. The sum may overwrite an fp32 buffer, as the mean does later.
        numbers = bucket.buffer().float()
        operation = self._hosts.begin_mean()
        added = dist.reduce(numbers, self._hosts.leader, group=self._hosts.sums, async_op=True)
        one = _BucketUnderWay(bucket, numbers, added, operation, QueuedWork(bucket.buffer()))
        future = one.work.get_future()
        with self._lock:
            self._under_way.append(one)
        self._sums.put(lambda: self._send_to_hosts(one))
        return future

    def _send_to_hosts(self, one: _BucketUnderWay) -> None:
        try:
            one.added.wait()
            if self._reduce_between_hosts is not None:
                one.numbers.div_(self._hosts.sums.size())
                # What is used between hosts of a bucket, with the mean of this host's ranks.
                parameters, is_last = one.bucket.parameters, one.bucket.is_last
                bucket = SimpleNamespace(parameters=parameters, buffer=lambda: one.numbers, is_last=is_last)
                one.mean = self._reduce_between_hosts(bucket)
        except Exception as error:  # whoever waits for the futures raises it
            self._fail_all(error)
        else:
            self._copies.put(lambda: self._copy_to_ranks(one))

    def _copy_to_ranks(self, one: _BucketUnderWay) -> None:
        buffer = one.bucket.buffer()
        try:
            if one.mean is not None:
                mean = one.mean.wait()
                if mean is not buffer:
                    buffer.copy_(mean)
            dist.broadcast(buffer, self._hosts.leader, group=self._hosts.copies)
        except Exception as error:  # whoever waits for the futures raises it
            self._fail_all(error)
            return
        with self._lock:
            is_under_way = one in self._under_way
            if is_under_way:
                self._under_way.remove(one)
        if is_under_way:
            register.end(one.operation)
            one.work.complete()

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            failed, self._under_way = self._under_way, []
        for one in failed:
            register.end(one.operation)
            one.work.fail(error)
