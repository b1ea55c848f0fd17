"""When the gradients of a step become ready, as scripts/record-layer-times has measured on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cpuft.record import Record, read_record
from cpuft.serialization import load, parse_json

FILE_NAME = "layer-times.json"
"""Name of the file in the folder of the run."""


@dataclass(frozen=True)
class GradientTime:
    """When one gradient becomes ready in the backward pass."""

    name: str
    """Name of the parameter, as `named_parameters` of the model returns it."""
    shape: list[int]
    dtype: str
    ready_seconds: float
    """Seconds from the start of an update's last backward pass until the gradient is accumulated."""
    by_rows: bool
    """Whether several ranks send only the rows of the update's tokens, as for the word embedding."""


@dataclass(frozen=True)
class StepTimes:
    """The times of a step: medians over the measured updates, and sums over the passes of an update, of this rank
    without waiting.
    """

    gradients: list[GradientTime]
    """In the order in which they become ready."""
    updates: int
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    last_backward_seconds: float
    """Seconds of the last backward pass of an update, in which gradients are sent."""
    update_seconds: float


@dataclass(frozen=True)
class TimedRecord(Record):
    """The record of a run, and the times of a step; None if they were not measured."""

    layer_times: StepTimes | None = None


def read_timed_record(run_dir: str) -> TimedRecord:
    """Read the record of a run, and the times beside it if they are there. Raises CpuftError as `read_record` does."""
    record = read_record(run_dir)
    path = Path(record.path).with_name(FILE_NAME)
    times = load(StepTimes, parse_json(path.read_text(encoding="utf-8")), str(path)) if path.exists() else None
    return TimedRecord(**vars(record), layer_times=times)
