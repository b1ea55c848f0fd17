"""Records of runs that scripts/record-layer-times has timed."""

from __future__ import annotations

from cpuft.record import Record
from scripts.benchmarks.step_times import GradientTime, StepTimes, TimedRecord

LAYER_TIMES = StepTimes(
    [
        GradientTime("classifier.weight", [2, 384], "bfloat16", 0.001, False),
        GradientTime("bert.encoder.layer.0.output.dense.weight", [384, 1536], "bfloat16", 0.15, False),
        GradientTime("bert.embeddings.word_embeddings.weight", [30522, 384], "bfloat16", 0.2, True),
    ],
    *(16, 0.001, 0.1, 0.2, 0.2, 0.02),
)
"""When some gradients of a run were ready."""


def time_record(record: Record, times: StepTimes | None = LAYER_TIMES) -> TimedRecord:
    """The record with times."""
    return TimedRecord(**vars(record), layer_times=times)
