"""The contract of a communication backend: a few blocking collectives on raw memory."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class GroupMembership:
    """A process group as one of its ranks sees it."""

    label: str
    """Name of the group in messages, for example "the world" or "group 3"."""
    rank: int
    ranks: tuple[int, ...]
    """World ranks of the members, in the group's order."""
    is_world: bool

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


class Backend(abc.ABC):
    """The blocking collectives of one group of ranks, which `process_group.CollectiveGroup` runs on its threads.

    Constructors take (store, rank, size, label): a torch store that all members share, this process's rank in the
    group, the number of ranks, and a name of the group that is the same on all of them. All members call them together.

    Addresses are memory addresses of contiguous buffers, sizes are in bytes, counts in elements, and ranks are ranks of
    the group. Nothing is checked here: `arguments` has checked the caller's tensors, and the ranks have compared theirs
    (`Collectives.check_ranks_agree`). Every call releases the GIL, blocks until this rank's part is done, and raises
    RuntimeError (or the library's own exception) on failure. Calls on different groups come from several threads at
    once, and so do `send` and `recv` of one group. All other calls of one group come one after another, in the same
    order on every rank.
    """

    name: ClassVar[str]
    """Name of the backend in messages and records, for example "mpi"."""

    @abc.abstractmethod
    def can_reduce(self, dtype: torch.dtype, reduction: str) -> bool:
        """Return whether the library itself can apply this reduction to this type.

        The other methods are called only with types and reductions for which this is true; `collectives.py` works
        around the rest. `reduction` is sum, product, min, max, band, bor or bxor.
        """

    @abc.abstractmethod
    def all_reduce(self, address: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce the `count` elements at `address` over the ranks, in place on all. RuntimeError: the library fails."""

    @abc.abstractmethod
    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce `size * count` elements of `source`; rank r gets the r-th `count` results in `target`. RuntimeError:
        the library fails.
        """

    @abc.abstractmethod
    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """Copy the `nbytes` at `address` on rank `root` to `address` on every rank. RuntimeError: the library fails."""

    @abc.abstractmethod
    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """Write the `nbytes` of rank r to the r-th place of `target` on every rank; `source` may be that place.
        RuntimeError: the library fails.
        """

    @abc.abstractmethod
    def all_to_all(self, source: int, source_sizes: Sequence[int], target: int, target_sizes: Sequence[int]) -> None:
        """Send the r-th piece of `source` to rank r, and write the piece from rank r to the r-th place of `target`.

        Both sizes are the bytes of each rank's piece, which lie one after another. RuntimeError: the library fails.
        """

    @abc.abstractmethod
    def send(self, address: int, nbytes: int, peer: int, tag: int) -> None:
        """Send bytes to rank `peer`, which receives them with the same tag; this may or may not wait for that.
        RuntimeError: the library fails.
        """

    @abc.abstractmethod
    def recv(self, address: int, nbytes: int, peer: int | None, tag: int) -> int:
        """Receive a message from rank `peer`, or from any rank if it is None, and return the sender's rank.

        It has the same tag and `nbytes`. A longer one or a failure raises RuntimeError or ValueError, and None for
        `peer` CpuftError if the library cannot receive from any rank.
        """

    def close(self) -> None:
        """Release the group without waiting for other ranks. By default nothing is released before the process ends."""
        return
