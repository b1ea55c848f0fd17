"""How rank 0 tells the launcher how far a training is: lines of JSON on its standard error, shown as a progress bar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cpuft.record import format_metrics
from cpuft.serialization import load, parse_json

PROGRESS_MARK = "cpuft-progress:"
"""Beginning of these lines. The launcher draws its progress bar from them and does not print them."""
FINAL_EVALUATION_MARK = "evaluating on "
"""Beginning of the line that rank 0 shows when all updates are made and the evaluation at the end begins."""
_EVALUATION = re.compile(r"evaluation after update ([0-9]{1,18}): (\S+ \S+(?:  \S+ \S+)*)\s*")


@dataclass(frozen=True)
class ProgressEvent:
    """How far a training is, after an update."""

    update: int
    """Number of updates that are done."""
    updates: int
    """Number of updates of the whole run."""
    loss: float
    samples_per_second: float = 0.0
    """Speed of the latest updates; 0 while the run warms up."""
    seconds_left: float = 0.0
    """Estimated seconds until the last update; 0 while the run warms up."""
    metric: str = ""
    """The main metric of the last evaluation, such as "accuracy 0.8627"; empty before the first evaluation."""
    is_last: bool = False
    """Whether the training has ended, so that no event follows."""


def format_event(event: ProgressEvent) -> str:
    """Return the line that tells the launcher about an event: PROGRESS_MARK and JSON, without a line break."""
    return f"{PROGRESS_MARK} {json.dumps(asdict(event))}"


def parse_event(line: str) -> ProgressEvent | None:
    """Return the event of a line that `format_event` made; None for any other line."""
    if not line.startswith(PROGRESS_MARK):
        return None
    try:
        return load(ProgressEvent, parse_json(line.removeprefix(PROGRESS_MARK)))
    except ValueError:
        return None


def format_evaluation(update: int, metrics: Mapping[str, float]) -> str:
    """Return the line of an evaluation: "evaluation after update 40: accuracy 0.8627  f1 0.9012"."""
    return f"evaluation after update {update}: {format_metrics(metrics)}"


def parse_evaluation(line: str) -> tuple[int, dict[str, float]] | None:
    """Return (number of updates, metrics by name) of a line that `format_evaluation` made; None for another line."""
    found = _EVALUATION.fullmatch(line)
    if found is None:
        return None
    try:
        pairs = (pair.split(" ") for pair in found[2].split("  "))
        return int(found[1]), {name: float(value) for name, value in pairs}
    except ValueError:
        return None
