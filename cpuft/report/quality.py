"""Whether one of two runs is better than the other: their metrics on the same validation rows, row by row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.judge.difference import (
    Differences,
    compare_predictions,
    describe_better,
    describe_difference,
    format_interval,
    format_p,
)
from cpuft.judge.predictions import read_predictions
from cpuft.record import Record

COLUMNS = ("metric", "A", "B", "B - A", "95 % interval", "p")
"""Headings of the table of metrics."""


@dataclass(frozen=True)
class Quality:
    """The metrics of two runs, A and B, on the same validation rows, and what can be said about them."""

    a: str
    """Folder of the run."""
    b: str
    differences: Differences
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """What is compared."""
        rows = self.differences.count(self.differences.first.rows)
        return f"quality of A ({self.a}) and B ({self.b}) on the same validation rows: {rows}"

    @property
    def verdict(self) -> str:
        """Whether one of the runs is better by the first metric."""
        return f"{describe_difference(self.differences)}."

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the table of metrics as texts."""
        return [
            [
                one.metric.replace("_", " "),
                f"{one.a:.4f}",
                f"{one.b:.4f}",
                f"{one.difference:+.4f}",
                format_interval(one),
                format_p(one).removeprefix("p ").removeprefix("= "),
            ]
            for one in self.differences.found
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        found = [
            {**dataclasses.asdict(one), "difference": one.difference} for one in self.differences.found
        ]
        return {"a": self.a, "b": self.b, "verdict": self.verdict, "metrics": found, "notes": list(self.notes)}


def compare_quality(a: Record, b: Record, no_speed: str = "") -> Quality:
    """Compare the predictions of two runs; `no_speed` says why their speed is not compared.

    Raises CpuftError: one of them has no predictions, or they are for other rows.
    """
    folders = [str(Path(one.path).parent) for one in (a, b)]
    differences = compare_predictions(*map(read_predictions, folders))
    notes = [f"{one}." for one in (describe_better(differences), no_speed, _describe_changes(a, b)) if one]
    if len(differences.found) > 1:
        notes.append(
            f"the verdict is about {differences.first.metric.replace('_', ' ')}, the first metric; with several "
            "metrics, one of them has a small p by chance more often."
        )
    notes.append(
        "this compares two trained models: the same options with another seed may differ as much, which cpuft sweep "
        "--seed 1..5 shows."
    )
    return Quality(*folders, differences, tuple(notes))


def _describe_changes(a: Record, b: Record) -> str:
    """Return in which options two runs differ."""
    options = [one.header.options | {"ranks": one.header.world_size, "data": one.header.data} for one in (a, b)]
    names = [name for name in dict.fromkeys((*options[0], *options[1])) if options[0].get(name) != options[1].get(name)]
    listed = [
        f"{name.replace('_', ' ')} ({' and '.join(_format_option(one.get(name)) for one in options)})" for name in names
    ]
    return f"A and B differ in {', '.join(listed)}" if listed else "A and B have the same options"


def _format_option(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text and value is not None else "not given"
