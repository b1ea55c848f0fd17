"""Which program starts the ranks: the mpirun of Intel MPI, MPICH or Open MPI, or Slurm's srun."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError, install_command
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport

_FIND = Path(__file__).with_name("find_mpirun.sh").read_text(encoding="utf-8")
_VERSION_TEXTS = (
    ("Intel(R) MPI", "intel"),
    ("Open MPI", "openmpi"),
    ("OpenRTE", "openmpi"),
    ("HYDRA", "mpich"),
    ("slurm", "srun"),
)


@dataclass(frozen=True)
class MpiImplementation:
    """The program that starts the ranks."""

    path: str
    """Path of the program on the head host; "srun" on a login node."""
    name: str
    """One of "intel", "mpich", "openmpi", and "srun", which takes the place of mpirun in a Slurm job."""

    @property
    def title(self) -> str:
        """The name for users: "intel's mpirun", or "srun"."""
        return self.name if self.name == "srun" else f"{self.name}'s mpirun"


def parse_version(path: str, text: str) -> MpiImplementation:
    """Return the implementation of the program at `path`, whose `--version` prints `text`. Raises CpuftError for a
    program that is none of those in `MpiImplementation.name`.
    """
    for part, name in _VERSION_TEXTS:
        if part in text:
            return MpiImplementation(path, name)
    first = (text.strip().splitlines() or ["nothing"])[0]
    raise CpuftError(
        f"{path} is not an mpirun that cpuft knows (its --version prints: {first[:120]}): "
        f"name Intel MPI's, MPICH's or Open MPI's with --mpirun"
    )


def find_mpi(head: Host, wanted: str, python: str, transport: Transport) -> MpiImplementation:
    """Return what starts the ranks, as it is found on the head host: --mpirun (`wanted`, a path or a name in PATH), or
    if that is "" the first that exists of mpirun beside `python`, mpirun, and in a Slurm job srun.

    On a login node with an allocation (salloc) it is srun, because the job's hosts may not reach back here. Intel MPI's
    and MPICH's mpirun is a shell script that passes no signals on: where mpiexec.hydra is beside it, `path` is that.
    Raises CpuftError: there is no such program, it is another one, or it cannot start ranks on these hosts.
    """
    on_login_node = bool(transport.bootstrap) and not transport.is_here(head)
    if on_login_node and not wanted:
        return MpiImplementation("srun", "srun")
    defaults = (f"{os.path.dirname(python)}/mpirun", "mpirun", *(["srun"] if transport.bootstrap else []))
    paths = (wanted,) if wanted else defaults
    answer = transport.run(head, ("sh", "-c", _FIND, "find", *paths), seconds=30)
    if answer.exit_code:
        where = f" at {wanted}" if wanted else ""
        where += "" if transport.is_here(head) else f" on {head.name}"
        raise CpuftError(
            f"there is no mpirun{where}: cpuft provision installs one on other hosts, and on this machine "
            f"{install_command('train', 'mpi', 'demo')}; or name your own mpirun with --mpirun"
        )
    path, _, version = answer.output.partition("\n")
    found = parse_version(path, version + answer.errors)
    if found.name == "srun" and not transport.bootstrap:
        raise CpuftError(
            "srun starts ranks only inside a Slurm job: leave --mpirun out, or submit the launch by cpuft submit slurm"
        )
    if found.name != "srun" and on_login_node:
        raise CpuftError(
            f"the job's hosts may not reach back to {wanted} on this login node: leave --mpirun out, then srun starts "
            f"the ranks"
        )
    return found
