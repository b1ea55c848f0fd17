"""What the updates of a job send between ranks, as numbers: enough to foretell any number of hosts from one."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from cpuft.comm.gradients.embedding_rows import find_embedding
from cpuft.comm.gradients.powersgd import count_numbers
from cpuft.config import TrainConfig
from cpuft.measurement import Travels
from cpuft.train.data.order import plan_updates
from cpuft.train.data.prepare import Prepared
from cpuft.train.objective.base import Objective

RANKS = (1, 2, 4, 8, 16, 32, 64)
_UPDATES = 4
"""Looked at for each number of ranks: of 32 rows each they name as many words within a few percent."""


def count_travels(model: torch.nn.Module, objective: Objective, config: TrainConfig, prepared: Prepared) -> Travels:
    """What gradients of this model and these rows are made of. Takes no longer than sorting the rows' lengths does."""
    embedding = find_embedding(model)
    apart = None if embedding is None else embedding.weight
    shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad and parameter is not apart]
    numbers, factors = sum(shape.numel() for shape in shapes), sum(map(count_numbers, shapes))
    if embedding is None:
        return Travels(numbers, factors=factors)
    words = {str(ranks): count_words(objective, config, prepared, ranks) for ranks in RANKS}
    return Travels(numbers, embedding.embedding_dim, factors, words)


def count_words(objective: Objective, config: TrainConfig, prepared: Prepared, ranks: int) -> float:
    """Different words that an update of so many ranks names, on average."""
    rows, batch = prepared.train, config.batch_size * config.accumulation * ranks
    updates: Any = plan_updates(rows, batch, config.seed, _UPDATES, config.padding == "dynamic")
    named = [len(torch.unique(objective.name_tokens(rows, order))) for _, order in islice(updates, _UPDATES)]
    return sum(named) / len(named)
