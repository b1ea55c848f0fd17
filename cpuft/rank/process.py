"""`python -m cpuft.rank COMMAND ...`: check this rank's place, pin it to its cores, and run the worker to its end.

The command is packed by `cpuft.argv`. The environment holds what `cpuft.launch.rank_variables` wrote, and the
launcher's own variables. The worker gets the names that torch knows as well: RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from cpuft import __version__
from cpuft.argv import SUPERVISED_VARIABLE, follow_parent, unpack_argv
from cpuft.errors import CpuftError
from cpuft.rank.interruption import start_host_watch
from cpuft.rank.world import World, is_started_by_srun, parse_world, world_variables
from cpuft.secret_variables import take_secrets
from cpuft.serialization import load, parse_json

FAILED_MARK, STARTED_MARK, ENDED_MARK = "cpuft-rank-failed:", "cpuft-rank-started:", "cpuft-rank-ended:"
STEPS_MARK, WAITS_MARK, RAISED_MARK = "cpuft-rank-steps:", "cpuft-rank-waits:", "cpuft-rank-raised:"
MARKS = (FAILED_MARK, STARTED_MARK, ENDED_MARK, STEPS_MARK, WAITS_MARK, RAISED_MARK)
"""Beginnings of the lines on a rank's standard error that are for the launcher, and are not shown to the user.
WAITS_MARK asks for a diagnosis of a long wait; RAISED_MARK has the exception of a function, which its caller gets."""
OUT_OF_MEMORY = "cpuft: the kernel killed this rank because memory ran out"
KILLED_BY_SOMEBODY = "cpuft: somebody killed this rank: the kernel has killed no process because memory ran out"
FOREIGN_STORE_ENTRY = "an entry in torch's store was not written by this run"
"""Text of a rank that ended because another program wrote to the store through which ranks find each other."""
OWNER_VARIABLE = "CPUFT_OWNER"
"""Environment variable with the number of the start of the run, which all of its processes have."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ANSWER_SECONDS = 5.0
_LATE_FINALIZE = (4, 2)
"""The first version of MPICH that leaves Hydra in an exit handler."""


def end_with_parent(signal_number: int = 9) -> None:
    """Let the kernel send this process a signal, SIGKILL, when its parent dies. This survives exec, but not fork. On
    macOS a thread of this process does, also when the launcher dies.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    else:
        follow_parent(signal_number, int(os.environ.get(SUPERVISED_VARIABLE) or 0))


def parse_cores(text: str, local_rank: int) -> tuple[int, ...]:
    """Return the hardware threads of a local rank from CPUFT_CORES: (2, 3) for rank 1 of "0,1;2,3"; () without an
    entry. Raises CpuftError: they are no numbers.
    """
    ranks = text.split(";")
    if not text or local_rank >= len(ranks):
        return ()
    cpus = ranks[local_rank].split(",")
    if not all(cpu.isdecimal() for cpu in cpus):
        raise CpuftError(f"CPUFT_CORES {text!r} is not valid: unset it in your shell, because cpuft launch sets it")
    return tuple(map(int, cpus))


def _check_place(world: World, environ: Mapping[str, str], hostname: str) -> None:
    planned = environ.get("CPUFT_WORLD_SIZE", "")
    if planned and planned != str(world.size):
        raise CpuftError(
            f"rank {world.rank} on {hostname} is in a world of {world.size} ranks, but the plan has {planned}: "
            f"unset RANK, WORLD_SIZE, PMI_* and OMPI_* in your shell, or give another --mpirun"
        )
    host = environ.get("CPUFT_HOSTNAME", hostname)
    if host != hostname:
        raise CpuftError(
            f"rank {world.rank} runs on {hostname}, but the plan put it on {host}: check the names in the hostfile"
        )
    # Options with their defaults are not passed on, and another version may have other defaults.
    version = environ.get("CPUFT_VERSION", __version__)
    if version != __version__:
        raise CpuftError(
            f"host {hostname} has cpuft {__version__}, and the launcher has cpuft {version}: install the same version "
            "on all hosts with cpuft provision hosts"
        )


def refuse_later_start(environ: Mapping[str, str]) -> None:
    """Raise CpuftError if state.json in or beside CPUFT_RUN_DIR has a later start than CPUFT_OWNER; nothing if these or
    the state are missing. A frozen mpirun may start ranks late.
    """
    run_dir, owner = environ.get("CPUFT_RUN_DIR", ""), environ.get(OWNER_VARIABLE, "")
    for folder in (run_dir, os.path.dirname(run_dir)) if owner.isdecimal() else ():
        with contextlib.suppress(OSError, ValueError), open(f"{folder}/state.json", encoding="utf-8") as file:
            there = load(dict[str, Any], parse_json(file.read()))
            number = load(int, there.get("owner"))
            if there.get("name") == os.path.basename(run_dir) and number > int(owner):
                raise CpuftError(f"start {number} of the run has begun, and this rank is of start {owner}: let it end")


def abort_job(environ: Mapping[str, str], code: int) -> None:
    """Tell Hydra to end all ranks and exit with `code`, which it does not by itself for a rank without MPI_Init. Hydra
    is told when it has read what this process printed, because it drops the rest. Without Hydra nothing happens, and
    srun ends the other ranks by itself. Source: the PMI-1 wire protocol, as MPICH's Hydra speaks it.
    """
    if environ.get("PMI_FD", "").isdecimal() and not is_started_by_srun(environ):
        with contextlib.suppress(OSError):
            _wait_until_read((1, 2))
            os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


def leave_job(mpi: Any, environ: Mapping[str, str]) -> None:
    """Tell Hydra that this process has finalized MPICH, if it has, and wait for its answer, at most 5 s. MPICH does so
    in an exit handler of C; without it, Hydra kills all ranks that have not ended and reports success. `mpi` is
    mpi4py.MPI. Nothing happens with another MPI, without Hydra, or with MPICH before 4.2, whose MPI_Finalize does it.
    Source as for `abort_job`.
    """
    version = re.match(r"MPICH Version:\s*(\d+)\.(\d+)", mpi.Get_library_version())
    if not mpi.Is_finalized() or not version or (int(version[1]), int(version[2])) < _LATE_FINALIZE:
        return
    if environ.get("PMI_FD", "").isdecimal() and not is_started_by_srun(environ):
        with contextlib.suppress(OSError):
            hydra = int(environ["PMI_FD"])
            if stat.S_ISSOCK(os.fstat(hydra).st_mode):
                os.write(hydra, b"cmd=finalize\n")
                if select.select([hydra], [], [], _ANSWER_SECONDS)[0]:
                    os.read(hydra, 4096)


def _wait_until_read(pipes: Collection[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while any(map(_count_unread, pipes)) and time.monotonic() < end:
        time.sleep(0.01)


def _count_unread(descriptor: int) -> int:
    """Return the number of bytes that wait in a pipe; 0 for a file, a terminal, or a closed descriptor."""
    import fcntl  # the launcher imports this file on Windows, too
    import termios

    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0


def _run_worker(command: list[str], environ: Mapping[str, str], world: World) -> int:
    """Run the worker as a child process, which is killed with this one, and return its exit code as a shell
    would. After SIGKILL, a line on standard error says whether memory had run out, if a counter tells.
    """
    kills = _count_memory_kills()
    child = os.fork()
    if not child:
        if sys.platform == "linux":  # on macOS the worker does it, see `cpuft.argv.run_module`
            end_with_parent()
        _start_program(command, environ)
    ended = start_host_watch(child, world, environ)
    status = os.waitpid(child, 0)[1]
    ended.set()
    remove_shared_memory(child)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and kills >= 0:
        reason = OUT_OF_MEMORY if _count_memory_kills() > kills else KILLED_BY_SOMEBODY
        print(reason, file=sys.stderr, flush=True)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _start_program(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, dict(environ))
    except OSError as error:
        print(f"cpuft: error: {command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:  # this is a copy of the rank's process, whose own cleaning up must not happen twice
        os._exit(1)


def _count_memory_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; -1: unknown. Source: mm/oom_kill.c."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), -1)
    return -1


def find_shared_memory(process: int) -> set[str]:
    """Return the paths of the shared memory of a process, given by number, that libfabric names /dev/shm/PID:N:N."""
    return set(glob.glob(f"/dev/shm/{process}:*"))


def remove_shared_memory(process: int) -> None:
    """Remove the shared memory (64 MB) that libfabric's shm provider leaves of this process number, which has ended."""
    for path in find_shared_memory(process):
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_abandoned_memory(folder: str = "/dev/shm", min_age: float = 60.0) -> None:
    """Remove shared memory of libfabric that ended processes of this user have left, after `min_age` seconds without a
    change: processes in another PID namespace seem to have ended, but need these segments only while they start.
    """
    for path in glob.glob(f"{folder}/*:*:*"):
        process = os.path.basename(path).partition(":")[0]
        with contextlib.suppress(OSError):
            found = os.stat(path)
            is_own_and_old = found.st_uid == os.getuid() and time.time() - found.st_mtime >= min_age
            if process.isdecimal() and is_own_and_old and not os.path.exists(f"/proc/{process}"):
                os.unlink(path)


def raise_open_files_limit(most: int = 65536) -> None:
    """Raise the soft limit of open files to `most`, or to the hard limit if that is lower; a higher one stays. It stays
    as it is where the system refuses the new one, as macOS may.
    """
    import resource  # as above

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 <= hard < most else max(soft, most), hard))


def format_failure(world: World, hostname: str, code: int, missing: Collection[int] = ()) -> str:
    """Return the line that tells the launcher which rank failed and for which ranks it had waited, for example
    "cpuft-rank-failed: rank 3 on node1 exit code 1 5 7" with the `missing` ranks 5 and 7.
    """
    return " ".join([f"{FAILED_MARK} rank {world.rank} on {hostname} exit code {code}", *map(str, sorted(missing))])


def format_steps(world: World, hostname: str, has_succeeded: bool, steps: int) -> str:
    """Return the launcher's line "cpuft-rank-steps: rank 0 on node1 ended after 40", or "failed" instead of "ended"."""
    return f"{STEPS_MARK} rank {world.rank} on {hostname} {'ended' if has_succeeded else 'failed'} after {steps}"


def parse_steps(text: str) -> tuple[int, bool, int] | None:
    """Return (rank, whether its script ended normally, optimizer steps) of the last `format_steps` line, else None."""
    found = re.findall(rf"^{STEPS_MARK} rank (\d{{1,9}}) on \S+ (ended|failed) after (\d{{1,9}})$", text, re.MULTILINE)
    return (int(found[-1][0]), found[-1][1] == "ended", int(found[-1][2])) if found else None


def parse_failure(text: str) -> tuple[int, str, int] | None:
    """Return (rank, host name, exit code) of the last `format_failure` line in a rank's standard error, or None."""
    found = re.findall(rf"^{FAILED_MARK} rank (\d{{1,9}}) on (\S+) exit code (\d{{1,9}})[ \d]*$", text, re.MULTILINE)
    return (int(found[-1][0]), found[-1][1], int(found[-1][2])) if found else None


def parse_missing_ranks(text: str) -> set[int]:
    """Return the ranks that all `format_failure` lines in a rank's standard error name as missing; empty for none."""
    found = re.findall(rf"^{FAILED_MARK} .* exit code \d+ (\d{{1,9}}(?: \d{{1,9}})*)$", text, re.MULTILINE)
    return {int(rank) for ranks in found for rank in ranks.split()}


def main() -> None:
    """Run the worker of `sys.argv` as this rank, and exit with its exit code, or with 2 if it is not started."""
    end_with_parent()
    hostname, code = socket.gethostname(), 2
    world = World(0, 1, 0, 1)
    remove_abandoned_memory()
    raise_open_files_limit()
    try:
        world = parse_world(os.environ)
        print(f"{STARTED_MARK} rank {world.rank} on {hostname}", file=sys.stderr, flush=True)
        _check_place(world, os.environ, hostname)
        refuse_later_start(os.environ)
        cores = parse_cores(os.environ.get("CPUFT_CORES", ""), world.local_rank)
        if os.environ.get("CPUFT_PIN") == "rank" and cores:
            os.sched_setaffinity(0, cores)
        environ = dict(os.environ) | take_secrets(os.environ, str(world.local_rank)) | world_variables(world)
        environ["CPUFT_CORES"] = ",".join(map(str, cores))
        code = _run_worker(unpack_argv(sys.argv[1:]), environ, world)
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
