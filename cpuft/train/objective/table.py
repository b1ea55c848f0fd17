"""The objective of each kind of task."""

from __future__ import annotations

from cpuft.config import TrainConfig
from cpuft.train.data.archive import Prepared
from cpuft.train.objective.base import Objective
from cpuft.train.objective.labels import Classification, MultiLabelClassification, Regression, TokenClassification
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
    """Return the objective for the kind of these examples. Raises KeyError: a kind that is not in OBJECTIVES."""
    padded_length = config.max_length if config.padding == "max_length" else 0
    objective = OBJECTIVES[prepared.kind]
    shared = (prepared.labels, prepared.metrics, prepared.pad_id, padded_length, prepared.vocab_size)
    if objective is MaskedLanguageModelling:
        return objective(*shared, kinds=prepared.token_kinds, mask_id=prepared.mask_id, config=config)
    return objective(*shared)
