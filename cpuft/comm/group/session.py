"""The one register and the one watchdog of a process, shared by all its groups."""

from __future__ import annotations

import atexit
import os
import threading
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import Store

from cpuft.comm.watch.deadlines import Watch
from cpuft.comm.watch.operations import Register, Traffic
from cpuft.errors import CpuftError
from cpuft.rank.process import remove_shared_memory
from cpuft.rank.reporting import start_reporting
from cpuft.rank.script import flush_and_exit

TIMEOUT_VARIABLE = "CPUFT_COMM_TIMEOUT"

register = Register()
_watch: Watch | None = None
_lock = threading.Lock()


def open_watch(store: Store, group_rank: int, ranks: tuple[int, ...]) -> Watch:
    """The process's watchdog; the first group that asks brings its `ranks` together."""
    global _watch
    with _lock:
        if _watch is None:
            start_reporting(register.report)
            _watch = Watch(register)
            _watch.join(store, ranks[group_rank], ranks, first=group_rank == 0)
        return _watch


def close_watch() -> None:
    """End watching, when the world's group is destroyed."""
    global _watch
    with _lock:
        if _watch is not None:
            _watch.close()
            _watch = None


def take_traffic() -> Traffic:
    """Operations and payload bytes this rank has handed to cpuft's groups since the last call: once a step, say."""
    return register.take_traffic()


def leave(code: int) -> NoReturn:
    """End the process for good, after Python's own exit handlers but without those of C.

    A process that has used both oneCCL and Intel MPI must end so: they share libfabric, whose shm provider (that of
    impi-rt 2021.18) then frees its endpoints twice at exit and aborts, whatever the exit code was to be.
    """
    atexit._run_exitfuncs()
    remove_shared_memory(os.getpid())
    flush_and_exit(code)


def timeout_seconds(given: timedelta) -> float:
    """The deadline of a group's operations: CPUFT_COMM_TIMEOUT if set, else what init_process_group was given."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return given.total_seconds()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise CpuftError(f"{TIMEOUT_VARIABLE}={text} is no number of seconds: unset it, or give for example 300")
    return seconds
