"""Starting ranks with a real mpirun, and becoming one of them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import cpuft
from cpuft.hosts.facts import find_free_port
from cpuft.rank.process import remove_abandoned_memory
from cpuft.train.startup import resume_garbage_collection

MPIRUN = Path(sys.prefix, "bin", "mpiexec.hydra")
ROOT = Path(cpuft.__file__).parents[1]
_START = "import gc, runpy; gc.disable(); runpy.run_module('cpuft.rank.script', run_name='__main__', alter_sys=True)"
"""Runs a script without collecting garbage, which is a fifth of the time in which torch is imported."""


def settings(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "I_MPI_FABRICS": "shm:ofi",
        "FI_PROVIDER": "tcp",
        "OMP_NUM_THREADS": "1",
        "CCL_KVS_IFACE": "lo",
        "CCL_LOG_LEVEL": "error",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        **more,
    }


def mpirun(
    ranks: int, module: str, *arguments: str, seconds: float = 150, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a module on this many ranks, and return its exit code and output.

    Like the launcher, this runs the module with cpuft.rank.script, so that no interpreter is finalized while gloo's
    threads need it.
    """
    command = [str(MPIRUN), "-iface", "lo", "-host", "localhost", "-n", str(ranks)]
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    command += [sys.executable, "-c", _START, str(path), *arguments]
    try:
        return subprocess.run(
            command, env=settings(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
    finally:
        # There is no cpuft.rank here that would clean up after a killed rank.
        remove_abandoned_memory(min_age=0.0)


@functools.cache
def _start_forks() -> subprocess.Popen[str]:
    environ = {name: text for name, text in settings().items() if name != "TEST_OF"}  # it outlives a test
    command = [sys.executable, "-m", "tests.comm.fork"]
    forks = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(forks.communicate)
    return forks


def fork_ranks(
    ranks: int, module: str, *arguments: str, seconds: float = 150, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a module as `mpirun` does, but fork the ranks from a process that has imported torch, which takes two to four
    seconds of a core. Their environment cannot change what torch reads when it is imported, and they have no MPI.
    """
    forks = _start_forks()
    assert forks.stdin
    assert forks.stdout
    with tempfile.NamedTemporaryFile() as output:
        words = [str(ROOT.joinpath(*module.split(".")).with_suffix(".py")), *arguments]
        request = {"ranks": ranks, "words": words, "environ": settings(**more), "folder": os.getcwd()}
        print(json.dumps(request | {"output": output.name, "seconds": seconds}), file=forks.stdin, flush=True)
        code, is_late = json.loads(forks.stdout.readline())
        text = output.read().decode(errors="replace")
    remove_abandoned_memory(min_age=0.0)
    if is_late:
        raise subprocess.TimeoutExpired(words, seconds, text)
    return subprocess.CompletedProcess(words, code, text)


def become_rank() -> None:
    """Set the variables that `cpuft.rank` sets for a worker, and collect garbage from here on."""
    resume_garbage_collection()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = os.environ["PMI_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = os.environ["PMI_SIZE"]


def simulate_hosts(ranks_per_host: int) -> None:
    """Let the launcher's variables say that each host has this many consecutive ranks, and the last one the rest."""
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    first = rank // ranks_per_host * ranks_per_host
    os.environ["MPI_LOCALRANKID"] = os.environ["LOCAL_RANK"] = str(rank - first)
    os.environ["MPI_LOCALNRANKS"] = os.environ["LOCAL_WORLD_SIZE"] = str(min(ranks_per_host, size - first))


def start_late(backend: str, seconds: float) -> None:
    """Form the group of all ranks, in which a message may take so long; importing everything may take a minute."""
    from torch._C._distributed_c10d import TCPStore

    from cpuft import comm

    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    comm.start(backend, timeout_seconds=seconds, store=store, rank=rank, world_size=size)
