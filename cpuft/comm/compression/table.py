"""The table of gradient compressions, which work over any backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from cpuft.comm.compression import int8, powersgd
from cpuft.comm.compression.hierarchical import HierarchicalReducer, HostGroups, Reduce
from cpuft.comm.compression.levels import CompressionLevel
from cpuft.compressions import COMPRESSION_FACTS, count_buckets, count_coding_seconds, count_ring_passes


@dataclass(frozen=True)
class Compression:
    """A value of --grad-compression: its code, and what it sends in an update; see also `cpuft.compressions`."""

    make_reduce: Callable[[dist.ProcessGroup], Reduce]
    layer_bytes: Callable[[Sequence[torch.Tensor], int], float]
    """(trained parameters, number of ranks) -> bytes sent during the backward pass, as the payload of an all-reduce."""
    row_bytes: Callable[[int, int, int], float]
    """(numbers in the embedding rows of all ranks, in those of one rank, number of ranks) -> bytes sent for them after
    the backward pass, as the payload of an all-reduce."""
    messages: int
    """Messages that are sent one after the other once the last gradient is ready, without those of late rows."""
    wire_type: torch.dtype | None = None
    """The type to which gradients are rounded before they are sent; None for their own type or an encoding."""


def _average_as(dtype: torch.dtype, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, sent as bf16 or fp16."""
    buffer = bucket.buffer()
    # Gradients are divided first, so that the sum over many ranks does not overflow in fp16.
    rounded = divide(buffer.to(dtype), group.size())  # the buffer itself if it has that type already
    work = dist.all_reduce(rounded, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()

    def write_back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        summed = done.value()[0]
        return buffer if summed is buffer else buffer.copy_(summed)

    return future.then(write_back)


def divide(gradients: torch.Tensor, ranks: int) -> torch.Tensor:
    """Divide gradients in place, and return them; by a power of two as a product: the same bits in 3/4 of the time."""
    return gradients.div_(ranks) if ranks & (ranks - 1) else gradients.mul_(1 / ranks)


def _count(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _make_rounding(dtype: torch.dtype) -> Compression:
    return Compression(
        make_reduce=lambda group: functools.partial(_average_as, dtype, group),
        layer_bytes=lambda parameters, ranks: 2 * _count(parameters),
        row_bytes=lambda numbers, own, ranks: 2 * numbers,
        messages=2,
        wire_type=dtype,
    )


def _count_block_bytes(bits: int, numbers: int, own: int, ranks: int) -> float:
    """Return the bytes of embedding rows as the payload of an all-reduce: own rows are sent, and means of all rows."""
    return (int8.encoded_bytes(own, ranks, bits) + int8.encoded_bytes(numbers, ranks, bits)) / 2


TABLE = {
    "none": Compression(
        make_reduce=lambda group: functools.partial(allreduce_hook, group),
        layer_bytes=lambda parameters, ranks: sum(parameter.nbytes for parameter in parameters),
        row_bytes=lambda numbers, own, ranks: 4 * numbers,
        messages=2,
    ),
    "bf16": _make_rounding(torch.bfloat16),
    "fp16": _make_rounding(torch.float16),
    "int8": Compression(
        make_reduce=lambda group: int8.BlockReducer(group).reduce,
        layer_bytes=lambda parameters, ranks: int8.encoded_bytes(_count(parameters), ranks),
        row_bytes=functools.partial(_count_block_bytes, 8),
        messages=4,
    ),
    "powersgd": Compression(
        make_reduce=lambda group: powersgd.PowerSGD(group).reduce,
        layer_bytes=lambda parameters, ranks: powersgd.count_factor_bytes((one.shape for one in parameters), ranks),
        row_bytes=functools.partial(_count_block_bytes, powersgd.P_BITS),
        messages=4,
    ),
}
"""All compressions, from exact to the fewest bytes, with the names of `cpuft.compressions`."""


def make_reduce(compression: str, group: dist.ProcessGroup, hosts: HostGroups | None = None) -> Reduce:
    """Return a function that starts to average a bucket over `group`, and returns a future of the bucket's buffer.

    `compression` is none, bf16, fp16, int8 or powersgd; KeyError for others. `hosts` are those that
    `make_host_groups` returned for the same compression, with the group of all ranks.
    """
    entry = TABLE[compression]
    if hosts is None:
        return entry.make_reduce(group)
    return HierarchicalReducer(hosts, entry.make_reduce(hosts.leaders) if hosts.leaders is not None else None).reduce


def list_levels(
    parameters: Sequence[torch.Tensor], rows: tuple[int, int], ranks: int, coding_seconds: float, hosts: int = 0
) -> list[CompressionLevel]:
    """Return what an update of a model sends with none, bf16, fp16, int8 and powersgd, in this order.

    `parameters` are those that are not exchanged by rows. `rows` are how many numbers the embedding rows of all ranks
    together have, and those of one rank, or of one host if means are hierarchical. `coding_seconds` is the time to
    encode and decode one number with int8. `hosts` is 0 unless compressions with error feedback have hierarchical
    means; their bytes are scaled to stay the payload of an all-reduce between `ranks` ranks.
    """
    numbers = _count(parameters)
    factors = sum(powersgd.count_numbers(parameter.shape) for parameter in parameters)
    slower = coding_seconds / COMPRESSION_FACTS["int8"].coding_seconds
    levels = []
    for name, entry in TABLE.items():
        facts = COMPRESSION_FACTS[name]
        members = hosts if hosts and facts.has_feedback else ranks
        share = count_ring_passes(members) / count_ring_passes(ranks) if members != ranks else 1.0
        levels.append(
            CompressionLevel(
                name,
                share * entry.layer_bytes(parameters, members),
                share * entry.row_bytes(*rows, members),
                facts.has_late_rows and not hosts,
                entry.messages + 2 * (facts.has_late_rows and hosts > 0),
                slower * count_coding_seconds(name, numbers, factors, sum(rows) / 2),
                count_buckets(name, numbers, members),
            )
        )
    return levels


def resolve_compression(requested: str, precision: str) -> str:
    """Return `requested`; for `auto`, bf16 if `precision` is bf16, else `none`. Other names are not checked."""
    return requested if requested != "auto" else "bf16" if precision == "bf16" else "none"


def to_wire_type(gradient: torch.Tensor, compression: str) -> torch.Tensor:
    """Return the gradient rounded for bf16 or fp16, else itself. KeyError: not none, bf16, fp16, int8 or powersgd."""
    return gradient.to(TABLE[compression].wire_type or gradient.dtype)


def wire_type_name(compression: str) -> str:
    """Return "bfloat16" for bf16, "float16" for fp16, "float32" for none, int8 and powersgd. KeyError for others."""
    return str(TABLE[compression].wire_type or torch.float32).removeprefix("torch.")
