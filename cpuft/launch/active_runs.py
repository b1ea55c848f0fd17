"""Know which runs are active, so that their stacks can be read and no second launch works in the same folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpuft import transfer
from cpuft.errors import CpuftError
from cpuft.files import cache_folder, cache_path, hash_text, write_text
from cpuft.hosts.cluster import Access, Cluster, find_slurm
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import NO_CLUSTER
from cpuft.hosts.transport import SshTransport
from cpuft.launch.stack_dumps import ActiveRun
from cpuft.serialization import load, parse_json


@dataclass(frozen=True)
class _RunNote:
    """What the user's cache knows about an active run."""

    work: str
    """The run folder as the ranks see it."""
    hosts: tuple[Host, ...]
    """The host of each rank."""
    python: str
    """Path of the training environment's Python on the hosts."""
    ssh_config: str
    """ssh's client configuration for the hosts; empty for the user's own."""
    launched_on: str
    """Name of the machine where `cpuft launch` runs."""
    pid: int
    started: str
    """When that process started, in ticks since boot; another process may have its number by now."""


@contextmanager
def register_run(run_dir: str, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep an entry for a run in the user's cache inside the `with` block, so that `find_active_run` finds the run. If
    the cache folder cannot be written, the block runs without an entry.
    """
    hosts = tuple(assignment.host for assignment in cluster.assignments for _ in range(assignment.ranks))
    access, pid = cluster.access, os.getpid()
    entry = _RunNote(
        cluster.work_dir(run_dir),
        hosts,
        access.python,
        access.transport.config,
        launched_on=socket.gethostname(),
        pid=pid,
        started=_find_start(pid),
    )
    with suppress(OSError, CpuftError):
        write_text(_entry_path(cache_folder(environ), run_dir), json.dumps(asdict(entry)))
    try:
        yield
    finally:
        with suppress(OSError, CpuftError):
            _entry_path(cache_path(environ), run_dir).unlink()


@contextmanager
def lock_run(run_dir: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep other launches of this user on this machine out of a run folder, whether or not the folder exists yet.
    Without a cache folder nothing is locked. Raises CpuftError, without waiting: another launch has the lock.
    """
    # The cache may be on a shared disk, and the same path on another machine may be another folder.
    name = hash_text(f"{socket.gethostname()}:{os.path.realpath(run_dir)}", 24)
    lock: tuple[Path, int] | None = None
    try:
        path = cache_folder(environ) / "going" / f"{name}.lock"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = path, transfer.open_locked(str(path))
    except BlockingIOError:
        advice = "wait until it has ended, or stop it, and try again"
        raise CpuftError(f"another cpuft launch is working in the run folder {run_dir}: {advice}") from None
    except (OSError, CpuftError):
        pass
    try:
        yield
    finally:
        if lock:
            with suppress(OSError):
                lock[0].unlink()
            os.close(lock[1])


def find_active_run(run: str, environ: Mapping[str, str]) -> ActiveRun:
    """Return where a run is active, from the entry that its launch keeps in the user's cache. Asks no host. Raises
    CpuftError: it is not active, or was launched on another machine.
    """
    run_dir = os.path.realpath(run)
    try:
        text = _entry_path(cache_path(environ), run_dir).read_text(encoding="utf-8")
        entry = load(_RunNote, parse_json(text))
    except (OSError, ValueError):
        if Path(run_dir).is_dir():
            raise CpuftError(
                f"no run is active in the folder {run}: the run has ended, or no cpuft launch of yours started it; "
                f"look into {run}/logs for what its ranks printed"
            ) from None
        raise CpuftError(
            f"there is no folder {run_dir}: give the folder of a run that is running now, for example runs/mrpc-np2"
        ) from None
    if entry.launched_on != socket.gethostname():
        raise CpuftError(f"run {run} was launched on {entry.launched_on}: run cpuft stacks there")
    if entry.started != _find_start(entry.pid):
        raise CpuftError(
            f"the run in {run} has ended, and its launch was killed: look into {run}/logs for what its ranks printed"
        )
    transport = find_slurm(environ) or SshTransport(entry.ssh_config)
    return ActiveRun(entry.work, entry.hosts, Access(transport, replace(NO_CLUSTER, python=entry.python)))


def _entry_path(cache: Path, run_dir: str) -> Path:
    return cache / "going" / f"{hash_text(run_dir, 24)}.run"


def _find_start(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if it does not exist. See proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""
