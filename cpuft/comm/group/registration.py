"""How torch finds the backends."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import Backend

from cpuft.comm.backends import ccl, mpi
from cpuft.comm.backends.ccl import CclCollectives
from cpuft.comm.backends.gloo import WatchedGloo, connect_gloo
from cpuft.comm.backends.mpi import MpiCollectives
from cpuft.comm.group.collectives import Collectives
from cpuft.comm.group.process_group import CollectiveGroup
from cpuft.comm.group.queued import Membership
from cpuft.comm.group.session import open_watch, register, timeout_seconds
from cpuft.comm.group.subgroups import SubgroupCollectives
from cpuft.errors import CpuftError, near_names
from cpuft.rank.script import listen_narrowly


@dataclass(frozen=True)
class Kind:
    """A backend by cpuft's name."""

    torch_name: str
    """torch keeps the name mpi for a library compiled into it, and gloo for its own without a watchdog."""
    load: Callable[[], object]
    """Loads what the backend needs; CpuftError when something is missing."""

    def complaint(self) -> str:
        """Why the backend cannot be used in this process; empty when it can. May load libraries."""
        try:
            self.load()
        except CpuftError as error:
            return str(error)
        return ""


BACKENDS = {"gloo": Kind("cpuft_gloo", lambda: None), "mpi": Kind("mpi4py", mpi.load), "ccl": Kind("ccl", ccl.load)}

Connect = Callable[[Store, int, int, str], Collectives]


def register_backends() -> None:
    """Make the backends known to torch.distributed, and its stores modest. Doing it again changes nothing."""
    # By its name: torch.distributed has a function of that name, too.
    listen_narrowly(importlib.import_module("torch.distributed.rendezvous"))
    libraries: dict[str, Connect] = {"ccl": CclCollectives, "mpi": MpiCollectives}
    for name, connect in libraries.items():
        creator = functools.partial(_make_group, connect)
        Backend.register_backend(BACKENDS[name].torch_name, creator, extended_api=True, devices=["cpu"])
    Backend.register_backend(BACKENDS["gloo"].torch_name, _make_gloo, extended_api=True, devices=["cpu"])
    if not dist.is_mpi_available() and Backend("mpi") == Backend.MPI:
        _redirect_mpi(Backend.__new__)


def _redirect_mpi(original: Callable[..., str]) -> None:
    """Let "mpi" mean ours where torch has none of its own.

    torch compares the parsed name with its own before it looks at registered ones, so the parser is what must differ.
    """

    def parse(cls: type[Backend], name: str) -> str:
        parsed = original(cls, name)
        return BACKENDS["mpi"].torch_name if parsed == "mpi" else parsed

    Backend.__new__ = parse  # type: ignore[method-assign]


def start(
    backend: str, timeout_seconds: float | None = None, store: Store | None = None, rank: int = -1, world_size: int = -1
) -> None:
    """`init_process_group` with one of cpuft's backends by its own name; all three watch their deadlines.

    Parameters
    ----------
    backend: ccl, mpi or gloo.
    timeout_seconds: what a collective may take; torch's 30 minutes if not given.
    store, rank, world_size: given together, they stand for the environment's (RANK, WORLD_SIZE, MASTER_ADDR ...).

    Raises CpuftError: no such backend, or what it needs is missing.
    """
    if backend not in BACKENDS:
        raise CpuftError(f"no backend {backend}: {near_names(backend, BACKENDS)}")
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else None
    dist.init_process_group(
        BACKENDS[backend].torch_name, timeout=timeout, store=store, rank=rank, world_size=world_size
    )


def _membership(options: Any) -> Membership:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return Membership(
        label="the world" if not options.global_ranks_in_group else f"group {options.group_id}",
        rank=options.group_rank,
        ranks=ranks,
        is_world=not options.global_ranks_in_group,
    )


def _make_group(connect: Connect, options: Any, _: Any) -> CollectiveGroup:
    member = _membership(options)
    if connect is CclCollectives and not member.is_world:
        connect = SubgroupCollectives
    timeout = timeout_seconds(options.timeout)
    watch = open_watch(options.store, member.rank, member.ranks)
    operation = register.begin(f"{member.label} from nothing", "connect", 0, member.ranks, timeout)
    try:
        library = connect(options.store, member.rank, member.size, member.label)
    finally:
        register.end(operation)
    return CollectiveGroup(library, member, timeout, register, watch)


def _make_gloo(options: Any, _: Any) -> WatchedGloo:
    member = _membership(options)
    timeout = timeout_seconds(options.timeout)
    watch = open_watch(options.store, member.rank, member.ranks)
    gloo = connect_gloo(options.store, member.rank, member.size, timeout)
    return WatchedGloo(gloo, options.store, member, timeout, register, watch)
