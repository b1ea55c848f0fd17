"""Gradients travel while ranks compute the next ones, and are applied an update late."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from cpuft.comm.gradients.embedding_rows import find_embedding
from cpuft.comm.gradients.late import LateGradients
from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange


class LateExchange(Exchange):
    """No DistributedDataParallel: all is sent at once, after backward."""

    def __init__(self, own: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(own, optimizer, config, precision)
        words = find_embedding(own)
        self._late = LateGradients(own.parameters(), None if words is None else words.weight)

    def average(self, name_tokens: Callable[[], torch.Tensor]) -> float:
        """What is waited for is the last update's mean."""
        self._late.exchange(name_tokens())
        return 0.0
