"""Gradients or parameters travel between ranks: the table of exchanges."""

from __future__ import annotations

from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.data_parallel import GradientExchange
from cpuft.train.exchange.local_sgd import ParameterExchange
from cpuft.train.exchange.zero import ZeroExchange
from cpuft.train.exchange.zero1 import ShardExchange


def choose_exchange(config: TrainConfig, ranks: int) -> type[Exchange]:
    """What ranks exchange; one has nobody to exchange with."""
    if config.engine == "deepspeed":
        return ZeroExchange
    if ranks == 1:
        return Exchange
    if config.shard == "optimizer":
        return ShardExchange
    if config.sync_every > 1:
        return ParameterExchange
    return GradientExchange
