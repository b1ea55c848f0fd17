"""Parameters are averaged now and then: ranks train apart meanwhile, each on its own gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.comm.compression.local_sgd import LocalSGD
from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.adamw import fp32_weights


class ParameterExchange(Exchange):
    """Ranks meet every `sync_every` updates, on fp32 weights where the model has them."""

    def __init__(self, own: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(own, optimizer, config, precision)
        words = find_embedding(own)
        sent_as = "int8" if config.grad_compression == "auto" else config.grad_compression
        with fp32_weights(own):
            weight = None if words is None else words.weight
            self._local = LocalSGD(own.parameters(), sent_as, config.outer_momentum, weight)

    def begin_anew(self) -> None:
        """What was learnt before is no gain of this start, which would be sent, and doubled by the outer momentum."""
        with fp32_weights(self.own):
            self._local.restart()

    def average(self, name_tokens: Callable[[], torch.Tensor]) -> float:
        """Gradients stay apart; words are remembered."""
        self._local.note_tokens(name_tokens())
        return 0.0

    def meet(self, update: int, last: bool) -> None:
        """What was sent is there by the next meeting; after the last update all ranks wait for it."""
        if last or update % self.config.sync_every == 0:
            with fp32_weights(self.own):
                (self._local.finish if last else self._local.synchronize)()
