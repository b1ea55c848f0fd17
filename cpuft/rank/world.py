"""Rank, world size, local rank and local size of a process, from the environment variables of its launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from cpuft.argv import parse_slurm_counts
from cpuft.errors import CpuftError

CHECK_VARIABLE = "CPUFT_CHECK_CONNECTED"
"""Environment variable that is 1 where ranks of a script must be connected; else nothing is changed or checked."""


@dataclass(frozen=True)
class World:
    """The place of a rank among all ranks. Ranks count from 0."""

    rank: int
    size: int
    local_rank: int
    """Rank among the ranks on the same host, of which there are `local_size`."""
    local_size: int


_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _TORCHRUN,
    _SLURM,
)
"""Rank, size, local rank and local size as Open MPI, Intel MPI and MPICH, torchrun, and Slurm call them.

The first ones that are set count. mpirun's variables come first, because an old RANK that is exported in a shell must
not override them. Slurm's come last, because the ranks of an mpirun in a job inherit the variables of mpirun's proxies.
A batch script has no step, and is a single process whatever SLURM_NTASKS is."""


def parse_world(environ: Mapping[str, str]) -> World:
    """Return the place of this process; World(0, 1, 0, 1) if no launcher has set its variables.

    The first launcher whose variables for rank and size are both set counts: Open MPI, Intel MPI or MPICH, torchrun,
    Slurm. Missing local variables are those of Slurm if it has the same rank and size, else 0 and 1. Raises CpuftError:
    values are not numbers, or the rank is not below the size.
    """
    for names in _LAUNCHERS:
        if names[0] in environ and names[1] in environ:
            # srun's pmi2 does not set the local rank. Slurm's own variables do, if they describe the same world.
            is_same = all(environ.get(slurm) == environ[name] for slurm, name in zip(_SLURM[:2], names))
            return _parse_variables(environ, _SLURM if is_same and names[2] not in environ else names)
    return World(0, 1, 0, 1)


def list_allowed_cpus() -> list[int]:
    """Return the hardware threads on which this process may run, in ascending order. On macOS, which pins nothing, they
    are those that the launcher planned for this rank's worker, or all.
    """
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    planned = os.environ.get("CPUFT_CORES", "")
    return [int(cpu) for cpu in planned.split(",")] if planned else list(range(os.cpu_count() or 1))


def is_started_by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun itself started this rank: SLURM_STEP_ID is set, and mpirun's MPI_LOCALRANKID is not."""
    return "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ


def _parse_variables(environ: Mapping[str, str], names: tuple[str, str, str, str]) -> World:
    texts = [environ.get(name, default) for name, default in zip(names, ("", "", "0", "1"))]
    if names == _SLURM:
        texts[3] = _count_tasks(texts[3], environ.get("SLURM_NODEID", ""))
    if not all(text.isdecimal() and len(text) < 10 for text in texts):
        values = " ".join(f"{name}={environ.get(name, '')!r}" for name in names)
        raise CpuftError(f"the launcher's variables are not numbers ({values}): unset them, or start with cpuft launch")
    world = World(*(int(text) for text in texts))
    if world.rank >= world.size:
        raise CpuftError(
            f"{names[0]}={world.rank} must be smaller than {names[1]}={world.size}: unset one of the two variables"
        )
    return world


def _count_tasks(text: str, node: str) -> str:
    """Return the number of tasks on a node of the step: of "2(x3),1", nodes 0 to 2 have 2 tasks and node 3 has 1."""
    counts, number = parse_slurm_counts(text), int(node) if node.isdecimal() else 0
    return str(counts[number]) if number < len(counts) else ""


def world_variables(world: World) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as texts, for torch, the Trainer and Accelerate."""
    return dict(zip(_TORCHRUN, map(str, astuple(world))))
