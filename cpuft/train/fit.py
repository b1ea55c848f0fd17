"""Will it fit? What ranks will hold against the memory of their hosts, before any of them starts."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpuft.config import SHARDED, Room, Rooms, TrainConfig
from cpuft.errors import CpuftError
from cpuft.serialization import load, parse_json
from cpuft.train.data.order import count_updates, deal, plan_epoch
from cpuft.train.data.prepare import Prepared, Tokens
from cpuft.train.memory import SHARED, Largest, Shape, find_shape, foretell
from cpuft.train.model import find_model, load_settings

KNOWN_ERROR = 0.1
"""How far a peak may be below what is foretold (scripts/check-fit): what might fit is not refused."""

Foretell = Callable[[TrainConfig, int, bool], dict[str, int]]
"""Bytes by part of a rank of so many, which may be one that keeps checkpoints."""


class Shortage(NamedTuple):
    """What a host's ranks need: bytes in all, and by part."""

    room: Room
    needed: int
    parts: dict[str, int]


def check_fit(config: TrainConfig, prepared: Prepared, rooms: Rooms) -> None:
    """Raises CpuftError: a host has not the memory for its ranks; says what they need, and what would make it fit."""
    shape = look_up_shape(config, prepared.words)

    @cache
    def of_rank(config: TrainConfig, ranks: int, keeps: bool) -> dict[str, int]:
        return foretell_rank(shape, config, rooms.precision, prepared, ranks, keeps)

    if short := find_shortage(config, rooms, of_rank, 1 - KNOWN_ERROR):
        raise CpuftError(f"{describe(short)}: {find_way(config, rooms, of_rank)}")


def look_up_shape(config: TrainConfig, words: int) -> Shape:
    """The shape of the model that the options name; of a kind unknown here, by the size of its files.

    `words`: of the tokenizer, for a model that is untrained.
    """
    if config.from_config:
        return find_shape(load_settings(config, {}, words).to_dict(), config.dropout) or Shape(0, 0)
    source = Path(find_model(config.model))
    try:  # not by transformers, whose import takes longer than the whole look
        settings = load(dict[str, Any], parse_json((source / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        settings = {}
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return find_shape(settings, config.dropout) or Shape(0, nbytes // 4)


def foretell_rank(
    shape: Shape, config: TrainConfig, precision: str, prepared: Prepared, ranks: int, keeps: bool
) -> dict[str, int]:
    """As `memory.foretell`, of these rows."""
    train = find_largest(prepared.train, config, ranks, prepared.kind in ("tags", "masked"))
    lengths = np.sort(np.concatenate([tokens.lengths for tokens in prepared.validation.values()]))
    looked = lengths[::-1][: config.eval_batch_size * ranks : ranks]
    evaluation = Largest(len(looked), int(looked[0]), int(looked.sum()))
    if prepared.kind == "masked":
        train, evaluation = (
            replace(batch, guessed=round(config.mlm_probability * batch.tokens)) for batch in (train, evaluation)
        )
    return foretell(shape, config, precision, train, evaluation, ranks, keeps)


def find_largest(tokens: Tokens, config: TrainConfig, ranks: int, reads_all: bool = False) -> Largest:
    """The largest batch of the first of so many ranks in the first epoch."""
    lengths, size = tokens.lengths, config.batch_size * config.gradient_accumulation * ranks
    updates = count_updates(len(lengths), size, config.epochs, config.max_steps)
    orders = plan_epoch(lengths, size, config.seed, 0, config.padding == "dynamic")[: max(1, updates)]
    batches = [lengths[deal(rows, 0, ranks)[: config.batch_size]] for rows in orders]
    largest = max(batches, key=lambda batch: int(batch.sum()))
    length = config.max_length if config.padding == "max_length" else int(largest.max())
    return Largest(len(largest), length, int(largest.sum()), reads_all)


def find_shortage(config: TrainConfig, rooms: Rooms, of_rank: Foretell, share: float = 1.0) -> Shortage | None:
    """The host or machine that lacks most, if its ranks need more than it has; `share` of what is foretold counts."""
    found, together = list[Shortage](), dict[str | int, list[Shortage]]()
    total = 1 if rooms.apart else sum(room.ranks for room in rooms.hosts)
    for number, room in enumerate(rooms.hosts):
        # The first rank of either of the first two hosts keeps checkpoints.
        keeps = [number < 2 and not rooms.apart, *[False] * (room.ranks - 1)]
        each = [of_rank(config, total, one) for one in keeps]
        parts = {name: sum(rank[name] for rank in each) for name in each[0]}
        found.append(Shortage(room, sum(parts.values()) - SHARED * (room.ranks - 1), parts))
        together.setdefault(room.machine or number, []).append(found[-1])
    for some in (some for some in together.values() if len(some) > 1):
        named, ranks = ", ".join(one.room.host for one in some), [one.room.ranks for one in some]
        machine = Room(f"the machine of {named}", sum(ranks), max(one.room.machine_bytes for one in some))
        parts = {name: sum(one.parts[name] for one in some) for name in some[0].parts}
        found.append(Shortage(machine, sum(one.needed for one in some) - SHARED * (len(some) - 1), parts))
    worst = max(found, key=lambda one: one.needed - one.room.free_bytes)
    return worst if worst.needed * share > worst.room.free_bytes else None


def describe(short: Shortage) -> str:
    """What a host has, and what its ranks need, the three largest parts by name."""
    parts = sorted(short.parts.items(), key=lambda part: -part[1])[:3]
    named = ", ".join(f"{name} {nbytes / 1e9:.1f} GB" for name, nbytes in parts)
    room, who = short.room, "its rank needs" if short.room.ranks == 1 else f"its {short.room.ranks} ranks need"
    return f"{room.host} has {room.free_bytes / 1e9:.1f} GB free, and {who} {short.needed / 1e9:.1f} GB ({named})"


def find_way(config: TrainConfig, rooms: Rooms, of_rank: Foretell) -> str:
    """What would make it fit, by trying: options first, those that cost the least time, then more hosts."""
    room, ranks = min(rooms.hosts, key=lambda room: room.free_bytes), sum(room.ranks for room in rooms.hosts)
    for changes in list_changes(config, 1 if rooms.apart else ranks):
        if not find_shortage(replace(config, **changes), rooms, of_rank):
            return f"add {_as_typed(changes)}"
    hosts = ranks
    while hosts <= 64:
        more = replace(rooms, hosts=(Room(room.host, 1, room.free_bytes),) * hosts)
        smaller: dict[str, Any] = {"batch_size": max(1, config.batch_size * ranks // hosts)}
        for changes in (smaller, *([smaller | {"shard": "optimizer"}] if _may_share(config, hosts) else [])):
            if not find_shortage(replace(config, **changes), more, of_rank):
                return f"take {hosts} hosts like {room.host}, a rank each: {_as_typed({'np': hosts} | changes)}"
        hosts *= 2
    return "take a smaller model, or hosts with more memory"


def _may_share(config: TrainConfig, ranks: int) -> bool:
    sends = config.sync_every == 1 and config.grad_compression in ("auto", *SHARDED)
    return sends and config.engine == "torch" and config.shard == "none" and ranks > 1


def list_changes(config: TrainConfig, ranks: int) -> list[dict[str, Any]]:
    """Other options for the same updates, those that cost the least time first."""
    halvings = [2**power for power in range(config.batch_size.bit_length()) if config.batch_size % 2**power == 0]
    smaller = [
        {"batch_size": config.batch_size // n, "gradient_accumulation": config.gradient_accumulation * n}
        for n in halvings[1:]
    ]
    # A share of a step's time; of checkpoints, what their lack may cost.
    shared = [(0.05, {"shard": "optimizer"})] * _may_share(config, ranks)
    again = [(0.3, {"gradient_checkpointing": True})] * (config.engine == "torch" and not config.gradient_checkpointing)
    unkept = [(0.5, {"checkpoint_every": 0})] * bool(config.checkpoint_every)
    choices = [shared, [(0.08 * number, one) for number, one in enumerate(smaller, 1)], again, unkept]
    nothing: list[tuple[float, dict[str, Any]]] = [(0.0, {})]
    ways = [tuple(zip(*some)) for some in product(*(nothing + choice for choice in choices))]
    return [dict(ChainMap(*reversed(changes))) for _, changes in sorted(ways, key=lambda way: sum(way[0]))[1:]]


def _as_typed(changes: dict[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in changes.items()).replace("_", "-").replace(" True", "")
