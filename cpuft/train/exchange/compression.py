"""What --grad-compression auto chooses for this job between these hosts, and what an update sends."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.comm.compression.int8 import encoded_bytes, measure_coding_seconds
from cpuft.comm.compression.levels import CompressionLevel, LinkModel, choose_level
from cpuft.comm.compression.powersgd import count_bytes, count_numbers
from cpuft.comm.compression.table import resolve_compression
from cpuft.comm.selection import MESSAGE_BYTES, measure_collective
from cpuft.config import AUTO_COMPRESSIONS, SHARDED_COMPRESSIONS, TrainConfig
from cpuft.rank.world import World
from cpuft.record import Travels
from cpuft.train.data.archive import Prepared
from cpuft.train.data.order import deal, plan_updates
from cpuft.train.objective.base import Objective
from cpuft.train.precision import autocast

_FAST_SECONDS = 0.02
"""An exchange that takes no longer is not worth a look at the step."""


def settle(
    config: TrainConfig,
    precision: str,
    model: torch.nn.Module,
    objective: Objective,
    prepared: Prepared,
    world: World,
    known: str = "",
) -> tuple[str, str]:
    """What `auto` sends gradients as, the same on all ranks, and why in one line; each '' where it was no question.

    Several hosts with a slow link are one. To be called when the model has its fast layers, and by all ranks. `known`
    is what it was between these hosts when the run began.
    """
    base = resolve_compression(config.grad_compression, precision)
    apart = config.sync_every > 1 or config.engine == "deepspeed"
    if config.grad_compression != "auto" or apart or not _between_hosts(world):
        return "", ""
    allowed = [name for name in AUTO_COMPRESSIONS if config.shard == "none" or name in SHARDED_COMPRESSIONS]
    if known in allowed:
        return known, "as when the run began"
    wire = measure_wire()
    words = count_words(objective, config, prepared, world.size)
    exact = make_rungs(model, words, world.size, 0.0)[0]
    if (exact.layer_bytes + exact.row_bytes) * wire.seconds_per_byte <= _FAST_SECONDS:
        return base, ""
    measured = torch.tensor(
        [_measure_compute(config, precision, model, objective, prepared, world), measure_coding_seconds()]
    )
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)  # the slowest rank's, and the same choice on all
    seconds, coding = measured.tolist()
    rungs = {rung.name: rung for rung in make_rungs(model, words, world.size, coding)}
    names = list(rungs)[list(rungs).index(base) :]
    rung, reason = choose_level([rungs[name] for name in names if name in allowed], seconds, wire)
    return rung.name, reason


def _between_hosts(world: World) -> bool:
    return world.local_size < world.size


def make_rungs(model: torch.nn.Module, words: float, ranks: int, coding_seconds: float) -> list[CompressionLevel]:
    """What an update of a model sends by each rung, from exact to thrifty.

    Parameters
    ----------
    words: different ones that an update names.
    coding_seconds: of a number, for the rungs that code.
    """
    embedding = find_embedding(model)
    weight = None if embedding is None else embedding.weight
    layers = [p for p in model.parameters() if p.requires_grad and p is not weight]
    count, rows = sum(p.numel() for p in layers), 0 if weight is None else round(words * weight.shape[1])
    coding = coding_seconds * (count + rows)
    blocks = encoded_bytes(rows, ranks)
    return [
        CompressionLevel("none", sum(p.nbytes for p in layers), 4 * rows, 2, 0.0),
        CompressionLevel("bf16", 2 * count, 2 * rows, 2, 0.0),
        CompressionLevel("int8", encoded_bytes(count, ranks), blocks, 4, coding),
        CompressionLevel("powersgd", sum(count_bytes(p.shape) for p in layers), blocks, 5, coding),
    ]


def measure_wire() -> LinkModel:
    """An all-reduce's time between these ranks, of a bucket and of next to nothing. A collective."""
    small = measure_collective("", "all_reduce", "float32", 64, 5).median_seconds
    large = measure_collective("", "all_reduce", "float32", MESSAGE_BYTES, 3).median_seconds
    return LinkModel(max(0.0, large - small) / MESSAGE_BYTES, small)


def _measure_compute(
    config: TrainConfig, precision: str, model: torch.nn.Module, objective: Objective, prepared: Prepared, world: World
) -> float:
    """Seconds of an update's forward and backward passes on this rank; the first pass is a warm-up."""
    model.train()
    updates = plan_updates(prepared.train, config.batch_size * world.size, config.seed, 1, config.padding == "dynamic")
    _, rows = next(iter(updates))
    batch = objective.make_batch(prepared.train, deal(rows, world.rank, world.size))
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with autocast(precision):
            losses = objective.losses(model, batch)
        torch.autograd.backward(losses.sum())
        seconds = time.perf_counter() - start
        model.zero_grad()
    return seconds * config.gradient_accumulation


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
    rows, batch = prepared.train, config.batch_size * config.gradient_accumulation * ranks
    updates: Any = plan_updates(rows, batch, config.seed, _UPDATES, config.padding == "dynamic")
    named = [len(torch.unique(objective.list_token_ids(rows, order))) for _, order in islice(updates, _UPDATES)]
    return sum(named) / len(named)
