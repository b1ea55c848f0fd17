"""Choice of a compression level: the most exact compression that costs no time over the measured link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuft.compressions import TIE_RATIO

OVERLAP = 0.5
"""Share of the forward and backward passes that can hide messages: the backward pass without its first layers."""
LATE_BUCKETS = 2
"""Buckets that become ready when the backward pass ends, so that nothing hides their messages. In a step of MiniLM, the
last two of six buckets were ready within the last 4 % of the backward pass."""


@dataclass(frozen=True)
class CompressionLevel:
    """A gradient compression, and what an update of this job costs with it."""

    name: str
    layer_bytes: float
    """Bytes sent during the backward pass, counted as the payload of an all-reduce."""
    row_bytes: float
    """Bytes of embedding rows, sent after the backward pass or, if they are late, in the next update."""
    has_late_rows: bool
    messages: int
    """Messages that are sent one after the other once the last gradient is ready."""
    coding_seconds: float
    buckets: int


@dataclass(frozen=True)
class LinkModel:
    """Cost of an all-reduce between these ranks: latency + bytes * seconds_per_byte, which are measured."""

    seconds_per_byte: float
    latency_seconds: float
    taken_seconds_per_byte: float = 0.0
    """Seconds of computing that sending and receiving a byte of the payload takes from a rank."""


def estimate_step_seconds(level: CompressionLevel, compute_seconds: float, link: LinkModel) -> float:
    """Return the seconds of an update: `compute_seconds` (both passes), coding, what messages take from computing, and
    the wait for messages: their latencies, the layers' bytes that half of the passes does not hide, at least those of
    two buckets, and rows, late ones if the passes do not hide them.
    """
    layers, rows = (nbytes * link.seconds_per_byte for nbytes in (level.layer_bytes, level.row_bytes))
    late = layers * min(1.0, LATE_BUCKETS / level.buckets)
    waiting = max(late, layers - OVERLAP * compute_seconds)
    # Late rows are sent before the layers of the next update, whose computing hides them, too.
    waiting = max(waiting, layers + rows - compute_seconds) if level.has_late_rows else waiting + rows
    waiting += level.messages * link.latency_seconds
    taken = (level.layer_bytes + level.row_bytes) * link.taken_seconds_per_byte
    return compute_seconds + level.coding_seconds + taken + waiting


def choose_level(
    levels: Sequence[CompressionLevel], compute_seconds: float, link: LinkModel
) -> tuple[CompressionLevel, str]:
    """Return the first of `levels`, one at least, within 2 % of the fastest one, and the estimates of all as text."""
    seconds = [estimate_step_seconds(level, compute_seconds, link) for level in levels]
    chosen = next(
        level for level, estimate in zip(levels, seconds, strict=True) if estimate <= TIE_RATIO * min(seconds)
    )
    rate = f"{8e-6 / link.seconds_per_byte:.3g} Mbit/s" if link.seconds_per_byte > 0 else "no time"
    figures = ", ".join(f"{level.name} {estimate:.3g} s" for level, estimate in zip(levels, seconds, strict=True))
    return chosen, f"a step computes {compute_seconds:.3g} s and an all-reduce takes {rate}: {figures}"
