"""Starting ranks with a real mpirun, and becoming one of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import cpuft
from cpuft.rank.process import remove_abandoned_memory

MPIRUN = Path(sys.prefix, "bin", "mpiexec.hydra")
ROOT = Path(cpuft.__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "I_MPI_FABRICS": "shm:ofi",
        "FI_PROVIDER": "tcp",
        "OMP_NUM_THREADS": "1",
        "CCL_KVS_IFACE": "lo",
        "CCL_LOG_LEVEL": "error",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **more,
    }


def mpirun(
    ranks: int, module: str, *arguments: str, seconds: float = 150, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a module on this many ranks, and return its exit code and output.

    Like the launcher, this runs the module with cpuft.rank.script, so that no interpreter is finalized while gloo's
    threads need it.
    """
    command = [str(MPIRUN), "-iface", "lo", "-host", "localhost", "-n", str(ranks)]
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    command += [sys.executable, "-m", "cpuft.rank.script", str(path), *arguments]
    try:
        return subprocess.run(
            command, env=settings(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
    finally:
        # There is no cpuft.rank here that would clean up after a killed rank.
        remove_abandoned_memory(min_age=0.0)


def become_rank() -> None:
    """Set the variables that `cpuft.rank` sets for a worker."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = os.environ["PMI_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = os.environ["PMI_SIZE"]


def simulate_hosts(ranks_per_host: int) -> None:
    """Let the launcher's variables say that each host has this many consecutive ranks, and the last one the rest."""
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    first = rank // ranks_per_host * ranks_per_host
    os.environ["MPI_LOCALRANKID"] = os.environ["LOCAL_RANK"] = str(rank - first)
    os.environ["MPI_LOCALNRANKS"] = os.environ["LOCAL_WORLD_SIZE"] = str(min(ranks_per_host, size - first))


def start_late(backend: str, seconds: float) -> None:
    """Form the group of all ranks, in which a message may take so long; importing everything may take a minute."""
    from torch._C._distributed_c10d import TCPStore

    from cpuft import comm

    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    comm.start(backend, timeout_seconds=seconds, store=store, rank=rank, world_size=size)
