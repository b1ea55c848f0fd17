"""What a run learns: the table of objectives, one for each kind of task."""

from __future__ import annotations

from cpuft.config import TrainConfig
from cpuft.train.data.archive import Prepared
from cpuft.train.objective.base import Objective
from cpuft.train.objective.labels import Classification, Regression, SeveralLabels, Tagging
from cpuft.train.objective.masked_lm import Masking

OBJECTIVES: dict[str, type[Objective]] = {
    "class": Classification,
    "score": Regression,
    "labels": SeveralLabels,
    "tags": Tagging,
}
"""By `Prepared.kind`."""


def make_objective(config: TrainConfig, prepared: Prepared) -> Objective:
    """What the rows are to teach."""
    width = config.max_length if config.padding == "max_length" else 0
    usual = (prepared.labels, prepared.metrics, prepared.pad_id, width, prepared.words)
    if prepared.kind == "masked":
        return Masking(*usual, kinds=prepared.word_kinds, mask_id=prepared.mask_id, config=config)
    return OBJECTIVES[prepared.kind](*usual)
