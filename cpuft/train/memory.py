"""What a rank will need in memory, and whether that fits on its host, before any rank starts."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpuft.config import COMPRESSIONS_WITH_FEEDBACK, SHARDED_COMPRESSIONS, HostMemory, RunMemory, TrainConfig
from cpuft.errors import CpuftError
from cpuft.serialization import load, parse_json
from cpuft.train.data.archive import Prepared, Tokens
from cpuft.train.data.order import count_updates, plan_epoch, select_for_rank
from cpuft.train.fast.architectures import ARCHITECTURES, ATTENTION_DROPOUT_SETTINGS, SIZE_SETTINGS
from cpuft.train.model import find_model, load_config

SHARED = 250_000_000
"""Of a rank's own: libraries' pages, which a host holds once for all its ranks."""
_PROCESS = 550_000_000
"""Python, torch 2.13 and transformers before the model, oneDNN's own, and SciPy for the metrics: what is resident."""
_PIECES = 0.15
"""What glibc's heap holds in pieces that nothing fits into, as a share of what comes and goes: 5 to 35 % were seen."""
_BUCKETS = 64_000_000
"""Messages of gradients on their way: buckets, and a library's copies of them."""
_PLAIN = dict(zip(((4, True), (4, False), (2, True), (2, False)), ((40, 8, 12), (32, 8, 4), (28, 4, 6), (24, 4, 2))))
"""Bytes that an eager layer keeps, by bytes of a number in products and whether there is dropout: of each token for
every hidden number, inner number, and score of attention."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides the memory it takes. With no layers nobody knows, and activations are left out."""

    linears: int
    """Numbers of its layers' linear weights and biases, which the fast path multiplies as bf16."""
    others: int
    layers: int = 0
    hidden: int = 0
    inner: int = 0
    heads: int = 0
    drops: bool = True
    """Whether attention has dropout."""
    words: int = 0
    """That it embeds, and may guess."""


@dataclass(frozen=True)
class Largest:
    """The largest batch of a rank: its rows, their longest, and their tokens without padding."""

    rows: int
    length: int
    tokens: int
    reads_all: bool = False
    """The head reads all tokens, not each row's first."""
    guessed: int = 0
    """Masked places."""

    @property
    def places(self) -> int:
        """Tokens with padding."""
        return self.rows * self.length


def find_shape(settings: Mapping[str, Any], dropout: float = -1.0) -> Shape | None:
    """The shape of a model with these settings (its config.json); None for a kind that is not known here."""

    def size(*names: str) -> int:
        found = next((settings[name] for name in names if name in settings), 0)
        return found if type(found) is int and found > 0 else 0

    sizes = {name: size(*names) for name, names in SIZE_SETTINGS.items()}
    if settings.get("model_type") not in {one.model_type for one in ARCHITECTURES} or not all(sizes.values()):
        return None
    layers, hidden, inner, heads, words, places = sizes.values()
    linears = layers * (4 * (hidden + 1) * hidden + 2 * hidden * inner + hidden + inner)
    width = size("embedding_size") or hidden
    rows = (words + places + size("type_vocab_size") + 2) * width
    # Norms, the pooler or what a head has in its place, and ELECTRA's way from narrow embeddings.
    others = rows + layers * 4 * hidden + (hidden + 1) * hidden + (width != hidden) * (width + 1) * hidden
    rate = next((settings[name] for name in ATTENTION_DROPOUT_SETTINGS if name in settings), 0.1)
    return Shape(linears, others, layers, hidden, inner, heads, bool(rate if dropout < 0 else dropout), words)


def foretell(
    shape: Shape, config: TrainConfig, precision: str, train: Largest, evaluation: Largest, ranks: int, keeps: bool
) -> dict[str, int]:
    """Bytes that a rank of so many holds at its peak, by part; it may be one that `keeps` checkpoints."""
    size, fast = 2 if precision == "bf16" else 4, config.engine == "torch" and config.fast_path and not config.compile
    low, share = size if fast else 4, ranks if config.shard == "optimizer" else 1
    # --lora-rank trains two factors for each of attention's linear layers, and the head's product.
    adapters = 8 * config.lora_rank * shape.layers * shape.hidden + (shape.hidden + 1) * shape.hidden
    linears, others = (0, adapters) if config.lora_rank else (shape.linears, shape.others)
    every = linears + others
    passing = passing_bytes(shape, fast, size, train)
    steps = kept_bytes(shape, fast, config.gradient_checkpointing, size, train)[1]
    steps += max(passing, guessing_bytes(shape, size, train.guessed))
    steps += shape.linears * (precision == "int8")  # the weights in 8 bits, which backward takes, too
    looked = looking_bytes(shape, fast, size, evaluation) + guessing_bytes(shape, size, evaluation.guessed)
    unsent = (
        16 * every
        if config.sync_every > 1
        else 4 * every
        if config.grad_compression in COMPRESSIONS_WITH_FEEDBACK
        else 0
    )
    parts = {
        "weights": low * shape.linears + 4 * shape.others,
        "masters": 4 * linears // share if low == 2 else 0,
        "moments": 8 * every // share,
        # Alone, a rank forgets them while there are activations; in what they leave in the heap these find no room.
        "gradients": low * linears + 4 * others + (4 * every // share if share > 1 else 0),
        # At the end, ranks that share masters out have all of them for a moment.
        "activations": max(steps, looked, 4 * linears if share > 1 else 0),
        "checkpoint's copy": 12 * every if keeps and config.checkpoint_every and config.engine == "torch" else 0,
        "buffers": _BUCKETS + unsent if ranks > 1 else 0,
    }
    pieces = _PIECES * (parts["moments"] + parts["gradients"] + parts["activations"])
    if config.gradient_checkpointing and shape.layers:
        # Of what forward layers pass through the heap, small things that stay keep the pieces apart: backward, which
        # computes them again between its own, finds no room there.
        pieces += 2 * _again(shape, fast, size, train) + passing
    return parts | {"process": _PROCESS + round(pieces)}


def kept_bytes(shape: Shape, fast: bool, recompute: bool, size: int, batch: Largest) -> tuple[int, int]:
    """Bytes that the forward pass keeps for backward, and what is there at most of that in backward: with
    `--gradient-checkpointing` a layer that is computed again is more. `size`: bytes of a number in products."""
    if not shape.layers:
        return 0, 0
    layer = _layer(shape, fast, size, batch)
    last = _first_tokens(shape, size, batch) if fast and not batch.reads_all else layer
    # Embeddings are added up and normed in fp32; eager ones keep a mask, too, and in fp32 what the head gets.
    times = 1 + batch.reads_all if fast else 1 + shape.drops + (size == 4)
    words = (4 * times * shape.hidden + 24) * batch.places
    # Eager layers keep what they are given; fast ones that, attention's context, its product, and the last norm's sum.
    given = (4 * size * shape.hidden + 8) * batch.tokens if fast else 4 * batch.places * shape.hidden
    kept = words + (given if recompute else layer) * (shape.layers - 1) + last
    # Backward has used what the last layer keeps before it comes to one that computes again.
    return kept, max(kept, kept - last + _again(shape, fast, size, batch)) if recompute else kept


def _again(shape: Shape, fast: bool, size: int, batch: Largest) -> int:
    """Of a layer, what is there at a time when it is computed again: of a fast one its inner half, or its heads."""
    if not fast:
        return _layer(shape, fast, size, batch)
    inner = (2 * size * (shape.hidden + shape.inner) + 8) * batch.tokens
    return max(inner, 3 * size * batch.tokens * shape.hidden)


def _layer(shape: Shape, fast: bool, size: int, batch: Largest) -> int:
    """Of `fast.layer.run_layer`: inputs of four products and of two norms; queries, keys and values; GELU's slope and
    result. Of an eager layer what was seen, and autocast's copy of its weights."""
    if fast:
        return (size * (8 * shape.hidden + 2 * shape.inner) + 16) * batch.tokens
    hidden, inner, score = _PLAIN[size, shape.drops]
    scores = batch.places * batch.length * shape.heads
    copy = 2 * shape.linears // shape.layers if size == 2 else 0
    return batch.places * (hidden * shape.hidden + inner * shape.inner + 16) + score * scores + copy


def _first_tokens(shape: Shape, size: int, batch: Largest) -> int:
    """Of the last layer, where the head reads first tokens only: all tokens' keys and values, the rest of a few."""
    return size * (3 * batch.tokens * shape.hidden + batch.rows * (8 * shape.hidden + 2 * shape.inner))


def passing_bytes(shape: Shape, fast: bool, size: int, batch: Largest) -> int:
    """Bytes that come and go in the top layer: of its inner half, or of eager attention, when the inner half's are
    gone."""
    scores, inner = batch.places * batch.length * shape.heads, batch.tokens * shape.inner
    return size * (inner + 3 * batch.tokens * shape.hidden) if fast else 4 * max(2 * inner, 3 * scores - 2 * inner)


def guessing_bytes(shape: Shape, size: int, guessed: int) -> int:
    """Bytes that come and go where words are guessed: all words' logits and their gradients, thrice in fp32, and
    autocast's copy of the weights."""
    return (12 * guessed + (2 * shape.hidden if size == 2 and guessed else 0)) * shape.words


def looking_bytes(shape: Shape, fast: bool, size: int, batch: Largest) -> int:
    """Bytes that evaluation takes: what one layer has at a time."""
    attention = 0 if fast else 7 * shape.hidden + 2 * batch.length * shape.heads
    return batch.places * (8 * shape.hidden + size * max(attention, 4 * shape.hidden + 2 * shape.inner))


KNOWN_ERROR = 0.1
"""How far a peak may be below what is foretold (scripts/check-fit): what might fit is not refused."""

Foretell = Callable[[TrainConfig, int, bool], dict[str, int]]
"""Bytes by part of a rank of so many, which may be one that keeps checkpoints."""


class Shortage(NamedTuple):
    """What a host's ranks need: bytes in all, and by part."""

    room: HostMemory
    needed: int
    parts: dict[str, int]


def check_fit(config: TrainConfig, prepared: Prepared, rooms: RunMemory) -> None:
    """Raises CpuftError: a host has not the memory for its ranks; says what they need, and what would make it fit."""
    shape = look_up_shape(config, prepared.vocab_size)

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
        return find_shape(load_config(config, {}, words).to_dict(), config.dropout) or Shape(0, 0)
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
    batches = [lengths[select_for_rank(rows, 0, ranks)[: config.batch_size]] for rows in orders]
    largest = max(batches, key=lambda batch: int(batch.sum()))
    length = config.max_length if config.padding == "max_length" else int(largest.max())
    return Largest(len(largest), length, int(largest.sum()), reads_all)


def find_shortage(config: TrainConfig, rooms: RunMemory, of_rank: Foretell, share: float = 1.0) -> Shortage | None:
    """The host or machine that lacks most, if its ranks need more than it has; `share` of what is foretold counts."""
    found, together = list[Shortage](), dict[str | int, list[Shortage]]()
    total = 1 if rooms.independent else sum(room.ranks for room in rooms.hosts)
    for number, room in enumerate(rooms.hosts):
        # The first rank of either of the first two hosts keeps checkpoints.
        keeps = [number < 2 and not rooms.independent, *[False] * (room.ranks - 1)]
        each = [of_rank(config, total, one) for one in keeps]
        parts = {name: sum(rank[name] for rank in each) for name in each[0]}
        found.append(Shortage(room, sum(parts.values()) - SHARED * (room.ranks - 1), parts))
        together.setdefault(room.machine or number, []).append(found[-1])
    for some in (some for some in together.values() if len(some) > 1):
        named, ranks = ", ".join(one.room.host for one in some), [one.room.ranks for one in some]
        machine = HostMemory(f"the machine of {named}", sum(ranks), max(one.room.machine_bytes for one in some))
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


def find_way(config: TrainConfig, rooms: RunMemory, of_rank: Foretell) -> str:
    """What would make it fit, by trying: options first, those that cost the least time, then more hosts."""
    room, ranks = min(rooms.hosts, key=lambda room: room.free_bytes), sum(room.ranks for room in rooms.hosts)
    for changes in list_changes(config, 1 if rooms.independent else ranks):
        if not find_shortage(replace(config, **changes), rooms, of_rank):
            return f"add {_as_typed(changes)}"
    hosts = ranks
    while hosts <= 64:
        more = replace(rooms, hosts=(HostMemory(room.host, 1, room.free_bytes),) * hosts)
        smaller: dict[str, Any] = {"batch_size": max(1, config.batch_size * ranks // hosts)}
        for changes in (smaller, *([smaller | {"shard": "optimizer"}] if _may_share(config, hosts) else [])):
            if not find_shortage(replace(config, **changes), more, of_rank):
                return f"take {hosts} hosts like {room.host}, a rank each: {_as_typed({'np': hosts} | changes)}"
        hosts *= 2
    return "take a smaller model, or hosts with more memory"


def _may_share(config: TrainConfig, ranks: int) -> bool:
    sends = config.sync_every == 1 and config.grad_compression in ("auto", *SHARDED_COMPRESSIONS)
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
