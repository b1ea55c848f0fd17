"""The flavours of mpirun: which one there is, here or on the master."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.hosts.door import Door
from cpuft.hosts.hostfile import Host

_FIND = Path(__file__).with_name("find_mpirun.sh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Flavour:
    """An mpirun that was found: its path and whose it is."""

    path: str
    name: str
    """intel, mpich or openmpi"""


def parse_flavour(path: str, version_text: str) -> Flavour:
    """Whose mpirun this is, from what `mpirun --version` prints. Raises CpuftError for an unknown one."""
    signs = (("intel", "Intel(R) MPI"), ("openmpi", "Open MPI"), ("openmpi", "OpenRTE"), ("mpich", "HYDRA"))
    for name, sign in signs:
        if sign in version_text:
            return Flavour(path, name)
    first = (version_text.strip().splitlines() or ["nothing"])[0]
    raise CpuftError(
        f"{path} is no mpirun that cpuft knows (it said: {first[:120]}): "
        f"name Intel MPI's, MPICH's or Open MPI's with --mpirun"
    )


def find_flavour(master: Host, wanted: str, python: str, door: Door) -> Flavour:
    """The master's mpirun: the named one, else that of `python`'s environment, else PATH's.

    Intel MPI's and MPICH's `mpirun` is a shell script that looks for mpiexec.hydra on PATH and passes no signals on:
    where the program itself is beside it, that is used.

    Raises CpuftError: there is none, or one that is not known.
    """
    paths = (wanted,) if wanted else (f"{os.path.dirname(python)}/mpirun", "mpirun")
    answer = door.run(master, ("sh", "-c", _FIND, "find", *paths), seconds=30)
    if answer.exit_code:
        where = f" at {wanted}" if wanted else ""
        where += "" if door.is_here(master) else f" on {master.name}"
        raise CpuftError(
            f"there is no mpirun{where}: cpuft provision, or pip install 'cpuft[train]', brings Intel MPI's; "
            f"or name yours with --mpirun"
        )
    path, _, version = answer.output.partition("\n")
    return parse_flavour(path, version + answer.errors)
