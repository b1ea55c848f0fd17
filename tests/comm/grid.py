"""Run by mpirun: every operation on every type, compared on each rank with a computation in one process.

Usage: grid.py BACKEND FOLDER [VARIABLE=VALUE ...]. Writes FOLDER/RANK.json: {"operation type layout": "ok" or error}.
Two ranks without variables then go on with crowd.py, and with arguments.py, which writes FOLDER/arguments-RANK.json.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from cpuft import comm
from tests.comm import arguments, crowd
from tests.comm.inputs import Inputs, fold
from tests.comm.ranks import become_rank

Case = Callable[[Inputs], tuple[object, object]]
"""Runs an operation and returns its result and the expected one."""

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
ALL = (*FLOATS, *INTEGERS, torch.bool)


def all_reduce(name: str, inputs: Inputs) -> tuple[object, object]:
    mine = inputs.of(inputs.rank)
    dist.all_reduce(mine, op=getattr(dist.ReduceOp, name))
    return mine, fold(inputs.all(), name)


def reduce(inputs: Inputs) -> tuple[object, object]:
    root = inputs.size - 1
    mine = inputs.of(inputs.rank)
    dist.reduce(mine, root)
    return (mine, fold(inputs.all(), "SUM")) if inputs.rank == root else (None, None)


def broadcast(inputs: Inputs) -> tuple[object, object]:
    mine = inputs.of(inputs.rank)
    dist.broadcast(mine, 1)
    return mine, inputs.of(1)


def all_gather(inputs: Inputs) -> tuple[object, object]:
    places = [inputs.blank() for _ in range(inputs.size)]
    dist.all_gather(places, inputs.of(inputs.rank))
    return places, inputs.all()


def all_gather_uneven(inputs: Inputs) -> tuple[object, object]:
    places = [inputs.blank(rank) for rank in range(inputs.size)]
    dist.all_gather(places, inputs.of(inputs.rank, inputs.rank))
    return places, [inputs.of(rank, rank) for rank in range(inputs.size)]


def all_gather_single(inputs: Inputs) -> tuple[object, object]:
    whole = inputs.blank(3 * inputs.size)
    dist.all_gather_into_tensor(whole, inputs.of(inputs.rank))
    return whole, torch.cat(inputs.all())


def all_gather_in_place(inputs: Inputs) -> tuple[object, object]:
    whole = torch.zeros(3 * inputs.size, 4, dtype=inputs.dtype)
    mine = whole[3 * inputs.rank : 3 * inputs.rank + 3]
    mine.copy_(inputs.of(inputs.rank))
    dist.all_gather_into_tensor(whole, mine)
    return whole, torch.cat(inputs.all())


def reduce_scatter(inputs: Inputs) -> tuple[object, object]:
    mine = inputs.blank()
    dist.reduce_scatter(mine, [inputs.of(inputs.rank, salt=target) for target in range(inputs.size)])
    return mine, fold(inputs.all(salt=inputs.rank), "SUM")


def reduce_scatter_uneven(inputs: Inputs) -> tuple[object, object]:
    mine = inputs.blank(inputs.rank)
    dist.reduce_scatter(mine, [inputs.of(inputs.rank, rows=target, salt=target) for target in range(inputs.size)])
    return mine, fold(inputs.all(rows=inputs.rank, salt=inputs.rank), "SUM")


def reduce_scatter_single(name: str, inputs: Inputs) -> tuple[object, object]:
    mine = inputs.blank()
    op = getattr(dist.ReduceOp, name)
    work = dist.reduce_scatter_tensor(mine, inputs.of(inputs.rank, 3 * inputs.size), op=op, async_op=True)
    assert work is not None
    for _ in range(2):  # the second time it changes nothing
        work.wait()
    total = fold(inputs.all(3 * inputs.size), name)
    return mine, total[3 * inputs.rank : 3 * inputs.rank + 3]


def all_to_all(inputs: Inputs) -> tuple[object, object]:
    places = [inputs.blank(source + inputs.rank) for source in range(inputs.size)]
    sent = [inputs.of(inputs.rank, rows=inputs.rank + target, salt=target) for target in range(inputs.size)]
    dist.all_to_all(places, sent)
    return places, [inputs.of(source, source + inputs.rank, salt=inputs.rank) for source in range(inputs.size)]


def all_to_all_single(inputs: Inputs) -> tuple[object, object]:
    whole = inputs.blank(2 * inputs.size)
    dist.all_to_all_single(whole, inputs.of(inputs.rank, 2 * inputs.size))
    at = 2 * inputs.rank
    return whole, torch.cat([tensor[at : at + 2] for tensor in inputs.all(2 * inputs.size)])


def all_to_all_single_uneven(inputs: Inputs) -> tuple[object, object]:
    sizes = list(range(inputs.size))
    mine = inputs.blank(inputs.rank * inputs.size)
    dist.all_to_all_single(mine, inputs.of(inputs.rank, sum(sizes)), [inputs.rank] * inputs.size, sizes)
    at = sum(sizes[: inputs.rank])
    return mine, torch.cat([tensor[at : at + inputs.rank] for tensor in inputs.all(sum(sizes))])


def gather(inputs: Inputs) -> tuple[object, object]:
    places = [inputs.blank() for _ in range(inputs.size)] if inputs.rank == 1 else None
    dist.gather(inputs.of(inputs.rank), places, dst=1)
    return (places, inputs.all()) if inputs.rank == 1 else (None, None)


def scatter(inputs: Inputs) -> tuple[object, object]:
    mine = inputs.blank()
    dist.scatter(mine, inputs.all() if inputs.rank == 1 else None, src=1)
    return mine, inputs.of(inputs.rank)


def ring(inputs: Inputs) -> tuple[object, object]:
    after, before = (inputs.rank + 1) % inputs.size, (inputs.rank - 1) % inputs.size
    sent = dist.isend(inputs.of(inputs.rank), after)
    mine = inputs.blank()
    dist.recv(mine, before)
    assert sent is not None
    sent.wait()
    return mine, inputs.of(before)


def tags_out_of_order(inputs: Inputs) -> tuple[object, object]:
    after, before = (inputs.rank + 1) % inputs.size, (inputs.rank - 1) % inputs.size
    places = [inputs.blank(), inputs.blank()]
    works = [dist.isend(inputs.of(inputs.rank, salt=tag), after, tag=tag) for tag in (1, 2)]
    works += [dist.irecv(places[tag - 1], before, tag=tag) for tag in (2, 1)]
    for work in works:
        assert work is not None
        work.wait()
    return places, [inputs.of(before, salt=1), inputs.of(before, salt=2)]


def many_tags(inputs: Inputs) -> tuple[object, object]:
    """Messages with a new tag each, as a script sends that takes the step's number, leave no threads behind."""
    after, before = (inputs.rank + 1) % inputs.size, (inputs.rank - 1) % inputs.size
    threads, place = threading.active_count(), inputs.blank()
    for tag in range(100, 130):
        work = dist.isend(inputs.of(inputs.rank, salt=tag), after, tag=tag)
        dist.recv(place, before, tag=tag)
        assert work is not None
        work.wait()
    return (place, threading.active_count() < threads + 10), (inputs.of(before, salt=129), True)


def coalesced(inputs: Inputs) -> tuple[object, object]:
    tensors = [inputs.of(inputs.rank, salt=salt) for salt in range(3)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors, [fold(inputs.all(salt=salt), "SUM") for salt in range(3)]


def coalesced_gather(inputs: Inputs) -> tuple[object, object]:
    wholes = [inputs.blank(3 * inputs.size) for _ in range(2)]
    with _coalescing_manager():
        for salt, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, inputs.of(inputs.rank, salt=salt))
    return wholes, [torch.cat(inputs.all(salt=salt)) for salt in range(2)]


def empty(inputs: Inputs) -> tuple[object, object]:
    mine, places = inputs.blank(0), [inputs.blank(0) for _ in range(inputs.size)]
    dist.all_reduce(mine)
    dist.broadcast(mine, 0)
    dist.all_gather(places, mine)
    return [mine, *places], [inputs.blank(0)] * (inputs.size + 1)


def pair(inputs: Inputs) -> tuple[object, object]:
    """Reduce in a group of the last and the first rank."""
    members = [inputs.size - 1, 0]
    group = (
        dist.new_group(members, sort_ranks=False) if "sort_ranks" in dir(dist.new_group) else dist.new_group(members)
    )
    if inputs.rank not in members:
        return None, None
    mine = inputs.of(inputs.rank)
    dist.all_reduce(mine, group=group)
    dist.destroy_process_group(group)
    return mine, fold([inputs.of(rank) for rank in members], "SUM")


def objects(inputs: Inputs) -> tuple[object, object]:
    gathered: list[object] = [None] * inputs.size
    dist.all_gather_object(gathered, {"rank": inputs.rank, "text": "x" * inputs.rank})
    broadcasted = [inputs.rank, "text"]
    dist.broadcast_object_list(broadcasted, 1)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, list(range(inputs.size)) if inputs.rank == 0 else None, 0)
    at_root = [None] * inputs.size if inputs.rank == 0 else None
    dist.gather_object(inputs.rank, at_root, 0)
    dist.barrier()
    expected = [{"rank": rank, "text": "x" * rank} for rank in range(inputs.size)]
    everyone = list(range(inputs.size)) if inputs.rank == 0 else None
    return (gathered, broadcasted, mine, at_root), (expected, [1, "text"], [inputs.rank], everyone)


def cases() -> Iterator[tuple[str, Case, tuple[torch.dtype, ...]]]:
    numbers = (*FLOATS, *INTEGERS)
    for name in ("SUM", "MIN", "MAX", "PRODUCT"):
        yield f"all_reduce {name}", functools.partial(all_reduce, name), numbers
    yield "all_reduce AVG", functools.partial(all_reduce, "AVG"), FLOATS
    for name in ("BAND", "BOR", "BXOR"):
        yield f"all_reduce {name}", functools.partial(all_reduce, name), INTEGERS
    for name in ("MIN", "MAX"):
        yield f"all_reduce {name}", functools.partial(all_reduce, name), (torch.bool,)
    for name in ("SUM", "AVG"):
        yield f"reduce_scatter_single {name}", functools.partial(reduce_scatter_single, name), FLOATS
    for case in (reduce, reduce_scatter, reduce_scatter_uneven, coalesced):
        yield case.__name__, case, numbers
    for case in (broadcast, all_gather, all_gather_uneven, all_gather_single, all_to_all, all_to_all_single):
        yield case.__name__, case, ALL
    for case in (
        all_to_all_single_uneven,
        gather,
        scatter,
        ring,
        tags_out_of_order,
        coalesced_gather,
        empty,
        all_gather_in_place,
    ):
        yield case.__name__, case, ALL
    yield "pair", pair, (torch.float32, torch.bfloat16)
    yield "many_tags", many_tags, (torch.float32,)
    yield "objects", objects, (torch.float32,)


def equal(result: object, expected: object) -> bool:
    if isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor):
        return result.dtype == expected.dtype and torch.equal(result, expected)
    if isinstance(result, list | tuple) and isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(map(equal, result, expected))
    return result == expected


COPIED_FOR_GLOO = ("all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter", "pair")
"""Operations of the backend gloo that copy tensors that are not contiguous; others depend on torch's version."""


def gloo_refuses(name: str, dtype: torch.dtype, layout: str) -> bool:
    """Return whether torch's own gloo raises an error in this case, or may do so."""
    is_copied = name.split()[0] in COPIED_FOR_GLOO
    return (
        dtype == torch.int16 or name in ("all_gather_uneven", "all_to_all") or (layout == "strided" and not is_copied)
    )


def run(backend: str) -> dict[str, str]:
    results = {}
    for name, case, dtypes in cases():
        for dtype in dtypes:
            for layout in ("dense", "strided"):
                if backend == "gloo" and gloo_refuses(name, dtype, layout):
                    continue
                try:
                    result, expected = case(Inputs(dtype, layout == "strided"))
                    outcome = "ok" if equal(result, expected) else f"{result} instead of {expected}"
                except Exception as error:
                    outcome = repr(error)
                results[f"{name} {str(dtype).removeprefix('torch.')} {layout}"] = outcome
    return results


if __name__ == "__main__":
    become_rank()
    # Variables that pretend another placement of the ranks.
    os.environ.update(dict(word.split("=") for word in sys.argv[3:]))
    torch.set_num_threads(1)
    comm.start(sys.argv[1], timeout_seconds=60)
    found = run(sys.argv[1])
    if dist.get_world_size() == 2 and len(sys.argv) == 3:
        found["crowd"] = "; ".join(crowd.find_faults(5)) or "ok"
        arguments.run_all(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
