"""Whether one of two runs is better than the other: their metrics on the same validation rows, row by row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cpuft.errors import CpuftError
from cpuft.judge import difference
from cpuft.record import Record
from cpuft.report.comparison import Comparison, OtherJobError, compare, list_settings
from cpuft.report.judgement import has_predictions, read_run_predictions


@dataclass(frozen=True)
class Quality:
    """The metrics of two runs, A and B, on the same validation rows, and what can be said about them."""

    a: str
    b: str
    differences: difference.Differences
    notes: tuple[str, ...]
    columns: ClassVar = ("metric", "A", "B", "B - A", "95 % interval", "p")
    """Headings of the table of metrics."""

    @property
    def title(self) -> str:
        """What is compared: "Quality of A (FOLDER) and B (FOLDER) on the same validation rows: 408 rows"."""
        rows = self.differences.count(self.differences.first.rows)
        return f"Quality of A ({self.a}) and B ({self.b}) on the same validation rows: {rows}"

    @property
    def verdict(self) -> str:
        """A sentence on whether one of the runs is better by the first metric."""
        return f"{difference.describe_difference(self.differences)}."

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the table of metrics as texts: a list for each metric, in the order of `columns`."""
        return [
            [
                one.metric.replace("_", " "),
                f"{one.a:.4f}",
                f"{one.b:.4f}",
                f"{one.difference:+.4f}",
                difference.format_interval(one),
                difference.format_p(one).removeprefix("p ").removeprefix("= "),
            ]
            for one in self.differences.found
        ]

    def to_json(self) -> dict[str, Any]:
        """Return for JSON: `a`, `b`, `verdict`, `notes`, and `metrics`, a list with the fields of each `Difference`."""
        found = [{**dataclasses.asdict(one), "difference": one.difference} for one in self.differences.found]
        return {"a": self.a, "b": self.b, "verdict": self.verdict, "metrics": found, "notes": list(self.notes)}


def compare_pair(a: Record, b: Record) -> tuple[Comparison | None, Quality | None, str]:
    """Return (comparison of the speed of two runs or None, that of their metrics or None, why the latter is missing).

    The reason is "" if the metrics are compared, or if no run has predictions. CpuftError: neither can be compared.
    """
    comparison, refused, quality, problem = None, None, None, ""
    try:
        comparison = compare([a, b])
    except CpuftError as error:
        refused = error
    try:
        quality = _compare_quality(a, b, refused)
    except CpuftError as error:
        if refused:
            raise CpuftError(
                f"{refused}. Their metrics cannot be compared row by row, either, because {error}"
            ) from None
        problem = str(error) if has_predictions(a) or has_predictions(b) else ""
    return comparison, quality, problem


def _compare_quality(a: Record, b: Record, refused: CpuftError | None = None) -> Quality:
    """Compare the predictions of two runs; CpuftError: they do not fit. `refused`: why speeds are not compared."""
    differences = difference.compare_predictions(read_run_predictions(a), read_run_predictions(b))
    changes = [f"{name} ({values})" for name, values in list_settings([a, b])[0]]
    changed = f"A and B differ in {', '.join(changes)}" if changes else "A and B have the same options"
    notes = [difference.describe_better(differences), _describe_refusal(refused), changed]
    if len(differences.found) > 1:
        notes.append(
            f"the verdict is about {differences.first.metric.replace('_', ' ')}, the first metric; one of several "
            "metrics has a small p by chance more often"
        )
    notes.append(
        "the same options with another seed may give a model that differs as much: compare several seeds before you "
        "prefer an option"
    )
    first, second = (str(Path(one.path).parent) for one in (a, b))
    return Quality(first, second, differences, tuple(f"{note}." for note in notes if note))


def _describe_refusal(refused: CpuftError | None) -> str:
    if isinstance(refused, OtherJobError):
        return "speed is not compared, because the runs are not the same job"
    return f"speed is not compared: {refused}" if refused else ""
