"""First thing on every rank: who am I, am I where the plan put me; then the worker takes this process's place.

    python -m cpuft.rank COMMAND ...

Reads what `cpuft.environment` wrote and mpirun's own variables; gives COMMAND the names that torch knows: RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (MASTER_ADDR and MASTER_PORT are there already).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping

from cpuft.environment import World, parse_world
from cpuft.errors import CpuftError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signal_number` when its parent dies; survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)


def world_variables(world: World) -> dict[str, str]:
    """The world under the names that torch, the Hugging Face Trainer and Accelerate read."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
    }


def parse_cores(text: str, local_rank: int) -> tuple[int, ...]:
    """Hardware threads of one rank from CPUFT_CORES ("0,1;2,3": two ranks of two); empty when it says nothing."""
    ranks = text.split(";")
    if not text or local_rank >= len(ranks):
        return ()
    return tuple(int(cpu) for cpu in ranks[local_rank].split(","))


def check_place(world: World, environ: Mapping[str, str], hostname: str) -> None:
    """Raises CpuftError when the world's size or this host is not what the plan says."""
    planned = environ.get("CPUFT_WORLD_SIZE", "")
    if planned and int(planned) != world.size:
        raise CpuftError(
            f"rank {world.rank} on {hostname} sees a world of {world.size} ranks, the plan has {planned}: "
            f"unset RANK, WORLD_SIZE, PMI_* and OMPI_* in your shell, or name another --mpirun"
        )
    host = environ.get("CPUFT_HOSTNAME", hostname)
    if host != hostname:
        raise CpuftError(f"rank {world.rank} runs on {hostname}, the plan put it on {host}: check the hostfile's names")


def main() -> None:
    """Become the worker. Exits 2 with one line when this process is not where the plan put it."""
    end_with_parent()
    try:
        world = parse_world(os.environ)
        check_place(world, os.environ, socket.gethostname())
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(2)
    cores = parse_cores(os.environ.get("CPUFT_CORES", ""), world.local_rank)
    if os.environ.get("CPUFT_PIN") == "rank" and cores:
        os.sched_setaffinity(0, cores)
    environ = dict(os.environ) | world_variables(world) | {"CPUFT_CORES": ",".join(map(str, cores))}
    os.execvpe(sys.argv[1], sys.argv[1:], environ)


if __name__ == "__main__":
    main()
