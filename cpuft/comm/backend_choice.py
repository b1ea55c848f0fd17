"""Choice of the fastest backend between the ranks of a job: measured once, and cached for later runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from cpuft.comm.collective_timing import count_repetitions, measure_collective
from cpuft.comm.registration import BACKENDS, start
from cpuft.compressions import TIE_RATIO
from cpuft.config.bench import BenchCase
from cpuft.errors import CpuftError
from cpuft.files import hash_text, write_text
from cpuft.record import Measurement
from cpuft.serialization import load, parse_json

MESSAGE_BYTES = 2**20
"""Size of the message with which backends are compared: about a compressed bucket, and short enough for a slow link."""
PREFERENCE = ("gloo", "mpi", "ccl")
"""Which of equally fast backends is chosen, the first one. gloo comes with torch; ccl has threads of its own."""

_ROUNDS = 3
"""Backends are measured in turns, so that a few seconds of other load on the hosts affect all of them."""
_PACKAGES = ("torch", "impi-rt", "mpich", "oneccl-cpu", "mpi4py")

Timings = Mapping[str, Sequence[tuple[float, float]]]
"""Backend -> for each all-reduce, the seconds of the slowest rank and the CPU share (0 to 1) of the busiest rank."""


@dataclass(frozen=True)
class Choice:
    """A backend (a name of --backend, such as gloo), and the reason for it in one line."""

    backend: str
    reason: str


def choose_backend(timings: Timings, nbytes: int) -> Choice:
    """Return the backend with the least median seconds * (1 + median CPU share), of those within 2 % the first of gloo,
    mpi and ccl, with the medians of all as the reason. `timings` has pairs of seconds and CPU share (0 to 1) by
    backend. CpuftError: it is empty.
    """
    if not timings:
        error = CpuftError("no backend could be measured: run `cpuft doctor`, or give a backend with --backend gloo")
        error.exit_code = 1  # gloo always works, unless another program wrote to the store: the next start may succeed
        raise error
    seconds = {name: statistics.median(second for second, _ in found) for name, found in timings.items()}
    busy = {name: statistics.median(share for _, share in found) for name, found in timings.items()}
    # A backend that spins slows the backward pass beside it: over 1 Gbit/s with one core per rank, mpi's 198 ms cost
    # 126 ms of computing, and gloo's 200 ms cost 84 ms.
    costs = {name: seconds[name] * (1 + busy[name]) for name in timings}
    equal = [name for name, cost in costs.items() if cost <= TIE_RATIO * min(costs.values())]
    chosen = min(equal, key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    figures = ", ".join(f"{name} {seconds[name] * 1e3:.2f} ms ({busy[name]:.0%} busy)" for name in sorted(timings))
    return Choice(chosen, f"all-reduce of {nbytes / 2**20:.3g} MiB takes {figures}")


def cache_key(hosts: Sequence[str], ranks: int, versions: Mapping[str, str]) -> str:
    """Return the key of a cached choice, 16 hexadecimal digits; the order of `hosts` and `versions` plays no role."""
    return hash_text(json.dumps([sorted(hosts), ranks, sorted(versions.items())]), 16)


def read_choice(folder: Path, key: str) -> Choice | None:
    """Return the choice cached in `folder/backend-KEY.json`; None if that is missing, unreadable or not valid."""
    with contextlib.suppress(OSError, ValueError):
        return load(Choice, parse_json((folder / f"backend-{key}.json").read_text()))
    return None


def write_choice(folder: Path, key: str, choice: Choice) -> None:
    """Write a choice to `folder/backend-KEY.json`, atomically, and make the folder. OSError: it cannot be written."""
    write_text(folder / f"backend-{key}.json", json.dumps(vars(choice)) + "\n")


def select_backend(store: Store, rank: int, size: int, cache: Path, dtype: str = "float32") -> Choice:
    """Return the backend that `--backend auto` means on these hosts, the same on all ranks.

    It comes from rank 0's cache for these hosts and interfaces, or is measured within some seconds. `dtype` is the type
    in which gradients are sent: not every library sums 16-bit floats quickly. All ranks must call this together, before
    they make the default process group, and the process must end with `exit_process`. Raises CpuftError if no backend
    could be measured.
    """
    store = PrefixStore("automatic", store)
    store.set(f"host/{rank}", f"{socket.gethostname()} {os.environ.get('GLOO_SOCKET_IFNAME', '')}")
    hosts = [store.get(f"host/{other}").decode() for other in range(size)]
    key = cache_key(hosts, size, _read_versions() | {"type": dtype, "bytes": str(MESSAGE_BYTES)})
    if rank == 0:
        cached = read_choice(cache, key)
        store.set("remembered", json.dumps(cached and [cached.backend, cached.reason]))
    found = json.loads(store.get("remembered"))
    if found:
        return Choice(found[0], f"{found[1]}, as measured earlier")
    choice = measure_backends(store, rank, size, dtype=dtype)
    if rank == 0:
        with contextlib.suppress(OSError, CpuftError):  # a full disk, for example; then the next run measures again
            write_choice(cache, key, choice)
    return choice


def _read_versions() -> dict[str, str]:
    found = dict.fromkeys(_PACKAGES, "")
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def measure_backends(
    store: Store,
    rank: int,
    size: int,
    nbytes: int = MESSAGE_BYTES,
    dtype: str = "float32",
    timeout_seconds: float = 60.0,
) -> Choice:
    """Measure all-reduces of one message over each backend in turn, and return the choice, the same on all ranks.

    All ranks must call this together, before they make the default process group, and once for each size and type. The
    process must end with `exit_process`. A single rank gets gloo. CpuftError: no backend could be measured.
    """
    if size == 1:
        return Choice("gloo", "a single rank does not communicate")
    timings: dict[str, list[tuple[float, float]]] = {}
    plan = [(backend, "all_reduce", dtype, nbytes) for _ in range(_ROUNDS) for backend in BACKENDS]
    for found in measure_turns(PrefixStore(f"choice {dtype} {nbytes}", store), rank, size, plan, timeout_seconds):
        timings.setdefault(found.backend, []).extend(zip(found.seconds, found.busy, strict=True))
    return choose_backend(timings, nbytes)


def measure_turns(
    store: Store,
    rank: int,
    size: int,
    plan: Sequence[BenchCase],
    timeout_seconds: float,
    choices: Mapping[tuple[str, int], Choice] | None = None,
) -> Iterator[Measurement]:
    """Measure each (backend, operation, type, bytes) of `plan`; yield a measurement for each, the same on all ranks.

    A backend that cannot be used on one of the ranks is left out: rank 0 prints why, without `choices` only if another
    rank can use it, because not all packages need be installed. All ranks must iterate to the end together, without a
    default process group. `choices` has what `auto` stands for, by type and bytes; a measurement of `auto` has a name
    like `auto:mpi`. An operation that is not done after `timeout_seconds` ends the process with code 75.
    """
    current, left_out = "", set[str]()
    for number, (backend, operation, dtype, nbytes) in enumerate(plan):
        actual = choices[dtype, nbytes].backend if backend == "auto" and choices else backend
        if actual in left_out:
            continue
        if actual != current or backend == "auto":
            _destroy_group()
            current = actual
            if not _make_group(actual, store, rank, size, f"turn {number}", timeout_seconds, choices is not None):
                left_out.add(actual)
                continue
        label = backend if actual == backend else f"{backend}:{actual}"
        yield measure_collective(label, operation, dtype, nbytes, count_repetitions(nbytes))
    _destroy_group()


def _make_group(
    backend: str, store: Store, rank: int, size: int, prefix: str, timeout_seconds: float, is_wanted: bool
) -> bool:
    store = PrefixStore(prefix, store)
    problem = BACKENDS[backend].find_problem()
    if not _has_no_problem(backend, PrefixStore("has", store), rank, size, problem, is_wanted):
        return False
    try:
        start(backend, timeout_seconds, PrefixStore("group", store), rank, size, compares_calls=False)
    except (RuntimeError, CpuftError) as error:
        problem = str(error).splitlines()[0]
    if _has_no_problem(backend, PrefixStore("starts", store), rank, size, problem):
        return True
    if dist.is_initialized():
        dist.destroy_process_group()
    return False


def _has_no_problem(backend: str, store: Store, rank: int, size: int, problem: str, tells_if_all: bool = True) -> bool:
    """Return whether no rank has a problem with the backend. Rank 0 prints each different problem once, or nothing if
    all ranks have one and not `tells_if_all`.
    """
    store.set(str(rank), problem)
    problems = [store.get(str(other)).decode() for other in range(size)]
    for text in dict.fromkeys(filter(None, problems)) if rank == 0 and (tells_if_all or not all(problems)) else ():
        print(f"cpuft comm: leaving out {backend}: rank {problems.index(text)}: {text}", file=sys.stderr)
    return not any(problems)


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
