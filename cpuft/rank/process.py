"""`python -m cpuft.rank COMMAND ...`: check this rank's place, pin it to its cores, and run the worker to its end.

The command is packed by `cpuft.argv`. The environment holds what `cpuft.launch.settings` wrote, MASTER_ADDR and
MASTER_PORT among it, and the launcher's own variables. The worker gets the names that torch knows as well: RANK,
WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping

from cpuft.argv import unpack_argv
from cpuft.errors import CpuftError
from cpuft.files import take_secrets
from cpuft.rank.interruption import start_host_watch
from cpuft.rank.world import World, is_started_by_srun, parse_world, world_variables

FAILED_MARK, STARTED_MARK, ENDED_MARK = "cpuft-rank-failed:", "cpuft-rank-started:", "cpuft-rank-ended:"
MARKS = (FAILED_MARK, STARTED_MARK, ENDED_MARK)
"""Beginnings of those lines on a rank's standard error that are for the launcher, and are not shown to the user."""
OUT_OF_MEMORY = "cpuft: the kernel killed this rank because memory ran out"
KILLED_BY_SOMEBODY = "cpuft: somebody killed this rank: the kernel has killed no process because memory ran out"
FOREIGN_STORE_ENTRY = "an entry in torch's store was not written by this run"
"""Text of a rank that ended because another program wrote to the store through which ranks find each other."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies. The setting survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)


def parse_cores(text: str, local_rank: int) -> tuple[int, ...]:
    """Return the hardware threads of a rank from CPUFT_CORES; an empty tuple if it has no entry for the rank.

    "0,1;2,3" means threads 0 and 1 for local rank 0, and threads 2 and 3 for local rank 1.
    """
    ranks = text.split(";")
    if not text or local_rank >= len(ranks):
        return ()
    return tuple(int(cpu) for cpu in ranks[local_rank].split(","))


def check_place(world: World, environ: Mapping[str, str], hostname: str) -> None:
    """Check the world size and the host against the plan. Raises CpuftError if one of them differs."""
    planned = environ.get("CPUFT_WORLD_SIZE", "")
    if planned and int(planned) != world.size:
        raise CpuftError(
            f"rank {world.rank} on {hostname} is in a world of {world.size} ranks, but the plan has {planned}: "
            f"unset RANK, WORLD_SIZE, PMI_* and OMPI_* in your shell, or give another --mpirun"
        )
    host = environ.get("CPUFT_HOSTNAME", hostname)
    if host != hostname:
        raise CpuftError(
            f"rank {world.rank} runs on {hostname}, but the plan put it on {host}: check the names in the hostfile"
        )


def abort_job(environ: Mapping[str, str], code: int) -> None:
    """Tell mpirun to end all ranks. Hydra does not do so by itself for a rank that has not called MPI_Init; srun does.

    Source: the PMI-1 wire protocol, as MPICH's Hydra speaks it on the file descriptor PMI_FD.
    """
    if environ.get("PMI_FD", "").isdecimal() and not is_started_by_srun(environ):
        with contextlib.suppress(OSError):
            os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


def run_worker(command: list[str], environ: Mapping[str, str], world: World) -> int:
    """Run the worker and return its exit code, which is 128 + N if signal N ended it.

    The worker is killed if this process is.
    """
    kills = count_memory_kills()
    child = os.fork()
    if not child:
        end_with_parent()
        os.execvpe(command[0], command, dict(environ))
    start_host_watch(child, world, environ)
    status = os.waitpid(child, 0)[1]
    remove_shared_memory(child)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and kills >= 0:
        reason = OUT_OF_MEMORY if count_memory_kills() > kills else KILLED_BY_SOMEBODY
        print(reason, file=sys.stderr, flush=True)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def count_memory_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; -1 if nothing counts them.

    This is the counter of the host, which includes kills because a control group reached its limit. Where a container
    hides it, this is the counter of this process's control group. The kernel's log would name the processes, but only
    root may read it. Source: mm/oom_kill.c and mm/memcontrol.c.
    """
    return next((count for path in list_memory_counters() if (count := _read_kills(path)) >= 0), -1)


def list_memory_counters(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[str]:
    """Return the files that may count processes killed for memory, in the order in which they are tried."""
    paths = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open(groups, encoding="utf-8") as file:
        for line in file:
            _, controllers, group = line.rstrip("\n").split(":", 2)
            if not controllers:  # version 2
                paths.append(f"{root}{group.rstrip('/')}/memory.events")
            elif "memory" in controllers.split(","):
                paths.append(f"{root}/memory{group.rstrip('/')}/memory.oom_control")
    return paths


def _read_kills(path: str) -> int:
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), -1)
    return -1


def remove_shared_memory(process: int) -> None:
    """Remove the shared memory that libfabric's shm provider leaves of a process without exit handlers (64 MB each).

    The provider names its segments PID:N:N (prov/shm of libfabric).
    """
    for path in glob.glob(f"/dev/shm/{process}:*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_abandoned_memory(folder: str = "/dev/shm", min_age: float = 60.0) -> None:
    """Remove shared memory of libfabric that ended processes of this user have left, because their parents were killed.

    Parameters
    ----------
    min_age: seconds. Processes in another PID namespace seem to have ended, too, but need these segments only while
        they start.
    """
    for path in glob.glob(f"{folder}/*:*:*"):
        process = os.path.basename(path).partition(":")[0]
        with contextlib.suppress(OSError):
            found = os.stat(path)
            is_old = time.time() - found.st_mtime >= min_age
            if (
                process.isdecimal()
                and is_old
                and found.st_uid == os.getuid()
                and not os.path.exists(f"/proc/{process}")
            ):
                os.unlink(path)


def raise_open_files_limit(most: int = 65536) -> None:
    """Raise this rank's limit of open files, to `most` or the hard limit, because it connects to all other ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 <= hard < most else max(soft, most), hard))


def format_failure(world: World, hostname: str, code: int, missing: Collection[int] = ()) -> str:
    """Return the line that tells the launcher, with any mpirun, which rank failed and for which ranks it had waited."""
    return " ".join([f"{FAILED_MARK} rank {world.rank} on {hostname} exit code {code}", *map(str, sorted(missing))])


def parse_failure(text: str) -> tuple[int, str, int] | None:
    """Return (rank, host, exit code) from a rank's standard error, or None if the rank did not fail."""
    found = re.findall(rf"^{FAILED_MARK} rank (\d{{1,9}}) on (\S+) exit code (\d{{1,9}})[ \d]*$", text, re.MULTILINE)
    return (int(found[-1][0]), found[-1][1], int(found[-1][2])) if found else None


def parse_missing_ranks(text: str) -> set[int]:
    """Return the ranks for which a rank has waited in vain, from its standard error."""
    found = re.findall(rf"^{FAILED_MARK} .* exit code \d+ (\d{{1,9}}(?: \d{{1,9}})*)$", text, re.MULTILINE)
    return {int(rank) for ranks in found for rank in ranks.split()}


def main() -> None:
    """Run the worker as this rank. Exits with 2 and one line if this process is not where the plan put it."""
    end_with_parent()
    hostname, code = socket.gethostname(), 2
    world = World(0, 1, 0, 1)
    remove_abandoned_memory()
    raise_open_files_limit()
    try:
        world = parse_world(os.environ)
        print(f"{STARTED_MARK} rank {world.rank} on {hostname}", file=sys.stderr, flush=True)
        check_place(world, os.environ, hostname)
        cores = parse_cores(os.environ.get("CPUFT_CORES", ""), world.local_rank)
        if os.environ.get("CPUFT_PIN") == "rank" and cores:
            os.sched_setaffinity(0, cores)
        environ = dict(os.environ) | take_secrets(os.environ, str(world.local_rank)) | world_variables(world)
        environ["CPUFT_CORES"] = ",".join(map(str, cores))
        code = run_worker(unpack_argv(sys.argv[1:]), environ, world)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
    if code:
        print(format_failure(world, hostname, code), file=sys.stderr, flush=True)
        abort_job(os.environ, code)
    else:
        print(f"{ENDED_MARK} rank {world.rank} on {hostname}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
