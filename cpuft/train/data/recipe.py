"""Options that are checked against the prepared data: class weights, --matryoshka and --best-metric."""

from __future__ import annotations

import math

import numpy as np

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, suggest_names
from cpuft.serialization import is_count, to_number
from cpuft.tasks import EMBEDDING_KINDS
from cpuft.train.data.archive import Prepared, count_classes
from cpuft.train.model_shape import find_shape

LOWER_IS_BETTER = ("perplexity",)
"""Metrics of which the smallest value is the best."""
_MACRO_F1 = "f1_macro"


def check_recipe(config: TrainConfig, prepared: Prepared) -> None:
    """Raise CpuftError if label smoothing or class weights are given for a task without one class per example or word,
    or class weights, best metric, matryoshka or similarity loss do not fit the data.
    """
    for flag, value in (("--label-smoothing", config.label_smoothing), ("--class-weights", config.class_weights)):
        if value and prepared.kind not in ("class", "tags"):
            raise CpuftError(
                f"{flag} is for one class per example or word, which these examples do not have: leave it out"
            )
    find_class_weights(config.class_weights, prepared)
    find_best_metric(config, prepared)
    if prepared.kind in EMBEDDING_KINDS:
        _check_embedding_recipe(config, prepared)


def _check_embedding_recipe(config: TrainConfig, prepared: Prepared) -> None:
    hidden = find_shape(config, prepared.vocab_size).hidden
    largest = max(parse_dimensions(config.matryoshka), default=0)
    if hidden and largest > hidden:
        raise CpuftError(
            f"--matryoshka {config.matryoshka}: the embeddings have {hidden} dimensions: give at most {hidden}"
        )
    scores = prepared.train.labels
    if prepared.kind == "similarity" and config.similarity_loss == "mse" and np.abs(scores).max() > 1:
        raise CpuftError(
            f"--similarity-loss mse compares scores with cosines, and the scores go from {scores.min():g} to "
            f"{scores.max():g}: divide them by {np.abs(scores).max():g}, or use --similarity-loss cosent"
        )


def parse_dimensions(text: str) -> tuple[int, ...]:
    """Return the numbers of --matryoshka; () for "". CpuftError: one is no whole number above 0, or is there twice."""
    parts = text.split(",") if text else []
    if not all(map(is_count, parts)) or len(set(parts)) < len(parts):
        raise CpuftError(f"--matryoshka {text!r:.60} is not valid: give different numbers, such as 384,256,128")
    return tuple(map(int, parts))


def find_class_weights(text: str, prepared: Prepared) -> tuple[float, ...]:
    """Return the weight of each class by --class-weights, in the order of their numbers; () for an empty `text`.

    `balanced` gives a class the weight examples / (classes * its examples, at least 1), as scikit-learn does; for
    tags, words count. Raises CpuftError: `text` has not one finite, positive number for each class.
    """
    if not text:
        return ()
    if text == "balanced":
        counts = count_classes(prepared.train.labels, len(prepared.labels))
        return tuple(float(weight) for weight in counts.sum() / (len(counts) * np.maximum(counts, 1)))
    weights = tuple(map(to_number, text.split(",")))
    if len(weights) != len(prepared.labels) or not all(0 < weight < math.inf for weight in weights):
        raise CpuftError(
            f"--class-weights {text!r:.60} is not valid: give balanced, or a positive number for each of the "
            f"{len(prepared.labels)} classes ({', '.join(prepared.labels[:10])}), with commas between them"
        )
    return weights


def find_best_metric(config: TrainConfig, prepared: Prepared) -> str:
    """Return --best-metric (f1_macro for macro-f1), of another split than the first with its suffix, such as
    accuracy_mismatched; if it is not given, the first metric or "". CpuftError: the task has no such metric.
    """
    wanted = _read_best_metric(config)
    names = (*prepared.metrics, _MACRO_F1) if _can_add_macro_f1(prepared) else prepared.metrics
    known = [name + suffix for suffix in prepared.validation for name in names]
    if wanted and wanted not in known:
        raise CpuftError(
            f"--task {config.task} has no metric {config.best_metric!r:.60}: {suggest_names(config.best_metric, known)}"
        )
    return wanted or (known[0] if prepared.metrics else "")


def find_metrics(config: TrainConfig, prepared: Prepared) -> tuple[str, ...]:
    """Return the metrics of evaluations: the task's and, if the kind is class and --best-metric f1_macro, that last."""
    is_added = _can_add_macro_f1(prepared) and _read_best_metric(config).startswith(_MACRO_F1)
    return (*prepared.metrics, _MACRO_F1) if is_added else prepared.metrics


def _read_best_metric(config: TrainConfig) -> str:
    return config.best_metric.replace("macro-f1", _MACRO_F1)


def _can_add_macro_f1(prepared: Prepared) -> bool:
    return prepared.kind == "class" and _MACRO_F1 not in prepared.metrics
