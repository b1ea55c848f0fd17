"""The table of backends, their registration with torch.distributed, and the start and end of communication."""

from __future__ import annotations

import atexit
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cpuft.comm.backends import ccl, mpi
from cpuft.comm.backends.base import GroupMembership
from cpuft.comm.backends.gloo import WatchedGlooGroup
from cpuft.comm.process_group import CollectiveGroup
from cpuft.comm.watchdog import TIMEOUT_VARIABLE
from cpuft.comm.watched_group import WatchedGroup
from cpuft.errors import CpuftError, suggest_names
from cpuft.rank.process import remove_shared_memory
from cpuft.rank.script import flush_and_exit, restrict_stores
from cpuft.serialization import to_number


@dataclass(frozen=True)
class BackendEntry:
    """A value of --backend: how torch finds the backend, and what makes its process groups."""

    torch_name: str
    """Name in torch.distributed; torch keeps "mpi" for a library compiled into it, and "gloo" for its own backend."""
    make_group: Callable[[GroupMembership, Store, float], dist.ProcessGroup]
    """Takes the membership, a store of all members, and the timeout in seconds. All members call it together."""
    load: Callable[[], object] = lambda: None
    """Loads the libraries that the backend needs. Raises CpuftError if one is missing."""

    def find_problem(self) -> str:
        """Load the libraries that the backend needs; return "", or the text of the CpuftError if that fails."""
        try:
            self.load()
        except CpuftError as error:
            return str(error)
        return ""


def _make_ccl_group(membership: GroupMembership, store: Store, timeout: float) -> dist.ProcessGroup:
    """Make a group over oneCCL, but only one of all ranks: subgroups communicate over gloo.

    oneCCL 2021.16 sometimes hangs inside its own key-value store when a process makes a second communicator (4 of 24
    starts of 4 ranks; the stack ends in the read of the key-value store). Gradients use the group of all ranks.
    """
    if membership.is_world:
        return CollectiveGroup(ccl.CclBackend, membership, store, timeout)
    return WatchedGlooGroup(membership, store, timeout)


BACKENDS = {
    "gloo": BackendEntry("cpuft_gloo", WatchedGlooGroup),
    "mpi": BackendEntry("mpi4py", functools.partial(CollectiveGroup, mpi.MpiBackend), mpi.load),
    "ccl": BackendEntry("ccl", _make_ccl_group, ccl.load),
}


def register_backends() -> None:
    """Register all backends with torch.distributed for CPU tensors; `import cpuft.comm` does this.

    It also lets torch's stores listen on their own address only, instead of on all interfaces. If torch was built
    without MPI, the backend name "mpi" means cpuft's from then on.
    """
    # Imported by its name, because torch.distributed also has a function of that name.
    restrict_stores(importlib.import_module("torch.distributed.rendezvous"))
    for entry in BACKENDS.values():
        creator = functools.partial(_make_group, entry)
        dist.Backend.register_backend(entry.torch_name, creator, extended_api=True, devices=["cpu"])
    _redirect_timeouts(importlib.import_module("torch.distributed.distributed_c10d"))
    if not dist.is_mpi_available():
        _redirect_mpi(dist.Backend.__new__)


def _make_group(entry: BackendEntry, options: Any, _: Any) -> dist.ProcessGroup:
    is_world = not options.global_ranks_in_group
    label = "the world" if is_world else f"group {options.group_id}"
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    timeout = choose_timeout(options.timeout.total_seconds())
    return entry.make_group(GroupMembership(label, options.group_rank, ranks, is_world), options.store, timeout)


def choose_timeout(default_seconds: float) -> float:
    """Return the seconds of CPUFT_COMM_TIMEOUT, else (not set or empty) the default. CpuftError: no positive number."""
    if not (text := os.environ.get(TIMEOUT_VARIABLE, "")):
        return default_seconds
    seconds = to_number(text)
    if not 0 < seconds < math.inf:
        raise CpuftError(f"{TIMEOUT_VARIABLE}={text} is not a positive number of seconds: unset it, or set it to 300")
    return seconds


def _redirect_mpi(original: Callable[..., str]) -> None:
    """Let the backend name "mpi" mean cpuft's backend if torch was built without MPI, and `get_backend` return "mpi".

    torch compares a parsed name with its own names before it looks at registered ones, so its functions that make
    groups must see the registered one. Scripts must not: they compare `get_backend()` with "mpi".
    """

    def parse(cls: type[dist.Backend], name: str) -> str:
        parsed, caller = original(cls, name), sys._getframe(1)
        if parsed not in ("mpi", BACKENDS["mpi"].torch_name):
            return parsed
        is_asked_by_torch = caller.f_globals["__name__"] == dist.get_backend.__module__
        return BACKENDS["mpi"].torch_name if is_asked_by_torch and caller.f_code.co_name != "get_backend" else "mpi"

    dist.Backend.__new__ = parse  # type: ignore[method-assign]


def _redirect_timeouts(torch_module: Any) -> None:
    """Let torch's `_set_pg_timeout` set the timeout of cpuft's groups, for which it would only warn."""
    original = torch_module._set_pg_timeout

    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        chosen = group or dist.group.WORLD
        if isinstance(chosen, WatchedGroup):
            chosen.set_timeout(timeout)
        else:
            original(timeout, group)

    torch_module._set_pg_timeout = set_pg_timeout


def start(
    backend: str,
    timeout_seconds: float | None = None,
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    compares_calls: bool = True,
) -> None:
    """Make torch's default process group with a backend of cpuft. Blocks until all ranks have called this.

    A watchdog then enforces the timeout, by default (None or 0) torch's 30 minutes; CPUFT_COMM_TIMEOUT takes
    precedence. Without `store`, `rank` and `world_size`, torch's environment variables tell them. With
    `compares_calls`, the ranks compare their calls before each collective of ccl and mpi, by a short message.

    Raises CpuftError if there is no such backend, a library is missing or fails to start, or this rank cannot join rank
    0 within 60 s; OSError if rank 0 cannot listen on its own address; ValueError if there is a default process group
    already, or no environment variables; RuntimeError if a library fails, or ranks do not come.
    """
    if backend not in BACKENDS:
        raise CpuftError(f"there is no backend {backend}: {suggest_names(backend, BACKENDS)}")
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else None
    dist.init_process_group(
        BACKENDS[backend].torch_name, timeout=timeout, store=store, rank=rank, world_size=world_size
    )
    if isinstance(dist.group.WORLD, CollectiveGroup):
        dist.group.WORLD.compares_calls = compares_calls


def exit_process(code: int) -> NoReturn:
    """End the process with an exit code, after Python's exit handlers but without those of C; its files in shared
    memory are removed.
    """
    # oneCCL and Intel MPI both use libfabric, whose shm provider (that of impi-rt 2021.18) otherwise frees its
    # endpoints twice at exit in a process that has used both, and aborts, whatever the exit code should be.
    atexit._run_exitfuncs()
    remove_shared_memory(os.getpid())
    flush_and_exit(code)
