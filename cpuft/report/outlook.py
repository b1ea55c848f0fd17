"""Predictions as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cpuft.errors import counted
from cpuft.report.prediction import Job, Network, Prediction, count_worth
from cpuft.terminal import format_table

COLUMNS = ("hosts", "step ms", "samples/s", "from", "to", "efficiency", "waiting", "taken", "sent as", "hours", "price")


def describe(job: Job, network: Network, source: str) -> list[str]:
    """What predictions are made of, for a reader who wants to know how far to trust them."""
    whole, words = job.sent_numbers(2)
    return [
        f"from {source}: a step of one host takes {job.step_seconds * 1e3:.0f} ms on {job.cores:g} cores; "
        f"{whole / 1e6:.1f} million gradients and {words / 1e6:.1f} million of words' (two hosts) travel an update.",
        f"link: {network.bits_per_second / 1e9:.3g} Gbit/s, {network.latency_seconds * 1e6:.0f} us one way; sending "
        f"takes {network.cpu_seconds_per_byte * 1e9:.2g} ns of a core for a byte"
        f"{', as measured' if network.measured else ''}; bars reach from nothing of that to twice.",
        f"weak scaling: the batch a rank is fixed; hours and price are of {job.rows:,} rows, all epochs together.",
    ]


def format_outlook(predictions: Sequence[Prediction], notes: Sequence[str], title: str) -> str:
    """For a terminal."""
    worth = count_worth(predictions)
    verdict = (
        f"worth it: up to {counted(worth, 'host')}; those added last bring at least half of what they could alone."
    )
    return format_table(COLUMNS, [_row(one) for one in predictions], title, [verdict, *notes])


def _row(one: Prediction) -> list[str]:
    return [
        str(one.hosts),
        f"{one.step_seconds * 1e3:.0f}",
        f"{one.samples_per_second:.1f}",
        f"{one.least:.1f}",
        f"{one.most:.1f}",
        f"{one.efficiency:.0%}",
        f"{one.waited_seconds / one.step_seconds:.0%}",
        f"{one.taken_seconds / one.step_seconds:.0%}",
        one.sent_as if one.hosts > 1 else "-",
        f"{one.train_seconds / 3600:.3g}",
        f"{one.price:.3g}" if one.price else "-",
    ]


def to_json(predictions: Sequence[Prediction], notes: Sequence[str]) -> dict[str, Any]:
    """One object for programs."""
    return {
        "predictions": [asdict(one) for one in predictions],
        "worth": count_worth(predictions),
        "notes": list(notes),
    }
