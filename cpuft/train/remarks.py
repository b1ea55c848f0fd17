"""What a user should look at before a run and after it, although nothing has failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from cpuft.config.train import TrainConfig
from cpuft.record import EvaluationLine, StepLine
from cpuft.tasks import LABEL_KINDS
from cpuft.train.data.archive import UNTAGGED, Prepared
from cpuft.train.objective.base import Objective, Predictions

_HIGH_RATE = 0.1
"""Learning rate above which a run begins with a warning. That of the largest usual recipes is 0.01."""


def warn_of_learning_rate(config: TrainConfig) -> str:
    """Return a warning of a learning rate that is far above all usual ones, or an empty text."""
    if config.learning_rate <= _HIGH_RATE:
        return ""
    return (
        f"warning: --learning-rate {config.learning_rate:g} is far above the usual ones, which are from 1e-6 to 0.01: "
        f"AdamW changes each weight by about the learning rate in each update, so that the model will learn nothing"
    )


def find_remark(
    config: TrainConfig,
    objective: Objective,
    prepared: Prepared,
    steps: Sequence[StepLine],
    evaluation: EvaluationLine | None,
) -> str:
    """Return a warning if the run has not trained, has diverged, or gives one answer only; else an empty text."""
    if not steps or not config.learning_rate:
        given = f"--epochs {config.epochs:g}" if not steps else "--learning-rate 0"
        return f"warning: nothing was trained, because of {given}: the model has the weights from before the run"
    first, last = steps[0].loss, statistics.fmean(step.loss for step in steps[-max(1, len(steps) // 10) :])
    # A model that knows nothing has this loss. The first one may be smaller by chance, or because it knows something.
    labels = prepared.train.labels
    chance = float(np.var(labels)) if prepared.kind == "score" else math.log(max(2, len(prepared.labels)))
    if last > 2 * max(first, chance):
        return (
            f"warning: the training has diverged: the loss rose from {first:.4g} in the first update to {last:.4g} in "
            f"the last ones: try a tenth of --learning-rate {config.learning_rate:g}, or --warmup-ratio 0.1"
        )
    if evaluation and (answer := _find_constant_answer(objective, prepared, evaluation)):
        metrics = ", ".join(f"{name} {evaluation.metrics[name]:.4f}" for name in prepared.metrics)
        return (
            f"warning: the model does not tell the examples apart: {metrics} is what {answer} for every example gives; "
            f"there were too few updates, or --learning-rate {config.learning_rate:g} is too high or too low"
        )
    return ""


def _find_constant_answer(objective: Objective, prepared: Prepared, evaluation: EvaluationLine) -> str:
    """Return the one answer which for all examples of the first validation split has exactly these metrics.

    It is empty if there is none, as for tasks without labels, or if all examples have one label.
    """
    tokens = prepared.validation[""]
    labels = tokens.labels[tokens.labels != UNTAGGED] if prepared.kind == "tags" else tokens.labels
    if prepared.kind not in LABEL_KINDS or (labels == labels[:1]).all():
        return ""
    outputs = dict[str, Predictions]()
    if prepared.kind in ("class", "tags"):
        count, is_tags = len(prepared.labels), prepared.kind == "tags"
        shares = np.bincount(labels.astype(int), minlength=count) / len(labels)
        for one in np.flatnonzero(np.isclose(shares, evaluation.metrics.get("accuracy", shares))):
            output = np.full(tokens.lengths.max(), one) if is_tags else np.arange(count) == one
            outputs[f"the {'tag' if is_tags else 'label'} {prepared.labels[one]}"] = output.astype(np.float32)
    else:
        outputs["one score" if prepared.kind == "score" else "no label"] = -np.ones(labels[0].size, np.float32)
    for answer, output in outputs.items():
        found = objective.compute_metrics(np.broadcast_to(output, (len(tokens), *output.shape)), tokens)
        if all(math.isclose(evaluation.metrics[name], value, abs_tol=1e-12) for name, value in found.items()):
            return answer
    return ""
