"""Wrong and unusual arguments of collectives, on every rank or on one; a part of grid.py."""

from __future__ import annotations

import glob
import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel

Case = Callable[[], Any]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def rooted(kind: Any, root: int) -> Any:
    made = kind()
    made.rootRank = root
    return made


def wrong(group: Any, rank: int) -> Iterator[tuple[str, Case]]:
    """Yield calls that are wrong on every rank."""
    float64, int32 = torch.float64, torch.int32
    broadcast, reduce = dist.BroadcastOptions, dist.ReduceOptions
    gather, scatter = dist.GatherOptions, dist.ScatterOptions
    yield "all_reduce meta", lambda: group.allreduce([torch.zeros(3, device="meta")])
    yield "all_reduce two", lambda: group.allreduce([zeros(3), zeros(3)])
    yield "all_reduce types", lambda: group.allreduce_coalesced([zeros(3), zeros(3, dtype=float64)])
    yield "all_reduce bits", lambda: dist.all_reduce(zeros(3), op=dist.ReduceOp.BAND)
    yield "broadcast root", lambda: group.broadcast([zeros(3)], rooted(broadcast, -1))
    yield "broadcast high root", lambda: group.broadcast([zeros(3)], rooted(broadcast, 2))
    yield "broadcast two", lambda: group.broadcast([zeros(3), zeros(4)], rooted(broadcast, 0))
    yield "broadcast sparse", lambda: group.broadcast([zeros(3, 3).to_sparse()], rooted(broadcast, 0))
    yield "reduce root", lambda: group.reduce([zeros(3)], rooted(reduce, 5))
    yield "all_gather small", lambda: group.allgather([[zeros(2), zeros(2)]], [zeros(3)])
    yield "all_gather types", lambda: group.allgather([[zeros(3, dtype=int32)] * 2], [zeros(3)])
    yield "all_gather count", lambda: group.allgather([[zeros(3)]], [zeros(3)])
    yield "all_gather into type", lambda: group._allgather_base(zeros(6), zeros(3, dtype=float64))
    yield "all_gather into int", lambda: group._allgather_base(zeros(6, dtype=int32), zeros(3))
    yield "all_gather into small", lambda: group._allgather_base(zeros(5), zeros(3))
    yield "reduce_scatter into large", lambda: group._reduce_scatter_base(zeros(4), zeros(6))
    yield "reduce_scatter into type", lambda: group._reduce_scatter_base(zeros(3, dtype=float64), zeros(6))
    yield "reduce_scatter count", lambda: group.reduce_scatter([zeros(3)], [[zeros(3)]])
    yield "all_to_all splits", lambda: group.alltoall_base(zeros(6), zeros(6), [7, -1], [7, -1])
    yield "all_to_all odd", lambda: group.alltoall_base(zeros(5), zeros(5), [], [])
    yield "all_to_all types", lambda: group.alltoall_base(zeros(6, dtype=float64), zeros(6), [], [])
    yield "gather root", lambda: group.gather([[zeros(3)] * 2], [zeros(3)], rooted(gather, -1))
    yield "scatter root", lambda: group.scatter([zeros(3)], [[zeros(3)] * 2], rooted(scatter, 2))
    yield "send rank", lambda: group.send([zeros(3)], 5, 0)
    yield "recv rank", lambda: group.recv([zeros(3)], -1, 0)


def unequal(group: Any, rank: int) -> Iterator[tuple[str, Case]]:
    """Yield calls that are right on each rank, and do not fit each other, or that are wrong on one rank."""
    for length in (3, 30_000):
        part, whole = zeros(length + rank), zeros(2 * (length + rank))
        yield f"all_reduce {length}", partial(dist.all_reduce, part)
        yield f"broadcast {length}", partial(dist.broadcast, part, 0)
        yield f"gather {length}", partial(group._allgather_base, whole, part)
        yield f"scatter {length}", partial(group._reduce_scatter_base, part, whole)
    yield "reductions", lambda: dist.all_reduce(zeros(3), op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])
    yield "roots", lambda: dist.broadcast(zeros(3), rank)
    yield "operations", lambda: dist.barrier() if rank else dist.all_reduce(zeros(3))
    yield "splits", lambda: dist.all_to_all_single(zeros(6), zeros(6), [2, 4], [2, 4])
    yield "one rank", lambda: group.broadcast(zeros(3), root=-rank)


def unusual(group: Any, rank: int, folder: Path) -> Iterator[tuple[str, Case]]:
    """Yield calls that torch's own groups accept."""

    def tensor_of(call: Callable[[torch.Tensor], Any]) -> Any:
        own = torch.full((2,), rank + 1.0)
        call(own).wait()
        return own.tolist()

    def sparse_gradients() -> Any:
        model = DistributedDataParallel(torch.nn.Embedding(10, 2, sparse=True))
        model(torch.tensor([rank, 4])).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        return gradient.is_sparse and gradient.to_dense().tolist()

    def sparse_sum() -> Any:
        # Another number of values on each rank.
        own = torch.eye(3)[: rank + 1].sum(0).to_sparse()
        dist.all_reduce(own)
        return own.to_dense().tolist()

    def strided() -> Any:
        own, sources = zeros(3, 2), [torch.arange(6.0).view(2, 3).t() * (2 * one + 1) for one in range(2)]
        dist.scatter(own, sources if rank == 0 else None, 0)
        return own.tolist()

    def conjugated() -> Any:
        places = [zeros(1, dtype=torch.complex64) for _ in range(2)]
        group.allgather([places], [torch.tensor([complex(rank, 1)]).conj()]).wait()
        return [str(place.item()) for place in places]

    def save() -> Any:
        saving = async_save({"weights": torch.ones(2)}, checkpoint_id=str(folder / "saved"))
        assert isinstance(saving, Future)
        saving.result()
        return (folder / "saved" / ".metadata").exists()

    def set_timeout() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=17))
        return group.timeout.total_seconds()

    yield "form op", lambda: tensor_of(lambda own: group.allreduce(own, dist.ReduceOp.MAX))
    yield "form list op", lambda: tensor_of(lambda own: group.allreduce([own], op=dist.ReduceOp.SUM))
    yield "form root", lambda: tensor_of(lambda own: group.broadcast(own, root=1))
    yield "form reduce", lambda: tensor_of(lambda own: group.reduce(own, 0, dist.ReduceOp.SUM))
    yield "form barrier", lambda: group.barrier(timeout=timedelta(seconds=5)).wait()
    yield "sparse gradients", sparse_gradients
    yield "sparse sum", sparse_sum
    yield "strided", strided
    yield "conjugated", conjugated
    yield "async_save", save
    yield "timeout", set_timeout
    yield "device types", lambda: [str(one) for one in group._device_types]
    yield "shared memory with a name", lambda: glob.glob(f"/dev/shm/{os.getpid()}:*")
    yield "backend", dist.get_backend
    yield "parsed name", lambda: str(dist.Backend("MPI"))
    yield "new group", lambda: dist.new_group([0, 1]).size()


def run(case: Case) -> Any:
    try:
        found = case()
        return found.wait() if isinstance(found, dist.Work) else found
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_all(backend: str, folder: Path) -> None:
    """Write FOLDER/arguments-RANK.json: what the case of each name returned, or its error."""
    group, rank = dist.group.WORLD, dist.get_rank()
    kinds = {"wrong": wrong(group, rank), "unusual": unusual(group, rank, folder)}
    if backend != "gloo":  # whose group is broken by such calls
        kinds["unequal"] = unequal(group, rank)
    found = {f"{kind}: {name}": run(case) for kind, cases in kinds.items() for name, case in cases}
    (folder / f"arguments-{rank}.json").write_text(json.dumps(found))
