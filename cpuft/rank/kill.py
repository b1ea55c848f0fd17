"""Kill what is left of a run on this host: its ranks, and the mpirun processes that started them.

The launcher sends this file to each host on standard input and runs it there with RUN_DIR as its argument. It imports
nothing of cpuft and prints the numbers of the processes that it killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys

_STARTERS = re.compile(r"hydra_.*|mpiexec.*|orted|prted")
"""Names of mpirun's own processes on a host. They have no CPUFT_RUN_DIR, so they are found as parents of ranks."""


def find_processes(run_dir: str, proc: str = "/proc", uid: int | None = None) -> list[int]:
    """Return the numbers of this user's processes that belong to the run in `run_dir`, ranks before their parents.

    A process belongs to the run if one NUL-separated entry of its environment is exactly `CPUFT_RUN_DIR=run_dir`, or if
    it is one of mpirun's processes above such a process. This process and its own parents are never among them. The
    list is empty for an empty `run_dir` and for a run without processes.

    Parameters
    ----------
    run_dir: the run's folder, as its ranks know it.
    proc: where the kernel's process table is mounted.
    uid: number of the user whose processes are looked at; by default the user who runs this.
    """
    if not run_dir:
        return []
    uid = os.geteuid() if uid is None else uid
    entry = b"CPUFT_RUN_DIR=" + os.fsencode(run_dir)
    spared = {0, 1, *_list_parents(os.getpid(), proc)}
    found = []
    for name in filter(str.isdecimal, os.listdir(proc)):
        if not _belongs_to(name, proc, uid) or entry not in _read(f"{proc}/{name}/environ").split(b"\0"):
            continue
        first, *above = _list_parents(int(name), proc)
        found.append(first)
        for pid in above:
            starter = _read(f"{proc}/{pid}/comm").decode(errors="replace").strip()
            if not _STARTERS.fullmatch(starter) or not _belongs_to(str(pid), proc, uid):
                break
            found.append(pid)
    return [pid for pid in dict.fromkeys(found) if pid not in spared]


def _list_parents(pid: int, proc: str) -> list[int]:
    """Return a process, its parent, and so on up to process 1."""
    pids = [pid]
    while pids[-1] > 1:
        # The name before the fields may hold anything, parentheses too: proc(5).
        fields = _read(f"{proc}/{pids[-1]}/stat").rpartition(b")")[2].split()
        above = int(fields[1]) if len(fields) > 1 else 0
        if above in pids:
            break
        pids.append(above)
    return pids


def _belongs_to(name: str, proc: str, uid: int) -> bool:
    try:
        return os.stat(f"{proc}/{name}").st_uid == uid
    except OSError:
        return False


def _read(path: str) -> bytes:
    """Return a file's content, or nothing if the process has ended or is not this user's."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def main(run_dir: str) -> None:
    """Send SIGKILL to the run's processes on this host, and print the number of each killed process on a line."""
    for pid in find_processes(run_dir):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            print(pid)


if __name__ == "__main__":
    main(sys.argv[1])
