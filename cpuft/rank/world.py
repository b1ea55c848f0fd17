"""A rank's place among all ranks, from what launchers say in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpuft.errors import CpuftError
from cpuft.words import parse_counts


@dataclass(frozen=True)
class World:
    """A rank's place among all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int


# rank, size, local rank, local size: what each launcher calls them. mpirun's own come first, because a stale RANK
# exported in a shell must not win over them; Slurm's last, because ranks of an mpirun in a job inherit those of its
# proxies. A batch script has no step, and is alone whatever SLURM_NTASKS says.
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _SLURM,
)


def parse_world(environ: Mapping[str, str]) -> World:
    """The world of this process from its environment; a world of one where no launcher says anything.

    Raises CpuftError: values that are no numbers, or a rank outside its world.
    """
    for names in _LAUNCHERS:
        if names[0] in environ and names[1] in environ:
            # srun's pmi2 says nothing of a rank's place on its host; its step does, if it is the same world.
            same = all(environ.get(own) == environ[theirs] for own, theirs in zip(_SLURM[:2], names))
            return _parse_ranks(environ, _SLURM if same and names[2] not in environ else names)
    return World(0, 1, 0, 1)


def is_of_srun(environ: Mapping[str, str]) -> bool:
    """Whether variables of PMI are srun's own. Hydra's ranks in a job have the step of its proxy, and more to go by."""
    return "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ


def _parse_ranks(environ: Mapping[str, str], names: tuple[str, str, str, str]) -> World:
    texts = [environ.get(name, default) for name, default in zip(names, ("", "", "0", "1"))]
    if names == _SLURM:
        texts[3] = _tasks_of_node(texts[3], environ.get("SLURM_NODEID", ""))
    if not all(text.isdecimal() and len(text) < 10 for text in texts):
        said = " ".join(f"{name}={environ.get(name, '')!r}" for name in names)
        raise CpuftError(f"the launcher's variables are not numbers ({said}): unset them, or start with cpuft launch")
    world = World(*(int(text) for text in texts))
    if world.rank >= world.size:
        raise CpuftError(f"{names[0]}={world.rank} is outside {names[1]}={world.size}: unset one of them")
    return world


def _tasks_of_node(text: str, node: str) -> str:
    """How many tasks the step's node of this number has: of "2(x3),1", nodes 0 to 2 have 2 and node 3 has 1."""
    counts, number = parse_counts(text), int(node) if node.isdecimal() else 0
    return str(counts[number]) if number < len(counts) else ""


def world_variables(world: World) -> dict[str, str]:
    """The world under the names that torch, the Hugging Face Trainer and Accelerate read."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
    }
