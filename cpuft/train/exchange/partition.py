"""Which numbers a rank keeps the optimizer's state of: an equal run of every bucket, whatever parameters it cuts.

A bucket is parameters side by side, about as many numbers as are worth a message.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNED = 16
"""A part has a whole multiple of so many numbers: a cache line of fp32."""


@dataclass(frozen=True)
class Member:
    """What matters of a parameter."""

    size: int
    kind: Hashable
    """Parameters of one kind may share a bucket."""
    block: Hashable
    """Those that lie in one block of memory stay side by side: layers that are packed are multiplied as one."""


@dataclass(frozen=True)
class Piece:
    """Numbers of one parameter that are in a rank's part."""

    member: int
    """Which of the bucket's parameters."""
    start: int
    """The first of them in the parameter, flattened."""
    place: int
    """Where that one is in the part."""
    length: int


def plan_buckets(members: Sequence[Member], least: int) -> list[list[int]]:
    """Numbers of the parameters in each bucket, ascending: `least` numbers in each, but for the last of a kind.

    Buckets come in the order in which backward has all of their gradients, if it goes through parameters backwards.
    """
    filling: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for number in reversed(range(len(members))):
        member = members[number]
        bucket = filling.setdefault(member.kind, [])
        if sum(members[other].size for other in bucket) >= least and members[bucket[0]].block != member.block:
            full.append(bucket)
            bucket = filling[member.kind] = []
        bucket.insert(0, number)
    return sorted([*full, *filling.values()], key=lambda bucket: -bucket[0])


def part_width(count: int, ranks: int, unit: int = ALIGNED) -> int:
    """Numbers of each rank's part of a bucket of `count`, whole units; the last parts end in padding."""
    return -(-count // (ranks * unit)) * unit


def find_pieces(sizes: Sequence[int], ranks: int, rank: int, unit: int = ALIGNED) -> list[Piece]:
    """What a rank's part of a bucket has of its parameters, of these sizes."""
    width, start, found = part_width(sum(sizes), ranks, unit), 0, []
    begin, end = rank * width, (rank + 1) * width
    for member, size in enumerate(sizes):
        first, last = max(start, begin), min(start + size, end)
        if first < last:
            found.append(Piece(member, first - start, first - begin, last - first))
        start += size
    return found
