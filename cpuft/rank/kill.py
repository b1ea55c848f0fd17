"""Kill what is left of a run on this host: its supervisor, mpirun, ssh, its ranks, and the processes above them, and
the detached command that would start it again.

The launcher sends this file to each host on standard input and runs it there with RUN_DIR and OWNER as its arguments:
processes of later starts of the run stay. It imports nothing of cpuft and prints the numbers of the killed processes.
"""

import contextlib
import os
import re
import signal
import sys

_STARTERS = re.compile(r"hydra_.*|mpiexec.*|orted|prted")
"""Names of mpirun's own processes on a host. Those on other hosts than the head host have no CPUFT_RUN_DIR, so they are
found as parents of ranks, or by the name of mpirun's ssh program on their command line."""
SSH_NAME = "ssh-of-start-"
"""With the number of the start, the name of that program, in the folder that holds the run's folder."""


def find_processes(run_dir: str, owner: int, proc: str = "/proc", uid: "int | None" = None) -> "list[int]":
    """Return the numbers of this user's processes that belong to the run in `run_dir`, ranks before their parents.

    These are processes with exactly `CPUFT_RUN_DIR=run_dir`, mpirun's processes above them, those whose command line
    names the ssh program of the run's mpirun, and the run's detached command, but none of starts with a number above
    `owner`, nor this process and its own parents. [] if `run_dir` is "", and on macOS, which has no procfs: there,
    processes of cpuft end with their parents by themselves. `proc` is where procfs is mounted.
    """
    if not run_dir or not os.path.isdir(proc):
        return []
    uid = os.geteuid() if uid is None else uid
    entry, place = b"CPUFT_RUN_DIR=" + os.fsencode(run_dir), os.fsencode(f"{os.path.dirname(run_dir)}/{SSH_NAME}")
    root, run, name = ["", "", *run_dir.rsplit("/", 2)][-3:]
    command = os.fsencode(f"--run-dir={root}/detached/{run}/run/{name}")
    spared = {0, 1, *_list_parents(os.getpid(), proc)}
    found = []
    for name in filter(str.isdecimal, os.listdir(proc)):
        if not _belongs_to(name, proc, uid):
            continue
        entries, words = (_read(f"{proc}/{name}/{file}") for file in ("environ", "cmdline"))
        own = entry in entries.split(b"\0") or command in words.split(b"\0")
        starts = re.findall(rb"(?:^|\0)CPUFT_OWNER=([0-9]+)(?=\0)", entries) if own else []
        starts += re.findall(re.escape(place) + rb"([0-9]+)", words)
        if not (own or starts) or max([0, *map(int, starts)]) > owner:
            continue
        first, *above = _list_parents(int(name), proc)
        found.append(first)
        for pid in above:
            starter = _read(f"{proc}/{pid}/comm").decode(errors="replace").strip()
            if not _STARTERS.fullmatch(starter) or not _belongs_to(str(pid), proc, uid):
                break
            found.append(pid)
    return [pid for pid in dict.fromkeys(found) if pid not in spared]


def _list_parents(pid: int, proc: str) -> "list[int]":
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
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def kill_processes(run_dir: str, owner: int) -> "list[int]":
    """Send SIGKILL to the run's processes here, of its starts up to number `owner`; return their process ids."""
    killed = []
    for pid in find_processes(run_dir, owner):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


if __name__ == "__main__":
    for number in kill_processes(sys.argv[1], int(sys.argv[2])):
        print(number)
