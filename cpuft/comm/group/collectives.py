"""What a communication library has to offer: a few blocking collectives on raw memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Collectives(Protocol):
    """The blocking collectives of one group of ranks, on addresses: what a process group is made of.

    Sizes are bytes, counts are elements, ranks are ranks of the group. Every call blocks without the GIL until its
    part is done and raises on failure. Calls of several groups come from several threads at once, and so do `send`
    and `recv` of one group; its other calls come one after another, in the same order on every rank.
    """

    name: str
    """What the backend is called in messages and records."""

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        """Whether the library itself applies this reduction to this type; what it cannot is done around it."""
        ...

    def all_reduce(self, address: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce in place, so that every rank ends with the result."""
        ...

    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce `size * count` elements, of which rank r ends with the r-th `count` in `target`."""
        ...

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """Copy the root's bytes to every rank."""
        ...

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """Put the `nbytes` of rank r at the r-th place of `target` on every rank. `source` may be there already."""
        ...

    def all_to_all(self, source: int, source_sizes: Sequence[int], target: int, target_sizes: Sequence[int]) -> None:
        """Send the r-th piece of `source` to rank r, and put what rank r sent at the r-th piece of `target`."""
        ...

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> None:
        """Send to one rank; may return before the peer has received."""
        ...

    def recv(self, address: int, nbytes: int, peer: int | None, tag: int) -> int:
        """Receive from one rank, or from any (None), and return the sender's rank."""
        ...

    def close(self) -> None:
        """Give up the group. Must not wait for other ranks."""
        ...
