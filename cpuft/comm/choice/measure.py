"""Time collectives over the backends, in turn, between the ranks of this job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from cpuft.comm.choice.choosing import MESSAGE_BYTES, Choice, choose_backend
from cpuft.comm.group.registration import BACKENDS, start
from cpuft.config import Turn
from cpuft.errors import CpuftError
from cpuft.record import Measurement

_TURN_SECONDS = 3.0
_CHOICE_ROUNDS = 3
"""A busy moment of the hosts lasts seconds: backends measured in turn share it."""


def repetitions(nbytes: int, budget_bytes: int = 512 * 2**20) -> int:
    """How often to repeat: 5 to 50 times, about half a gibibyte in all."""
    return max(5, min(50, budget_bytes // max(1, nbytes)))


def fit_repetitions(wanted: int, seconds: float) -> int:
    """How often to repeat what took so long once: over a slow link five times, a turn being three seconds."""
    return min(wanted, max(5, int(_TURN_SECONDS / max(seconds, 1e-9))))


def measure(backend: str, operation: str, dtype: str, nbytes: int, repeat: int) -> Measurement:
    """Time an operation of the current default group. All ranks call it together and get the same result."""
    call = _operation(operation, getattr(torch, dtype), nbytes)
    call()
    begun = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    repeat = fit_repetitions(repeat, float(took))
    for _ in range(repeat // 5 - 2):
        call()
    found = torch.empty((2, repeat), dtype=torch.float64)
    cores = len(os.sched_getaffinity(0))
    for at in range(repeat):
        dist.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        call()
        seconds = time.perf_counter() - begun
        found[:, at] = torch.tensor([seconds, min(1.0, (time.process_time() - worked) / seconds / cores)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    seconds_of_all, busy = (tuple(row) for row in found.tolist())
    return Measurement(backend, operation, dtype, nbytes, dist.get_world_size(), seconds_of_all, busy)


def _operation(name: str, dtype: torch.dtype, nbytes: int) -> Callable[[], object]:
    size = dist.get_world_size()
    part = max(1, nbytes // dtype.itemsize // size)
    whole, piece = torch.zeros(part * size, dtype=dtype), torch.zeros(part, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[name]


def measure_turns(
    store: Store,
    rank: int,
    size: int,
    plan: Sequence[Turn],
    timeout_seconds: float,
    choices: Mapping[tuple[str, int], Choice] | None = None,
) -> Iterator[Measurement]:
    """Measure each turn; a new process group whenever the backend changes.

    A backend that is missing on any rank is left out on all. `auto` stands for what `choices` says of a type and size,
    and is measured in a turn of its own, as `auto:mpi`, say.
    """
    current, usable = "", False
    for at, (backend, operation, dtype, nbytes) in enumerate(plan):
        real = choices[dtype, nbytes].backend if backend == "auto" and choices else backend
        if real != current or backend == "auto":
            _leave()
            current, usable = real, _enter(real, store, rank, size, f"turn {at}", timeout_seconds)
        if usable:
            label = backend if real == backend else f"{backend}:{real}"
            yield measure(label, operation, dtype, nbytes, repetitions(nbytes))
    _leave()


def _enter(backend: str, store: Store, rank: int, size: int, prefix: str, timeout_seconds: float) -> bool:
    """Make the default group, if all ranks can; whether they could."""
    store = PrefixStore(prefix, store)
    complaint = BACKENDS[backend].complaint()
    if not _agree(backend, PrefixStore("has", store), rank, size, complaint):
        return False
    try:
        start(backend, timeout_seconds, PrefixStore("group", store), rank, size)
    except (RuntimeError, CpuftError) as error:
        complaint = str(error).splitlines()[0]
    if _agree(backend, PrefixStore("starts", store), rank, size, complaint):
        return True
    if dist.is_initialized():
        dist.destroy_process_group()
    return False


def _agree(backend: str, store: Store, rank: int, size: int, complaint: str) -> bool:
    """Whether no rank complains; rank 0 says who does."""
    store.set(str(rank), complaint)
    complaints = [store.get(str(other)).decode() for other in range(size)]
    for other, text in enumerate(complaints):
        if text and rank == 0:
            print(f"cpuft comm: leaving out {backend}: rank {other}: {text}", file=sys.stderr)
    return not any(complaints)


def _leave() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def choose(
    store: Store, rank: int, size: int, nbytes: int = MESSAGE_BYTES, dtype: str = "float32", timeout: float = 60.0
) -> Choice:
    """A short measured choice: all-reduces of one message over each backend, in turn. The same on all ranks.

    To be called before the default group is made, with a store that all ranks share, once for each size and type.
    Takes a few seconds, over a slow link more. The process must end with `cpuft.comm.leave`.
    """
    if size == 1:
        return Choice("gloo", "one rank has nobody to send to")
    timings: dict[str, list[tuple[float, float]]] = {}
    plan = [(backend, "all_reduce", dtype, nbytes) for _ in range(_CHOICE_ROUNDS) for backend in BACKENDS]
    for found in measure_turns(PrefixStore(f"choice {dtype} {nbytes}", store), rank, size, plan, timeout):
        timings.setdefault(found.backend, []).extend(zip(found.seconds, found.busy, strict=True))
    return choose_backend(timings, nbytes)
