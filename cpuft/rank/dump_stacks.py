"""What the ranks of a run on this host do, seen from outside: stacks, operations, and what the kernel says of them.

It is sent to each host on standard input and run there with RUN_DIR SECONDS as words, so it imports nothing of ours. It
prints a JSON list of `look`'s dictionaries.

A rank has two files in memory (`cpuft.rank.reporting`): one for stacks, which a signal handler in C fills even while
other code holds the GIL; one with its operations. Both are found among its descriptors: no file lies anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

SIGNAL = signal.SIGURG
"""Asks for the stacks. Whoever has no handler for it ignores it: nobody is ended by mistake."""
STACK, REPORT = "cpuft-stack", "cpuft-report"
_POLL_SECONDS = 0.02


def find_workers(run_dir: str, hostname: str, proc: str = "/proc") -> dict[int, dict[str, str]]:
    """Process number -> environment of what each rank of a run on this host runs: the children of its cpuft.rank."""
    found = {}
    for name in filter(str.isdecimal, os.listdir(proc)):
        environ = _read_environ(f"{proc}/{name}/environ")
        if environ.get("CPUFT_RUN_DIR") == run_dir and environ.get("CPUFT_HOSTNAME", hostname) == hostname:
            found[int(name)] = environ
    starters = {pid for pid in found if _read(f"{proc}/{pid}/cmdline").split("\0")[3:4] == ["cpuft.rank"]}
    parents = {pid: _read_stat(pid, proc)[1] for pid in found}
    return {pid: environ for pid, environ in found.items() if pid not in starters and parents[pid] in starters}


def look(run_dir: str, seconds: float) -> list[dict[str, Any]]:
    """Of each rank here: rank, pid, state, wchan, stack (faulthandler's text), report, its age; in `seconds` at most.

    The kernel's word is from before the signal, which wakes a rank. One that is stopped gets none.
    """
    sights, asked = list[dict[str, Any]](), list[tuple[dict[str, Any], str, int]]()
    for pid, environ in find_workers(run_dir, socket.gethostname()).items():
        files = _find_files(pid)
        sight = {
            "rank": int(environ["RANK"]),
            "pid": pid,
            "state": _read_stat(pid)[0],
            "wchan": _read(f"/proc/{pid}/wchan").strip("0"),
            "report": _read(files.get(REPORT, "")).strip("\0 "),
            "age": _find_age(files.get(REPORT, "")),
            "stack": "",
        }
        sights.append(sight)
        if STACK in files and sight["state"] in ("R", "S", "D"):
            asked.append((sight, files[STACK], len(_read(files[STACK]))))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(_has_written(one["pid"], path, before) for one, path, before in asked):
        time.sleep(_POLL_SECONDS)
    for sight, path, before in asked:
        sight["stack"] = _read(path)[before:]
    return sights


def _has_written(pid: int, path: str, before: int) -> bool:
    """Whether stacks have come, and the handler, while which runs the signal is blocked, is done: proc(5)."""
    status = dict(line.split(":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":\t" in line)
    busy = any(int(status.get(name, "0"), 16) >> SIGNAL - 1 & 1 for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return len(_read(path)) > before and not busy


def _find_files(pid: int) -> dict[str, str]:
    """Where the rank's files in memory can be opened, by their names."""
    found = {}
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("/memfd:cpuft-"):
                found[target.split(":")[1].split()[0]] = f"{folder}/{name}"
    except OSError:
        pass
    return found


def _find_age(path: str) -> float:
    """Seconds since a file was written."""
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0


def _read_environ(path: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in _read(path).split("\0") if "=" in line)


def _read_stat(pid: int, proc: str = "/proc") -> tuple[str, int]:
    """State letter and parent of a process: proc(5). The name before them may hold anything."""
    words = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return (words[0], int(words[1])) if words else ("", 0)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1], float(sys.argv[2]))))
