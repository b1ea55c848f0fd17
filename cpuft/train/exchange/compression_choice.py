"""Which gradient compression `--grad-compression auto` measures and chooses for a job, and what an update sends."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.backend_choice import MESSAGE_BYTES
from cpuft.comm.collective_timing import measure_collective
from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.comm.compression.hierarchical import find_ranks_per_host
from cpuft.comm.compression.int8 import measure_coding_seconds
from cpuft.comm.compression.levels import CompressionLevel, LinkModel, choose_level
from cpuft.comm.compression.powersgd import count_numbers
from cpuft.comm.compression.table import list_levels, resolve_compression
from cpuft.comm.registration import BACKENDS
from cpuft.compressions import AUTO_COMPRESSIONS, SHARDED_COMPRESSIONS, count_ring_passes
from cpuft.config.train import TrainConfig
from cpuft.network_speed import CPU_SECONDS_PER_BYTE
from cpuft.rank.world import World
from cpuft.record import GradientSizes
from cpuft.train.data.archive import Prepared
from cpuft.train.data.order import is_grouped, plan_updates, select_for_rank
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.objective.base import Objective
from cpuft.train.precision import autocast

RANK_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of ranks for which `count_sent_numbers` counts the tokens of an update."""
_FAST_SECONDS = 0.02
"""If an exchange takes no longer than this, no compression can gain much, and the step is not measured."""
_SAMPLED_UPDATES = 4
"""Updates in which distinct tokens are counted, for each number of ranks: these counts differ by a few percent only."""


def choose_compression(
    config: TrainConfig,
    precision: str,
    model: torch.nn.Module,
    objective: Objective,
    prepared: Prepared,
    world: World,
    earlier: str = "",
) -> tuple[str, str]:
    """Choose the compression of gradients for `--grad-compression auto`, the same on all ranks. Collective.

    Returns its name, for example int8, and the reason in one line; both are "" if auto is not given, the exchange sends
    no gradients, or all ranks are on one host. The choice is the most exact compression with which a step is
    estimated to be as short as the shortest within 2 %; if the link sends uncompressed gradients within 20 ms, it is
    bf16 for bf16 `precision`, else none, with the reason "". If auto may choose `earlier`, what a resumed run chose at
    its beginning, it is returned unmeasured, with the reason "as when the run began"; "" is a new run.

    Call it when the model has its fast layers. With a slow link it runs two forward and backward passes, which leave
    the model in training mode without gradients.
    """
    base = resolve_compression(config.grad_compression, precision)
    has_choice = config.grad_compression == "auto" and choose_exchange(config, world.size).sends_gradients
    if not has_choice or world.local_size == world.size:
        return "", ""
    allowed = [name for name in AUTO_COMPRESSIONS if config.shard == "none" or name in SHARDED_COMPRESSIONS]
    if earlier in allowed:
        return earlier, "as when the run began"
    link, per_host = measure_link(), find_ranks_per_host(world)
    tokens, own_tokens = (
        _count_distinct_tokens(objective, config, prepared, ranks) for ranks in (world.size, per_host or 1)
    )
    exact = make_levels(model, tokens, own_tokens, world.size, 0.0)[0]
    if (exact.layer_bytes + exact.row_bytes) * link.seconds_per_byte <= _FAST_SECONDS:
        return base, ""
    seconds = _measure_compute(config, precision, model, objective, prepared, world)
    measured = torch.tensor([seconds, measure_coding_seconds()])
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)  # the slowest rank's times, so that all ranks choose the same
    seconds, coding = measured.tolist()
    hosts = world.size // per_host if per_host else 0
    # Between two hosts with two ranks each, MPI's all-reduce sends its payload once over the link of a host, as one
    # between the first ranks of the hosts does. Those of gloo and oneCCL send it 1.5 times, as a ring of all ranks.
    ring = hosts if hosts and dist.get_backend() in ("mpi", BACKENDS["mpi"].torch_name) else world.size
    levels = {level.name: level for level in make_levels(model, tokens, own_tokens, ring, coding, hosts)}
    names = list(levels)[list(levels).index(base) :]
    level, reason = choose_level([levels[name] for name in names if name in allowed], seconds, link)
    return level.name, reason


def make_levels(
    model: torch.nn.Module, tokens: float, own_tokens: float, ranks: int, coding_seconds: float, hosts: int = 0
) -> list[CompressionLevel]:
    """Return what an update of a model sends with each compression, from none to powersgd.

    `tokens` and `own_tokens` are the distinct tokens in an update of all ranks and of one rank (of one host if means
    are hierarchical). `ranks` are those of the all-reduce whose payload the bytes are, `coding_seconds` those to encode
    and decode one number with int8, and `hosts` is 0 without hierarchical means.
    """
    layers, row = _list_layers(model)
    return list_levels(layers, (round(tokens * row), round(own_tokens * row)), ranks, coding_seconds, hosts)


def _list_layers(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], int]:
    """Return the trained parameters without the word embedding that is exchanged by rows, and its width (0: none)."""
    embedding = find_embedding(model)
    weight = None if embedding is None else embedding.weight
    layers = [p for p in model.parameters() if p.requires_grad and p is not weight]
    return layers, 0 if embedding is None else embedding.embedding_dim


def measure_link() -> LinkModel:
    """Measure all-reduces of 1 MiB and of 64 bytes, and return what they cost, the same on all ranks. Collective."""
    small = measure_collective("", "all_reduce", "float32", 64, 5).median_seconds
    large = measure_collective("", "all_reduce", "float32", MESSAGE_BYTES, 3).median_seconds
    taken = count_ring_passes(dist.get_world_size()) * CPU_SECONDS_PER_BYTE / torch.get_num_threads()
    return LinkModel(max(0.0, large - small) / MESSAGE_BYTES, small, taken)


def _measure_compute(
    config: TrainConfig, precision: str, model: torch.nn.Module, objective: Objective, prepared: Prepared, world: World
) -> float:
    """Measure the seconds of an update's forward and backward passes on this rank; the first pass is a warm-up."""
    model.train()
    size = config.batch_size * world.size
    updates = plan_updates(prepared.train, size, config.seed, 1, is_grouped(prepared.kind))
    _, examples = next(iter(updates))
    own = select_for_rank(examples, world.rank, world.size)
    batch = objective.make_batch(prepared.train, own[: config.micro_batch or len(own)])
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with autocast(precision):
            losses = objective.losses(model, batch)
        torch.autograd.backward(losses.sum())
        seconds = time.perf_counter() - start
        model.zero_grad()
    return seconds * config.gradient_accumulation * len(own) / len(batch.labels)


def count_sent_numbers(
    model: torch.nn.Module, objective: Objective, config: TrainConfig, prepared: Prepared
) -> GradientSizes:
    """Count the numbers of the gradients that an update of this model with these examples sends; not collective.
    The keys of `tokens` are texts ("1", "2", ...), one for each of RANK_COUNTS; none if no embedding is sent by rows.
    """
    layers, row = _list_layers(model)
    numbers, factors = sum(one.numel() for one in layers), sum(count_numbers(one.shape) for one in layers)
    counts = RANK_COUNTS if row else ()
    tokens = {str(ranks): _count_distinct_tokens(objective, config, prepared, ranks) for ranks in counts}
    return GradientSizes(numbers, row, factors, tokens)


def _count_distinct_tokens(objective: Objective, config: TrainConfig, prepared: Prepared, ranks: int) -> float:
    """Return the mean number of distinct tokens of all ranks together, in the first updates on this many ranks."""
    tokens, batch = prepared.train, config.batch_size * config.gradient_accumulation * ranks
    updates: Any = plan_updates(tokens, batch, config.seed, _SAMPLED_UPDATES, is_grouped(prepared.kind))
    found = [
        len(torch.unique(objective.list_token_ids(tokens, examples)))
        for _, examples in islice(updates, _SAMPLED_UPDATES)
    ]
    return sum(found) / len(found)
