"""The process group of a run, and the proof that its ranks form one job."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from cpuft.comm import start
from cpuft.comm.choice.automatic import choose_automatically
from cpuft.comm.choice.choosing import Choice
from cpuft.errors import CpuftError
from cpuft.files import cache_folder
from cpuft.hosts.facts import find_free_port
from cpuft.rank.script import keep_for_good
from cpuft.rank.world import parse_world, world_variables
from cpuft.record import RankPlace


@dataclass(frozen=True)
class Place:
    """A rank's place among all, under torch's names."""

    rank: int
    size: int
    backend: str = "gloo"
    backend_reason: str = ""


@contextmanager
def process_group(backend: str, timeout_seconds: float, gradient_type: str = "float32") -> Iterator[Place]:
    """Join the other ranks for the time of the context. Alone, this is a world of one.

    Parameters
    ----------
    backend: gloo, mpi, ccl, or auto: the fastest of them here, measured once for these hosts.
    gradient_type: torch's name of the type that `auto` measures with.

    Raises
    ------
    CpuftError: what the backend needs is missing, or a launcher has not said where the master is.
    """
    os.environ.update(meeting_variables(os.environ))
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    choice = Choice(backend, "as you asked")
    if backend == "auto":
        choice = Choice("gloo", "one rank")
        if size > 1:
            # Only rank 0 remembers: other hosts need no home for it.
            cache = Path() if rank else cache_folder(os.environ)
            choice = choose_automatically(store, rank, size, cache, gradient_type)
    start(choice.backend, timeout_seconds, PrefixStore("world", store), rank, size)
    keep_for_good(dist.group.WORLD)
    try:
        yield Place(rank, size, choice.backend, choice.reason)
    finally:
        dist.destroy_process_group()


def meeting_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, MASTER_ADDR and so on: the launcher's, else those of a process that is alone.

    Raises
    ------
    CpuftError: the launcher's world has other ranks, and it has not said where they meet.
    """
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    found = world_variables(parse_world(environ)) | alone
    found |= {name: environ[name] for name in found if name in environ}
    if found["WORLD_SIZE"] != "1" and not alone.keys() <= environ.keys():
        raise CpuftError(
            f"rank {found['RANK']} of {found['WORLD_SIZE']} was not told where rank 0 is: export MASTER_ADDR (its "
            f"host) and MASTER_PORT (a free port there) before mpirun or srun, or start with cpuft launch"
        )
    return found


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in the order of ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_place(place: Place) -> RankPlace:
    """Where this process really is."""
    return RankPlace(place.rank, socket.gethostname(), sorted(os.sched_getaffinity(0)))


def prove_one_job(place: Place) -> list[RankPlace]:
    """Check, on all ranks alike, that the world is what the plan says; return every rank's place.

    The plan's word comes in CPUFT_WORLD_SIZE, CPUFT_HOSTNAME and CPUFT_CORES; without them only uniqueness is checked.

    Raises
    ------
    CpuftError: a wrong number of ranks, a rank twice, or one off its host or cores; the message names the rank.
    """
    own = own_place(place)
    planned = {
        "size": os.environ.get("CPUFT_WORLD_SIZE", str(place.size)),
        "host": os.environ.get("CPUFT_HOSTNAME", own.host),
        "cpus": [int(cpu) for cpu in os.environ.get("CPUFT_CORES", "").split(",") if cpu] or own.cpus,
    }
    found = gather((own, planned, os.getpid()))
    problem = find_misplaced(place.size, found)
    if problem:
        raise CpuftError(problem)
    return [their_place for their_place, _, _ in found]


def find_misplaced(size: int, found: list[tuple[RankPlace, dict[str, Any], int]]) -> str:
    """What is wrong with a world of `size` ranks, each with its place, its plan and its process number; else ''."""
    for number, count in Counter(place.rank for place, _, _ in found).items():
        if count > 1:
            return f"rank {number} is there {count} times: start the run with one mpirun, and unset RANK in your shell"
    for (host, process), count in Counter((place.host, pid) for place, _, pid in found).items():
        if count > 1:
            return f"process {process} on {host} holds {count} ranks: start the run with cpuft launch"
    for place, planned, _ in found:
        if planned["size"] != str(size):
            return f"rank {place.rank} was planned for {planned['size']} ranks and finds {size}: check mpirun's -n"
        if planned["host"] != place.host:
            return f"rank {place.rank} is on {place.host}, planned on {planned['host']}: check the hostfile's names"
        if planned["cpus"] != place.cpus:
            return (
                f"rank {place.rank} on {place.host} sits on hardware threads {place.cpus}, planned {planned['cpus']}: "
                f"let one owner pin: unset I_MPI_PIN* and do not start under taskset or numactl"
            )
    return ""


def checksum_parameters(model: torch.nn.Module) -> str:
    """SHA-256 of the bytes of all that would be saved, in order, cut to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def prove_equal_parameters(model: torch.nn.Module, when: str) -> str:
    """Check that all ranks hold the same parameters; return their checksum.

    Raises
    ------
    CpuftError: on all ranks, naming those whose parameters are not the majority's.
    """
    checksums = gather((checksum_parameters(model), socket.gethostname()))
    usual = Counter(checksum for checksum, _ in checksums).most_common(1)[0][0]
    odd = [f"{rank} on {host}" for rank, (checksum, host) in enumerate(checksums) if checksum != usual]
    if odd:
        raise CpuftError(
            f"{when}, parameters of rank {', '.join(odd)} differ from the others: the run is not one job; "
            f"check that all hosts have the same versions (cpuft launch records them)"
        )
    return str(usual)
