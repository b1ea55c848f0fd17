"""What a rank will hold in memory, in bytes by part: a pure function of the model's shape, the options and the rows.

Activations are counted from what each layer keeps for backward: on the fast path by its own functions (`fast/`), else
as transformers' eager layers were seen to keep. `scripts/check-fit` compares all of it with what ranks used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpuft.config import WITH_FEEDBACK, TrainConfig
from cpuft.train.fast.architectures import ARCHITECTURES, ATTENTION_DROPOUT_SETTINGS, SIZE_SETTINGS

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
    unsent = 16 * every if config.sync_every > 1 else 4 * every if config.grad_compression in WITH_FEEDBACK else 0
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
