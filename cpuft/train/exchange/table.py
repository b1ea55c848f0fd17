"""The exchanges between ranks, and which one a run uses."""

from __future__ import annotations

from cpuft.config.train import TrainConfig
from cpuft.train.engines.deepspeed import DeepSpeedExchange
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.data_parallel import DataParallelExchange
from cpuft.train.exchange.local_sgd import LocalSGDExchange
from cpuft.train.exchange.zero1 import ShardedExchange

EXCHANGES: dict[str, type[Exchange]] = {
    "--engine deepspeed": DeepSpeedExchange,
    "--np 1": Exchange,
    "--shard optimizer": ShardedExchange,
    "--sync-every N, --outer-momentum N": LocalSGDExchange,
    "--grad-compression NAME": DataParallelExchange,
}
"""The exchanges, each with the options that select or configure it. The first one that is selected is used."""


def choose_exchange(config: TrainConfig, ranks: int) -> type[Exchange]:
    """Return the class of the exchange of a run with these options on this number of ranks, which is at least 1."""
    return next(exchange for exchange in EXCHANGES.values() if exchange.is_selected(config, ranks))
