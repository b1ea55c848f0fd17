"""How few bytes a link needs: from exact to thrifty, the first way to exchange gradients that costs no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuft.comm.choice.choosing import TIE
from cpuft.errors import CpuftError

BEHIND = 0.5
"""Share of forward and backward behind which layers' gradients hide: backward, but for its first layers."""


@dataclass(frozen=True)
class Rung:
    """A way to exchange gradients, and what an update of this job costs with it."""

    name: str
    layer_bytes: float
    """Sent in the course of backward, as an all-reduce's payload."""
    row_bytes: float
    """Of word embeddings, sent after it."""
    waits: int
    """Messages, one after the other, after the last gradient is ready."""
    coding_seconds: float
    """What making messages and reading them takes from compute."""
    background: bool = False
    """Whether all of it has a whole update to arrive in."""


@dataclass(frozen=True)
class Wire:
    """What an all-reduce between these ranks takes, measured."""

    seconds_per_byte: float
    latency_seconds: float


def foretell_seconds(rung: Rung, compute_seconds: float, wire: Wire) -> float:
    """What an update takes, with `compute_seconds` for its forward and backward passes."""
    layers, rows = (nbytes * wire.seconds_per_byte for nbytes in (rung.layer_bytes, rung.row_bytes))
    if rung.background:
        return rung.coding_seconds + max(compute_seconds, layers + rows)
    left = max(0.0, layers - BEHIND * compute_seconds) + rows + rung.waits * wire.latency_seconds
    return compute_seconds + rung.coding_seconds + left


def choose_rung(rungs: Sequence[Rung], compute_seconds: float, wire: Wire) -> tuple[Rung, str]:
    """The first of these rungs, from exact to thrifty, that is as fast as the fastest, and why in one line.

    Raises
    ------
    CpuftError: there is none.
    """
    if not rungs:
        raise CpuftError("no way to exchange gradients was given: name one with --grad-compression")
    seconds = [foretell_seconds(rung, compute_seconds, wire) for rung in rungs]
    chosen = next(rung for rung, took in zip(rungs, seconds, strict=True) if took <= TIE * min(seconds))
    rate = f"{8e-6 / wire.seconds_per_byte:.3g} Mbit/s" if wire.seconds_per_byte > 0 else "no time"
    figures = ", ".join(f"{rung.name} {took:.3g} s" for rung, took in zip(rungs, seconds, strict=True))
    return chosen, f"a step computes {compute_seconds:.3g} s and an all-reduce takes {rate}: {figures}"
