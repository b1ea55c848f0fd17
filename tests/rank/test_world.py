"""The place of a rank, from the variables of Intel MPI, MPICH, Open MPI, Slurm and torchrun."""

from __future__ import annotations

import pytest

from cpuft.errors import CpuftError
from cpuft.rank.world import World, parse_world

INTEL = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
STALE = {"RANK": "0", "WORLD_SIZE": "1"}


def pasted(text: str) -> dict[str, str]:
    """Parse variables as `env` prints them."""
    return dict(word.split("=", 1) for word in text.split())


# The fourth and the last task of srun -N 3 -n 5 in Slurm 22.05.
STEP = """
    SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=3 SLURM_NNODES=3 SLURM_NPROCS=5 SLURM_NTASKS=5 SLURM_TASKS_PER_NODE=2(x2),1
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=5
    SLURM_STEP_TASKS_PER_NODE=2(x2),1
"""
FOURTH = pasted(f"{STEP} SLURM_GTIDS=2,3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=3")
LAST = pasted(f"{STEP} SLURM_GTIDS=4 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_PROCID=4")
PMI2 = pasted("PMI_FD=11 PMI_JOBID=5.0 PMI_SIZE=5 SLURM_MPI_TYPE=pmi2")
BATCH = pasted("""
    SLURM_GTIDS=0 SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=4
    SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)
""")
# mpirun -n 4 -ppn 2 in a job of six tasks: srun has started a proxy on each of two nodes.
UNDER_MPIRUN = pasted("""
    PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=6 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=6
    SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=1 SLURM_STEPID=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)
""")


@pytest.mark.parametrize(
    "environ, world",
    [
        ({}, World(0, 1, 0, 1)),
        (INTEL, World(3, 4, 1, 2)),
        (OPEN, World(3, 4, 1, 2)),
        (TORCHRUN, World(3, 4, 1, 2)),
        (FOURTH, World(3, 5, 1, 2)),
        (LAST, World(4, 5, 0, 1)),
        (FOURTH | PMI2 | {"PMI_RANK": "3"}, World(3, 5, 1, 2)),
        (LAST | PMI2 | {"PMI_RANK": "4"}, World(4, 5, 0, 1)),
        (BATCH, World(0, 1, 0, 1)),
        (BATCH | INTEL, World(3, 4, 1, 2)),
        (UNDER_MPIRUN, World(3, 4, 1, 2)),
        (FOURTH | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, World(3, 5, 1, 2)),
        (FOURTH | {"SLURM_STEP_TASKS_PER_NODE": "1,3,1"}, World(3, 5, 1, 3)),
        (INTEL | STALE, World(3, 4, 1, 2)),
        (OPEN | STALE, World(3, 4, 1, 2)),
        (TORCHRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, World(3, 4, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2, 0, 1)),
    ],
)
def test_the_place_of_a_rank_is_read_from_its_launchers_variables(environ: dict[str, str], world: World) -> None:
    assert parse_world(environ) == world


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "are not numbers"),
        ({"RANK": "1" * 5000, "WORLD_SIZE": "2"}, "are not numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be smaller than WORLD_SIZE=2"),
        (LAST | {"SLURM_NODEID": "7"}, r"are not numbers .*SLURM_STEP_TASKS_PER_NODE='2\(x2\),1'"),
    ],
)
def test_impossible_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        parse_world(environ)
