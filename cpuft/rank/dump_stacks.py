"""Print what the ranks of a run on this host are doing: their stacks, operations, and state in the kernel.

The launcher sends this file to each host on standard input and runs it there with RUN_DIR and SECONDS as its arguments.
It imports nothing of cpuft and prints a JSON list. Each rank has two files in memory (`cpuft.rank.diagnostics`), found
among its file descriptors: one for its stacks, which a signal handler in C fills even while other code holds the GIL,
and one with its operations.
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

SIGNAL = getattr(signal, "SIGURG", signal.SIGTERM)  # the launcher imports this file on Windows, too
"""Requests the stacks. A process without a handler ignores this signal, so that none is ended by mistake."""
STACK_FILE, REPORT_FILE = "cpuft-stack", "cpuft-report"
_POLL_SECONDS = 0.02


def find_workers(run_dir: str, hostname: str, proc: str = "/proc") -> dict[int, dict[str, str]]:
    """Return by process number the environment of a run's workers on this host, the children of its `cpuft.rank`
    processes. `run_dir` is compared as a text with CPUFT_RUN_DIR, and `hostname` with CPUFT_HOSTNAME, in which
    simulated hosts on this machine differ. `proc` is where procfs is mounted.
    """
    found = {}
    for name in filter(str.isdecimal, os.listdir(proc)):
        environ = _read_environ(f"{proc}/{name}/environ")
        if environ.get("CPUFT_RUN_DIR") == run_dir and environ.get("CPUFT_HOSTNAME", hostname) == hostname:
            found[int(name)] = environ
    starters = {pid for pid in found if _read(f"{proc}/{pid}/cmdline").split("\0")[3:4] == ["cpuft.rank"]}
    parents = {pid: _read_stat(pid, proc)[1] for pid in found}
    return {pid: environ for pid, environ in found.items() if pid not in starters and parents[pid] in starters}


def dump_stacks(run_dir: str, seconds: float) -> list[dict[str, Any]]:
    """Return for each rank on this host a dictionary with `rank`, `pid`, `state` (letter of proc(5), "" if the process
    has ended), `wchan` (kernel function in which it sleeps, or ""), `stack` (faulthandler's text), `report` (JSON of
    `cpuft.rank.diagnostics`, or ""), and `age` (seconds since the report was written; 0 without a report).

    SIGURG lets the ranks write their stacks. State and wchan are read before the signal, which wakes a rank. A rank
    that is stopped, or has not called `start_reporting`, has no stack. After `seconds`, a stack may be incomplete.
    """
    dumps, requested = list[dict[str, Any]](), list[tuple[dict[str, Any], str, int, list[str]]]()
    for pid, environ in find_workers(run_dir, socket.gethostname()).items():
        files = _find_memory_files(pid)
        dump = {
            "rank": int(environ["RANK"]),
            "pid": pid,
            "state": _read_stat(pid)[0],
            "wchan": _read(f"/proc/{pid}/wchan").strip("0"),
            "report": _read(files.get(REPORT_FILE, "")).strip("\0 "),
            "age": _read_age(files.get(REPORT_FILE, "")),
            "stack": "",
        }
        dumps.append(dump)
        if STACK_FILE in files and dump["state"] in ("R", "S", "D"):
            threads = [one for one in _list_folder(f"/proc/{pid}/task") if "SigBlk" not in _find_masks(pid, one)]
            requested.append((dump, files[STACK_FILE], len(_read(files[STACK_FILE])), threads))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(
        _has_written(dump["pid"], path, size, threads) for dump, path, size, threads in requested
    ):
        time.sleep(_POLL_SECONDS)
    for dump, path, size, _ in requested:
        dump["stack"] = _read(path)[size:]
    return dumps


def _has_written(pid: int, path: str, size: int, threads: list[str]) -> bool:
    """Return whether stacks were written after the first `size` characters, and the handler has ended. The kernel
    blocks the signal in the thread that runs its handler, a moment after the signal stops being pending. So only once
    the file has grown does a signal that is not blocked mean the handler's end. Threads but `threads` may block it.
    """
    return len(_read(path)) > size and not any(_find_masks(pid, thread) for thread in threads)


def _find_masks(pid: int, thread: str) -> list[str]:
    """Return which masks of proc(5) contain the signal: pending for the thread, for its process, or blocked."""
    status = _read(f"/proc/{pid}/task/{thread}/status").splitlines()
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    return [name for name in ("SigPnd", "ShdPnd", "SigBlk") if int(fields.get(name, "0"), 16) >> SIGNAL - 1 & 1]


def _find_memory_files(pid: int) -> dict[str, str]:
    found = {}
    folder = f"/proc/{pid}/fd"
    for name in _list_folder(folder):
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("/memfd:cpuft-"):
                found[target.split(":")[1].split()[0]] = f"{folder}/{name}"
    return found


def _list_folder(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_age(path: str) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0


def _read_environ(path: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in _read(path).split("\0") if "=" in line)


def _read_stat(pid: int, proc: str = "/proc") -> tuple[str, int]:
    """Return (state letter, parent) of a process; ("", 0) if it has ended. The name before them may hold anything."""
    fields = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if fields else ("", 0)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(dump_stacks(sys.argv[1], float(sys.argv[2]))))
