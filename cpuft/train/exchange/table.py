"""Which exchange between ranks a run uses."""

from __future__ import annotations

from cpuft.config.train import TrainConfig
from cpuft.train.engines.deepspeed import DeepSpeedExchange
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.data_parallel import DataParallelExchange
from cpuft.train.exchange.local_sgd import LocalSGDExchange
from cpuft.train.exchange.zero1 import ShardedExchange


def choose_exchange(config: TrainConfig, ranks: int) -> type[Exchange]:
    """Return the class of a run's exchange: DeepSpeedExchange with --engine deepspeed; else Exchange for one rank; else
    ShardedExchange with --shard optimizer; else LocalSGDExchange with --sync-every above 1; else DataParallelExchange.
    """
    if config.engine == "deepspeed":
        return DeepSpeedExchange
    if ranks == 1:
        return Exchange
    if config.shard == "optimizer":
        return ShardedExchange
    return LocalSGDExchange if config.sync_every > 1 else DataParallelExchange
