"""How the ranks of a run join a process group, gather values, and check that they form one job with equal weights."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from cpuft.comm import start
from cpuft.comm.backend_choice import Choice, select_backend
from cpuft.errors import CpuftError
from cpuft.files import cache_folder
from cpuft.rank.script import keep_forever
from cpuft.rank.world import World, list_allowed_cpus
from cpuft.record import RecordedRank


@contextmanager
def join_process_group(
    world: World, backend: str, timeout_seconds: float, gradient_type: str = "float32", earlier: Choice | None = None
) -> Iterator[Choice]:
    """Form torch's default process group with the other ranks, at MASTER_ADDR and MASTER_PORT, in this context.

    A collective may take `timeout_seconds`, and ranks wait as long for rank 0. The `backend` is gloo, mpi, ccl, or
    auto: what was chosen `earlier`, the same on all ranks, or the fastest of them here, measured once with gradients of
    torch's `gradient_type` and then read from rank 0's cache folder. Yields the backend, and why it was chosen. Raises
    CpuftError: the address is not set, or the backend cannot be used; RuntimeError, by torch: rank 0 cannot be reached,
    or its port is taken.
    """
    store, rank, size = _open_store(world, timeout_seconds), world.rank, world.size
    choice = Choice(backend, "as you asked")
    if backend == "auto":
        choice = Choice("gloo", "a single rank does not communicate")
        if size > 1:
            # Only rank 0 caches the choice, so that other hosts need no home folder.
            cache = Path() if rank else cache_folder(os.environ)
            choice = earlier or select_backend(store, rank, size, cache, gradient_type)
    start(choice.backend, timeout_seconds, PrefixStore("world", store), rank, size, compares_calls=False)
    keep_forever(dist.group.WORLD)
    try:
        yield choice
    finally:
        dist.destroy_process_group()


def _open_store(world: World, timeout_seconds: float) -> Store:
    if world.size == 1:
        return HashStore()
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise CpuftError(
            f"rank {world.rank} does not know where rank 0 is: export MASTER_ADDR and MASTER_PORT, or use cpuft launch"
        )
    timeout = timedelta(seconds=timeout_seconds)
    store: Store = next(rendezvous("env://", world.rank, world.size, timeout=timeout))[0]
    return store


def gather(value: Any) -> list[Any]:
    """Return every rank's picklable `value` in the order of ranks; [value] without a process group. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_first(value: Any) -> list[Any] | None:
    """Return every rank's `value`, in order, on rank 0, None on others; [value] without a process group. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values


def broadcast_value(value: Any) -> Any:
    """Return rank 0's `value`, which must be picklable, on all ranks; `value` without a process group. Collective."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gather_numbers(numbers: Sequence[float]) -> Callable[[], torch.Tensor]:
    """Start to send this rank's numbers, as many as on each other rank; return a function that waits for those of all
    ranks, (ranks, numbers) in fp64, and may be called several times. Collective; needs a process group.
    """
    # Directly to each rank: the 2 (ranks - 1) messages of a ring, as in gloo's all-reduce, would be sent one after the
    # other, and each of them would wait behind larger messages on the same link.
    sent = torch.tensor(list(numbers), dtype=torch.float64).repeat(dist.get_world_size())
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, async_op=True)

    def wait() -> torch.Tensor:
        if work is not None:
            work.wait()
        return received.view(-1, len(numbers))

    return wait


def check_ranks(world: World) -> list[RecordedRank]:
    """Return where each rank is. Raises CpuftError on all ranks if CPUFT_CORES is set and a rank is not on the hardware
    threads in it, to which `cpuft.rank` has pinned it. Collective.
    """
    own = RecordedRank(world.rank, socket.gethostname(), list_allowed_cpus())
    planned = [int(cpu) for cpu in os.environ.get("CPUFT_CORES", "").split(",") if cpu] or own.cpus
    found: list[tuple[RecordedRank, list[int]]] = gather((own, planned))
    for rank, cpus in found:
        if rank.cpus != cpus:
            raise CpuftError(
                f"rank {rank.rank} on {rank.host} runs on hardware threads {rank.cpus}, planned {cpus}: let only cpuft "
                f"pin ranks: unset I_MPI_PIN* and do not start under taskset or numactl"
            )
    return [rank for rank, _ in found]


def checksum_parameters(model: torch.nn.Module) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the values in `state_dict`, without names, shapes and types."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(_view_bytes(value))
    return digest.hexdigest()[:16]


def _view_bytes(value: torch.Tensor) -> Any:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _list_unequal(model: torch.nn.Module) -> list[str]:
    """Return the names of rank 0's parameters that differ on any rank. Collective."""
    found = gather({name: hashlib.sha256(_view_bytes(one)).digest() for name, one in model.state_dict().items()})
    return [name for name, own in found[0].items() if any(other.get(name) != own for other in found)]


def share_random_weights(model: torch.nn.Module) -> None:
    """Give all ranks rank 0's weights where they differ, if torch uses other instructions on some ranks. Collective."""
    # With AVX2 torch draws other normal numbers from a seed than with AVX-512.
    if len(set(gather(torch.backends.cpu.get_cpu_capability()))) > 1:
        state = model.state_dict()
        for name in _list_unequal(model):
            dist.broadcast(state[name], 0)


def prove_equal_parameters(model: torch.nn.Module, when: str) -> None:
    """Raise CpuftError on all ranks if parameters differ, as `compare_parameters` says. Collective."""
    if difference := compare_parameters(model, when)[1]:
        raise CpuftError(difference)


def compare_parameters(model: torch.nn.Module, when: str) -> tuple[str, str]:
    """Return the checksum of most ranks' parameters, 16 hexadecimal digits, and how the other ranks' differ: "", or a
    text that begins with `when`, such as `after update 2`, and names ranks, hosts and parameters. Collective.
    """
    checksums = gather((checksum_parameters(model), socket.gethostname()))
    usual = Counter(checksum for checksum, _ in checksums).most_common(1)[0][0]
    difference, odd = "", [f"{rank} on {host}" for rank, (checksum, host) in enumerate(checksums) if checksum != usual]
    if odd:
        names = _list_unequal(model)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        difference = (
            f"{when}, the parameters of rank {', '.join(odd)} differ from those of the other ranks: "
            f"{', '.join(names[:3])}{more}. Either the hosts differ in versions or CPUs (run cpuft doctor), or the "
            f"exchange of gradients does not suit this model (train it with --np 1)"
        )
    return str(usual), difference
