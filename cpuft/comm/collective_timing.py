"""How long a collective of the default process group takes, and how busy it keeps the CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from cpuft.comm.collectives import gather_single, scatter_single
from cpuft.rank.world import list_allowed_cpus
from cpuft.record import Measurement

_TURN_SECONDS = 3.0


def measure_collective(backend: str, operation: str, dtype: str, nbytes: int, repeat: int) -> Measurement:
    """Measure "all_reduce", "all_gather", "reduce_scatter" or "broadcast" of the default process group, together on all
    ranks, which get the same result.

    For each repetition, the result has the seconds of the slowest rank, and the CPU share (0 to 1 of the cores that it
    may use) of the busiest rank. There are `repeat` repetitions, or fewer, but at least 5, if they would take more than
    3 s. `backend` is only a name, `dtype` is a name in torch ("float32"), and `nbytes` are those of the whole message.
    """
    call = _make_operation(operation, getattr(torch, dtype), nbytes)
    call()
    started = time.perf_counter()
    call()
    duration = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(duration, op=dist.ReduceOp.MAX)
    repeat = limit_repetitions(repeat, float(duration))
    for _ in range(repeat // 5 - 2):
        call()
    found = torch.empty((2, repeat), dtype=torch.float64)
    cores = len(list_allowed_cpus())
    for repetition in range(repeat):
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        call()
        seconds = time.perf_counter() - started
        found[:, repetition] = torch.tensor([seconds, min(1.0, (time.process_time() - cpu_started) / seconds / cores)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    slowest, busiest = (tuple(values) for values in found.tolist())
    return Measurement(backend, operation, dtype, nbytes, dist.get_world_size(), slowest, busiest)


def count_repetitions(nbytes: int, budget_bytes: int = 512 * 2**20) -> int:
    """Return how often to repeat an operation: `budget_bytes / nbytes`, rounded down, but at least 5 and at most 50."""
    return max(5, min(50, budget_bytes // max(1, nbytes)))


def limit_repetitions(wanted: int, seconds: float) -> int:
    """Return `wanted`, or fewer, but at least 5, if the repetitions of `seconds` each would take more than 3 s."""
    return min(wanted, max(5, int(_TURN_SECONDS / max(seconds, 1e-9))))


def _make_operation(name: str, dtype: torch.dtype, nbytes: int) -> Callable[[], object]:
    size = dist.get_world_size()
    length = max(1, nbytes // dtype.itemsize // size)
    whole, part = torch.zeros(length * size, dtype=dtype), torch.zeros(length, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather_single(whole, part),
        "reduce_scatter": lambda: scatter_single(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[name]
