"""Measure the backends on the hosts of this job: `mpirun ... python -m cpuft.comm.bench comm.jsonl`.

Bandwidths are nccl-tests' (doc/PERFORMANCE.md): algorithm bandwidth is bytes a rank holds over time; bus bandwidth
multiplies it by 2(n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter of n ranks, 1 for broadcast, so that
it compares with the link's own speed whatever n. Of all_gather and reduce_scatter the bytes are the whole's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from cpuft.arguments import parse_arguments
from cpuft.comm.choice import GRADIENT_BYTES, Choice, choose_backend
from cpuft.comm.registration import BACKENDS, start
from cpuft.comm.session import leave
from cpuft.config import BenchConfig
from cpuft.errors import CpuftError, near_names

TYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
FORMAT = "cpuft-comm-bench-1"


@dataclass(frozen=True)
class Measurement:
    """One operation on one message."""

    backend: str
    operation: str
    dtype: str
    nbytes: int
    """Of the whole message, as nccl-tests count it."""
    ranks: int
    seconds: tuple[float, ...]
    """Each repetition; of the slowest rank; warm-up left out."""

    @property
    def median_seconds(self) -> float:
        """The middle repetition."""
        return statistics.median(self.seconds)

    @property
    def algorithm_bytes_per_second(self) -> float:
        """Message bytes over time."""
        return self.nbytes / self.median_seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """What the busiest link carries."""
        return self.algorithm_bytes_per_second * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """nccl-tests' factor from algorithm to bus bandwidth."""
    shares = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return shares[operation] * (ranks - 1) / ranks if operation in shares else 1.0


def repetitions(nbytes: int, budget_bytes: int = 512 * 2**20) -> int:
    """How often to repeat: 5 to 50 times, about half a gibibyte in all."""
    return max(5, min(50, budget_bytes // max(1, nbytes)))


def measure(backend: str, operation: str, dtype: str, nbytes: int, repeat: int) -> Measurement:
    """Time an operation of the current default group. All ranks call it together and get the same result."""
    call = _operation(operation, getattr(torch, dtype), nbytes)
    for _ in range(max(2, repeat // 5)):
        call()
    seconds = torch.empty(repeat, dtype=torch.float64)
    for at in range(repeat):
        dist.barrier()
        begun = time.perf_counter()
        call()
        seconds[at] = time.perf_counter() - begun
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return Measurement(backend, operation, dtype, nbytes, dist.get_world_size(), tuple(seconds.tolist()))


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


def sweep(
    store: Store, rank: int, size: int, plan: Sequence[tuple[str, str, str, int]], timeout_seconds: float
) -> Iterator[Measurement]:
    """Measure (backend, operation, dtype, bytes) in turn; a new process group whenever the backend changes.

    A backend that is missing on any rank is left out on all.
    """
    current, usable = "", False
    for at, (backend, operation, dtype, nbytes) in enumerate(plan):
        if backend != current:
            _leave()
            current, usable = backend, _enter(backend, store, rank, size, f"sweep {at}", timeout_seconds)
        if usable:
            yield measure(backend, operation, dtype, nbytes, repetitions(nbytes))
    _leave()


def _enter(backend: str, store: Store, rank: int, size: int, prefix: str, timeout_seconds: float) -> bool:
    complaint = BACKENDS[backend].complaint()
    store.set(f"{prefix}/{rank}", complaint)
    complaints = [store.get(f"{prefix}/{other}").decode() for other in range(size)]
    for other, text in enumerate(complaints):
        if text and rank == 0:
            print(f"cpuft comm: leaving out {backend}: rank {other}: {text}", file=sys.stderr)
    if any(complaints):
        return False
    start(backend, timeout_seconds, PrefixStore(prefix, store), rank, size)
    return True


def _leave() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def choose(
    store: Store, rank: int, size: int, nbytes: int = GRADIENT_BYTES, dtype: str = "float32", timeout: float = 60.0
) -> Choice:
    """A short measured choice: all-reduces of one message over each backend, twice in turn. The same on all ranks.

    To be called before the default group is made, with a store that all ranks share. Takes a few seconds. The process
    must end with `cpuft.comm.leave`.
    """
    if size == 1:
        return Choice("gloo", "one rank has nobody to send to")
    timings: dict[str, dict[int, list[float]]] = {}
    plan = [(backend, "all_reduce", dtype, nbytes) for _ in range(2) for backend in BACKENDS]
    for found in sweep(store, rank, size, plan, timeout):
        timings.setdefault(found.backend, {}).setdefault(found.nbytes, []).extend(found.seconds)
    return choose_backend(timings, nbytes)


def format_table(measurements: Sequence[Measurement]) -> str:
    """The measurements as aligned text."""
    lines = [f"{'operation':14} {'type':9} {'bytes':>11} {'backend':8} {'ms':>10} {'alg GB/s':>9} {'bus GB/s':>9}"]
    for found in sorted(measurements, key=lambda one: (one.operation, one.dtype, one.nbytes, one.median_seconds)):
        rates = f"{found.algorithm_bytes_per_second / 1e9:9.3f} {found.bus_bytes_per_second / 1e9:9.3f}"
        place = f"{found.operation:14} {found.dtype:9} {found.nbytes:11} {found.backend:8}"
        lines.append(f"{place} {found.median_seconds * 1e3:10.3f} {rates}")
    return "\n".join(lines)


def format_record(measurements: Sequence[Measurement]) -> str:
    """JSON lines: a header, then one measurement a line."""
    header = {"format": FORMAT, "torch": torch.__version__}
    rows = [
        dataclasses.asdict(found)
        | {
            "algorithm_bytes_per_second": found.algorithm_bytes_per_second,
            "bus_bytes_per_second": found.bus_bytes_per_second,
        }
        for found in measurements
    ]
    return "".join(json.dumps(row) + "\n" for row in [header, *rows])


def plan_sweep(config: BenchConfig) -> list[tuple[str, str, str, int]]:
    """Backend, operation, type and bytes of each measurement, in turn.

    Raises
    ------
    CpuftError: an unknown name, or a size that is no number.
    """
    lists = {name: getattr(config, name).split(",") for name in ("backends", "operations", "dtypes", "sizes")}
    known = {"backends": tuple(BACKENDS), "operations": OPERATIONS, "dtypes": TYPES}
    for kind, names in known.items():
        for name in lists[kind]:
            if name not in names:
                raise CpuftError(f"--{kind} knows no {name!r}: {near_names(name, names)}")
    if not all(size.isdecimal() and int(size) for size in lists["sizes"]):
        raise CpuftError(f"--sizes {config.sizes} is no list of bytes: write e.g. 1024,26214400")
    turns = itertools.product(range(config.rounds), *(lists[name] for name in lists))
    return [(backend, operation, dtype, int(size)) for _, backend, operation, dtype, size in turns]


def main() -> None:
    """Run the sweep as one rank of a job; rank 0 prints the table and writes the record."""
    output, config = Path(sys.argv[1]), parse_arguments(BenchConfig, sys.argv[2:])
    store, rank, size = next(rendezvous("env://"))
    found = list(sweep(store, rank, size, plan_sweep(config), config.comm_timeout))
    if rank == 0:
        print(format_table(found))
        beside = output.with_suffix(".tmp")
        beside.write_text(format_record(found))
        beside.rename(output)


if __name__ == "__main__":
    try:
        main()
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        leave(2)
    leave(0)
