"""The folder of a run: which one a new run gets, and the steps that make it on this machine and on the head host."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import PRIVATE, REMOVE
from cpuft.hosts.cluster import STATE_FILE, Cluster
from cpuft.launch.resume import ResumedRun
from cpuft.launch.run_locks import lock_run
from cpuft.launch.run_state import RunState, format_state
from cpuft.plans import Step, local_step

LEAST_FREE_BYTES = 256 << 20
"""Free bytes that the disk of a new run folder must have. A trained encoder takes a few hundred MB."""
# Not mkdir -p: of two launches at the same moment one must fail, and a printed plan must not run twice.
_MAKE_FOLDER = '{ mkdir "$1" || { [ ! -d "$1" ] || echo "another run took $1" >&2; exit 1; }; } && mkdir "$1/logs"'
_REUSE_FOLDER = (
    'mkdir -p "$1" && n=1 && while [ -e "$1/logs-$n" ]; do n=$((n+1)); done && '
    '{ [ ! -e "$1/logs" ] || mv "$1/logs" "$1/logs-$n"; } && mkdir "$1/logs"'
)
"""The logs of earlier attempts are kept as logs-N."""


def choose_run_dir(wanted: str, name: str) -> str:
    """Return the absolute path of a new run folder, without links, and do not make it.

    It is `wanted`, or if this is "" runs/NAME-YYYYMMDD-HHMMSS (local time) in the working directory, with -2 behind it
    or a higher number if this process is not the first to get that name. Raises CpuftError: `wanted` exists, its parent
    cannot be written to, or its disk has less than 256 MiB free.
    """
    # Hosts and caches know a run by its path, so the same folder must always have the same one.
    path = Path(os.path.realpath(wanted) if wanted else _find_unused_name(os.path.realpath(f"runs/{name}")))
    if path.exists():
        what = "the folder" if path.is_dir() else "a file"
        raise CpuftError(
            f"{what} {path} exists already, and a run needs a new folder: give --run-dir the name of a folder that "
            "does not exist yet, or leave --run-dir out, and cpuft makes a new folder in runs"
        )
    parent = next(folder for folder in path.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        raise CpuftError(f"{parent} is not writable: give another folder with --run-dir")
    free = shutil.disk_usage(parent).free
    if free < LEAST_FREE_BYTES:
        raise CpuftError(
            f"the disk of {parent} is full ({free >> 20} MB free, a run needs {LEAST_FREE_BYTES >> 20} MB): "
            f"make room, or give a folder on another disk with --run-dir"
        )
    return str(path)


_taken_name = ExitStack()
atexit.register(_taken_name.close)


def _find_unused_name(beginning: str) -> str:
    """Return a path with the time behind it that no other process on this machine gets in the same second."""
    _taken_name.close()  # of an earlier call, whose folder exists by now
    path = f"{beginning}-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2))):
        with suppress(CpuftError):
            _taken_name.enter_context(lock_run(f"{name}#name"))
            if not os.path.lexists(name):
                return name
    raise AssertionError


def plan_run_folder(cluster: Cluster, run_dir: str, resumed: ResumedRun | None) -> Step:
    """Return the step that makes the run folder `run_dir` of the head host, with a folder logs. It fails if the folder
    of a new run exists; of a `resumed` run, earlier logs become logs-N, or are removed if they were fetched.
    """
    script = f"{PRIVATE}private {cluster.folder} && umask 077 && " if cluster.works_remotely else ""
    if resumed and resumed.fetched_from == cluster.head:
        script = f'{REMOVE}{script}remove {cluster.folder} "$1/logs" "$1"/logs-* && '
    script += 'mkdir -p "$0" && ' + (_REUSE_FOLDER if resumed else _MAKE_FOLDER)
    command = ("sh", "-c", script, os.path.dirname(run_dir), run_dir)
    return Step("make the run folder", command, host=cluster.head)


def plan_claim(run_dir: str, state: RunState, is_resumed: bool) -> Step:
    """Return the step that makes the run folder here and writes the state to it; fails if a new run's folder exists."""
    words = ("claim", run_dir, f"{run_dir}/{STATE_FILE}", "1" if is_resumed else "")
    # No argument may be longer than 128 KiB, and the state names the host of each rank.
    return local_step("make the run folder on this machine", *words, stdin=format_state(state))
