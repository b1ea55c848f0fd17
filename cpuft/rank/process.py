"""First thing on every rank: who am I, am I where the plan put me; then the worker, watched to its end.

    python -m cpuft.rank COMMAND ... (packed by `cpuft.words`)

Reads what `cpuft.launch.settings` wrote and mpirun's own variables; gives COMMAND the names that torch knows: RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (MASTER_ADDR and MASTER_PORT are there already).
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

from cpuft.errors import CpuftError
from cpuft.files import take_sent
from cpuft.rank.interruption import start_watch
from cpuft.rank.world import World, is_of_srun, parse_world, world_variables
from cpuft.words import unpack_words

FAILURE, STARTED, ENDED = "cpuft-rank-failed:", "cpuft-rank-started:", "cpuft-rank-ended:"
MARKS = (FAILURE, STARTED, ENDED)
"""How lines of a rank's standard error begin that are for the launcher, and that users do not see on the screen."""
OUT_OF_MEMORY = "cpuft: the kernel killed this rank because memory ran out"
KILLED_BY_SOMEBODY = "cpuft: somebody killed this rank: by the kernel's count no process was killed for memory"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signal_number` when its parent dies; survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)


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


def abort_job(environ: Mapping[str, str], code: int) -> None:
    """Tell mpirun to end all ranks. Hydra does not do so by itself for a rank that never called MPI_Init. srun does.

    Source: the PMI-1 wire protocol, as MPICH's Hydra speaks it on the descriptor PMI_FD.
    """
    if environ.get("PMI_FD", "").isdecimal() and not is_of_srun(environ):
        with contextlib.suppress(OSError):
            os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


def run_worker(command: list[str], environ: Mapping[str, str], world: World) -> int:
    """Run the worker to its end; its exit code, 128 + N when signal N ended it. If we are killed, so is it."""
    kills = count_memory_kills()
    child = os.fork()
    if not child:
        end_with_parent()
        os.execvpe(command[0], command, dict(environ))
    start_watch(child, world, environ)
    status = os.waitpid(child, 0)[1]
    remove_shared_memory(child)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and kills >= 0:
        said = OUT_OF_MEMORY if count_memory_kills() > kills else KILLED_BY_SOMEBODY
        print(said, file=sys.stderr, flush=True)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def count_memory_kills() -> int:
    """Number of processes that the kernel has killed because memory ran out; -1 if nothing counts them.

    This is the counter of the host, which includes kills because a control group reached its limit. Where a container
    hides it, this is the counter of this process's control group. The kernel's log would name the processes, but only
    root may read it. Source: mm/oom_kill.c and mm/memcontrol.c.
    """
    return next((count for path in list_memory_counters() if (count := _read_kills(path)) >= 0), -1)


def list_memory_counters(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[str]:
    """Files that may count processes killed for memory, in the order in which they are asked."""
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
    """Unlink what libfabric's shm provider leaves of a process that did not get to its exit handlers: 64 MB each time.

    It names its segments PID:N:N (prov/shm of libfabric).
    """
    for path in glob.glob(f"/dev/shm/{process}:*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_abandoned_memory(folder: str = "/dev/shm", least_age: float = 60.0) -> None:
    """Unlink the segments of processes of ours that are gone: killed together with the parent that would have done it.

    Parameters
    ----------
    least_age: seconds; processes of another PID namespace look gone too, and need theirs only while they start.
    """
    for path in glob.glob(f"{folder}/*:*:*"):
        process = os.path.basename(path).partition(":")[0]
        with contextlib.suppress(OSError):
            found = os.stat(path)
            old = time.time() - found.st_mtime >= least_age
            if process.isdecimal() and old and found.st_uid == os.getuid() and not os.path.exists(f"/proc/{process}"):
                os.unlink(path)


def allow_files(most: int = 65536) -> None:
    """Let this rank open as many files as it may, within reason: it is connected with all others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 <= hard < most else max(soft, most), hard))


def format_failure(world: World, hostname: str, code: int, missed: Collection[int] = ()) -> str:
    """The line by which the launcher learns, whatever the mpirun, which rank failed, how, and whom it had missed."""
    return " ".join([f"{FAILURE} rank {world.rank} on {hostname} exit code {code}", *map(str, sorted(missed))])


def parse_failure(text: str) -> tuple[int, str, int] | None:
    """Rank, host and exit code from what a rank wrote to standard error; None when it did not fail."""
    found = re.findall(rf"^{FAILURE} rank (\d{{1,9}}) on (\S+) exit code (\d{{1,9}})[ \d]*$", text, re.MULTILINE)
    return (int(found[-1][0]), found[-1][1], int(found[-1][2])) if found else None


FOREIGN = "an entry of torch's store is not the run's own"
"""Said by a rank that ended because another program wrote to the store by which ranks find each other."""


def parse_missed(text: str) -> set[int]:
    """The ranks that a rank waited for in vain, from what it wrote to standard error."""
    found = re.findall(rf"^{FAILURE} .* exit code \d+ (\d{{1,9}}(?: \d{{1,9}})*)$", text, re.MULTILINE)
    return {int(rank) for ranks in found for rank in ranks.split()}


def main() -> None:
    """Run the worker as this rank. Exits 2 with one line when this process is not where the plan put it."""
    end_with_parent()
    hostname, code = socket.gethostname(), 2
    world = World(0, 1, 0, 1)
    remove_abandoned_memory()
    allow_files()
    try:
        world = parse_world(os.environ)
        print(f"{STARTED} rank {world.rank} on {hostname}", file=sys.stderr, flush=True)
        check_place(world, os.environ, hostname)
        cores = parse_cores(os.environ.get("CPUFT_CORES", ""), world.local_rank)
        if os.environ.get("CPUFT_PIN") == "rank" and cores:
            os.sched_setaffinity(0, cores)
        environ = dict(os.environ) | take_sent(os.environ, str(world.local_rank)) | world_variables(world)
        environ["CPUFT_CORES"] = ",".join(map(str, cores))
        code = run_worker(unpack_words(sys.argv[1:]), environ, world)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
    if code:
        print(format_failure(world, hostname, code), file=sys.stderr, flush=True)
        abort_job(os.environ, code)
    else:
        print(f"{ENDED} rank {world.rank} on {hostname}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
