"""What the launcher tells the preparation of a run's hosts: whether the training fits is seen before a rank starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cpuft.loader import load, parse_json

_FLAG = "--rooms="


@dataclass(frozen=True)
class Room:
    """Memory of a host, and of its whole machine, which hosts of the same one share."""

    host: str
    ranks: int
    free_bytes: int
    machine: str = ""
    machine_bytes: int = 0


@dataclass(frozen=True)
class Rooms:
    """All hosts' of a run, the master's first; `apart`: each rank trains for itself."""

    hosts: tuple[Room, ...]
    precision: str
    apart: bool = False


def format_rooms(rooms: Rooms) -> tuple[str, ...]:
    """One word of a command line; none where a host does not know its memory."""
    return (f"{_FLAG}{json.dumps(asdict(rooms))}",) if all(room.free_bytes for room in rooms.hosts) else ()


def take_rooms(words: Sequence[str]) -> tuple[Rooms | None, list[str]]:
    """That word's meaning, and the other words."""
    told = [load(Rooms, parse_json(word.removeprefix(_FLAG))) for word in words if word.startswith(_FLAG)]
    return (told[-1] if told else None), [word for word in words if not word.startswith(_FLAG)]
