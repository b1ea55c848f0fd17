"""Options of the recipe that depend on the prepared data: class weights, and the metric that compares evaluations.

They are checked when the data is prepared, before any rank starts.
"""

from __future__ import annotations

import math

import numpy as np

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError, suggest_names
from cpuft.train.data.archive import UNTAGGED, Prepared

LOWER_IS_BETTER = ("perplexity",)
"""Metrics of which the smallest value is the best."""
_HAVE_CLASSES = ("class", "tags")
"""Kinds of data in which each example, or each word, has one class."""


def check_recipe(config: TrainConfig, prepared: Prepared) -> None:
    """Raise CpuftError if an option of the recipe does not fit the data.

    These are label smoothing and class weights for data without classes, class weights that are no list of a positive
    number for each class, and a --best-metric that the task does not have.
    """
    for flag, value in (("--label-smoothing", config.label_smoothing), ("--class-weights", config.class_weights)):
        if value and prepared.kind not in _HAVE_CLASSES:
            raise CpuftError(
                f"{flag} is for tasks with one class per example or per word, which these examples do not have: leave "
                f"it out"
            )
    find_class_weights(config.class_weights, prepared)
    find_best_metric(config, prepared)


def find_class_weights(text: str, prepared: Prepared) -> tuple[float, ...]:
    """Return the weight of each class, in the order of their numbers; () if all count the same.

    `balanced` gives a class the weight examples / (classes * examples of the class), as scikit-learn does; words count
    as examples if they have the classes. A class without examples counts as if it had one.

    Parameters
    ----------
    text: the value of --class-weights.

    Raises CpuftError: `text` is neither empty, nor balanced, nor a positive number for each class.
    """
    if not text:
        return ()
    if text == "balanced":
        labels = prepared.train.labels[prepared.train.labels != UNTAGGED].astype(np.int64)
        counts = np.maximum(np.bincount(labels, minlength=len(prepared.labels)), 1)
        return tuple(float(weight) for weight in len(labels) / (len(counts) * counts))
    try:
        weights = tuple(float(number) for number in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != len(prepared.labels) or not all(0 < weight < math.inf for weight in weights):
        raise CpuftError(
            f"--class-weights {text!r:.60} is not valid: give balanced, or a positive number for each of the "
            f"{len(prepared.labels)} classes ({', '.join(prepared.labels[:10])}), with commas between them"
        )
    return weights


def find_best_metric(config: TrainConfig, prepared: Prepared) -> str:
    """Return the name of the metric that compares evaluations: --best-metric, else the first metric of the task.

    Raises CpuftError: the task does not have the metric of --best-metric.
    """
    known = [name + suffix for suffix in prepared.validation for name in prepared.metrics]
    if config.best_metric and config.best_metric not in known:
        raise CpuftError(
            f"the task {config.task} has no metric {config.best_metric!r:.60}: "
            f"{suggest_names(config.best_metric, known)}"
        )
    return config.best_metric or next(iter(known), "")
