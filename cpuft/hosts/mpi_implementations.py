"""What starts ranks: the flavours of mpirun, and Slurm's srun; which one there is, here or on the master."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError, install_command
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport

_FIND = Path(__file__).with_name("find_mpirun.sh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Flavour:
    """What was found to start ranks: its path and whose it is."""

    path: str
    name: str
    """intel, mpich, openmpi, or srun, which takes the place of an mpirun in a job of Slurm's"""

    @property
    def title(self) -> str:
        """What a user calls it."""
        return self.name if self.name == "srun" else f"{self.name}'s mpirun"


def parse_flavour(path: str, version_text: str) -> Flavour:
    """Whose mpirun this is, from what `mpirun --version` prints. Raises CpuftError for an unknown one."""
    signs = (("intel", "Intel(R) MPI"), ("openmpi", "Open MPI"), ("openmpi", "OpenRTE"), ("mpich", "HYDRA"))
    for name, sign in (*signs, ("srun", "slurm")):
        if sign in version_text:
            return Flavour(path, name)
    first = (version_text.strip().splitlines() or ["nothing"])[0]
    raise CpuftError(
        f"{path} is no mpirun that cpuft knows (it said: {first[:120]}): "
        f"name Intel MPI's, MPICH's or Open MPI's with --mpirun"
    )


def find_flavour(master: Host, wanted: str, python: str, transport: Transport) -> Flavour:
    """The master's mpirun: the named one, else that of `python`'s environment, else PATH's, else in a job srun.

    Where this machine is none of a job's hosts, a login node's `salloc`, it is srun: hosts need not reach back here.

    Intel MPI's and MPICH's `mpirun` is a shell script that looks for mpiexec.hydra on PATH and passes no signals on:
    where the program itself is beside it, that is used.

    Raises CpuftError: there is none, or one that is not known, or that cannot start ranks there from here.
    """
    outside = bool(transport.bootstrap) and not transport.is_here(master)
    if outside and not wanted:
        return Flavour("srun", "srun")
    found = (f"{os.path.dirname(python)}/mpirun", "mpirun", *(["srun"] if transport.bootstrap else []))
    paths = (wanted,) if wanted else found
    answer = transport.run(master, ("sh", "-c", _FIND, "find", *paths), seconds=30)
    if answer.exit_code:
        where = f" at {wanted}" if wanted else ""
        where += "" if transport.is_here(master) else f" on {master.name}"
        raise CpuftError(
            f"there is no mpirun{where}: cpuft provision installs Intel MPI on other hosts, and on this machine "
            f"{install_command('train', 'mpi', 'demo')}; or name your own mpirun with --mpirun"
        )
    path, _, version = answer.output.partition("\n")
    flavour = parse_flavour(path, version + answer.errors)
    if flavour.name == "srun" and not transport.bootstrap:
        raise CpuftError("srun starts ranks in a job of Slurm's, and this is none: leave --mpirun out, or say sbatch")
    if flavour.name != "srun" and outside:
        raise CpuftError(f"hosts of the job may not reach back to {wanted} here: leave --mpirun out, srun starts ranks")
    return flavour
