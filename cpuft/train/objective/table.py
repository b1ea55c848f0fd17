"""The objective of each kind of task."""

from __future__ import annotations

from cpuft.config import TrainConfig
from cpuft.train.data.archive import Prepared
from cpuft.train.data.recipe import find_class_weights
from cpuft.train.objective.base import Objective
from cpuft.train.objective.labels import (
    Classification,
    ClassObjective,
    MultiLabelClassification,
    Regression,
    TokenClassification,
)
from cpuft.train.objective.masked_lm import MaskedLanguageModelling

OBJECTIVES: dict[str, type[Objective]] = {
    "class": Classification,
    "score": Regression,
    "labels": MultiLabelClassification,
    "tags": TokenClassification,
    "masked": MaskedLanguageModelling,
}
"""Objectives by `Prepared.kind`."""


def make_objective(config: TrainConfig, prepared: Prepared) -> Objective:
    """Return the objective for the kind of these examples. Raises KeyError: a kind that is not in OBJECTIVES.

    Raises CpuftError: --class-weights is no list of a number for each class.
    """
    padded_length = config.max_length if config.padding == "max_length" else 0
    objective = OBJECTIVES[prepared.kind]
    shared = (prepared.labels, prepared.metrics, prepared.pad_id, padded_length, prepared.vocab_size)
    if objective is MaskedLanguageModelling:
        return objective(*shared, kinds=prepared.token_kinds, mask_id=prepared.mask_id, config=config)
    if issubclass(objective, ClassObjective):
        weights = find_class_weights(config.class_weights, prepared)
        return objective(*shared, label_smoothing=config.label_smoothing, class_weights=weights)
    return objective(*shared)
