"""Run by mpirun on four ranks: hierarchical means of two simulated hosts with two ranks each.

Usage: hosts.py BACKEND FOLDER. Writes FOLDER/RANK.json: for each compression, how far means are from the exact ones,
and what this rank has sent to whom.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.comm.compression.embedding_rows import average_rows, plan_row_routes
from cpuft.comm.compression.hierarchical import HierarchicalReducer, HostGroups, make_host_groups
from cpuft.comm.compression.table import TABLE, make_reduce
from cpuft.comm.watchdog import register
from tests.comm.compression.feedback import Bucket, blocks, factors, mean, sums
from tests.comm.ranks import become_rank, simulate_hosts

SHAPES = ((300, 40), (7,), (96, 96))


def record_operations() -> list[tuple[str, list[int]]]:
    """Return a list to which every operation that this rank begins is added from now on: its name and world ranks."""
    begun: list[tuple[str, list[int]]] = []
    begin = register.begin

    def record(*arguments: Any, **options: Any) -> Any:
        operation = begin(*arguments, **options)
        begun.append((operation.name, list(operation.ranks)))
        return operation

    untyped: Any = register
    untyped.begin = record
    return begun


def have_same_bits(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have the same tensor."""
    whole = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, tensor)
    return all(torch.equal(one, tensor) for one in whole)


def first_update(compression: str, hosts: HostGroups, dtype: torch.dtype) -> dict[str, object]:
    """Average the gradients of one update in three buckets.

    The error is a share of the largest gradient of any rank.
    """
    world: Any = dist.group.WORLD
    reduce = make_reduce(compression, world, hosts)
    gradients = [torch.randn(shape).to(dtype) for shape in SHAPES]
    exact = [mean(gradient) for gradient in gradients]
    largest = torch.stack([gradient.float().abs().max() for gradient in gradients]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    buckets: list[Any] = [Bucket([torch.zeros(g.shape)], [g], last=g is gradients[-1]) for g in gradients]
    begun, _ = record_operations(), comm.take_traffic()
    for future in [reduce(bucket) for bucket in buckets]:
        future.wait()
    operations, nbytes = list(begun), comm.take_traffic()
    errors = [(b.gradients()[0].double() - e).abs().max() for b, e in zip(buckets, exact, strict=True)]
    return {
        "dtype": str(buckets[0].buffer().dtype),
        "error": float(max(errors) / largest),
        "same": all(have_same_bits(bucket.buffer()) for bucket in buckets),
        "operations": operations,
        "bytes": nbytes,
        "expected bytes": sum(TABLE["int8"].layer_bytes(bucket.parameters(), 2) for bucket in buckets),
    }


def several_updates(compression: str, hosts: HostGroups) -> dict[str, float]:
    """Return what `feedback.sums` does. The unsent numbers are those of the two leaders."""
    world: Any = dist.group.WORLD
    reducer: Any = getattr(make_reduce(compression, world, hosts), "__self__")  # noqa: B009 - typed as a function

    def find_unsent(_: HierarchicalReducer, bucket: Bucket) -> list[torch.Tensor]:
        if hosts.leaders is None:
            return [torch.zeros(parameter.numel()) for parameter in bucket.parameters()]
        between_hosts = reducer._reduce_between_hosts.__self__
        unsent = blocks(between_hosts, bucket) if compression == "int8" else factors(between_hosts, bucket)
        # The mean is over four ranks, of which two have something unsent.
        return [2 * one.reshape(-1) for one in unsent]

    return sums(reducer, find_unsent)


def average_all_rows(hosts: HostGroups) -> dict[str, object]:
    """Average rows that all ranks have, as the exchange of embedding rows does."""
    numbers, unsent, rows = torch.randn(30, 30), torch.zeros(30, 30), torch.arange(30)
    exact = mean(numbers)
    begun, _ = record_operations(), comm.take_traffic()

    def average(own: torch.Tensor, leaders: dist.ProcessGroup) -> torch.Tensor:
        routes = plan_row_routes([rows] * 2, len(rows), leaders.rank())
        mean = torch.empty_like(own)
        mean[routes.rows] = average_rows(own[routes.own], routes, unsent, leaders, 8)
        return mean

    found = hosts.average(numbers, average)
    operations, nbytes = list(begun), comm.take_traffic()
    error = float((found.double() - exact).abs().max())
    return {"error": error, "same": have_same_bits(found), "operations": operations, "bytes": nbytes}


def try_places() -> dict[str, bool]:
    """Return where hierarchical groups are made."""
    found = {}
    for ranks_per_host in (1, 3, 4):
        simulate_hosts(ranks_per_host)
        found[f"int8 on {ranks_per_host}"] = make_host_groups("int8") is not None
    simulate_hosts(2)
    return found | {f"{name} on 2": make_host_groups(name) is not None for name in ("none", "bf16", "fp16")}


if __name__ == "__main__":
    become_rank()
    simulate_hosts(2)
    torch.set_num_threads(1)
    comm.start(sys.argv[1], timeout_seconds=20)
    torch.manual_seed(dist.get_rank())
    result: dict[str, object] = {"places": try_places()}
    for name in ("int8", "powersgd"):
        groups = make_host_groups(name)
        assert groups is not None
        result[f"{name} timeout"] = groups.timeout.total_seconds()
        for number_type in (torch.float32, torch.bfloat16):
            result[f"{name} {number_type}"] = first_update(name, groups, number_type)
        result[f"{name} sums"] = several_updates(name, groups)
        result[f"{name} rows"] = average_all_rows(groups)
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
