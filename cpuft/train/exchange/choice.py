"""Which exchange a run has."""

from __future__ import annotations

from cpuft.config import TrainConfig
from cpuft.train.exchange import Exchange
from cpuft.train.exchange.gradients import GradientExchange
from cpuft.train.exchange.late import LateExchange
from cpuft.train.exchange.parameters import ParameterExchange
from cpuft.train.exchange.shards import ShardExchange
from cpuft.train.exchange.zero import ZeroExchange


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
    return LateExchange if config.grad_compression == "late" else GradientExchange
