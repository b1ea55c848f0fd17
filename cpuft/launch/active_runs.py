"""Know which runs are active, so that their stacks can be read and no second launch works in the same folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import cache_folder, cache_path, hash_text, write_text
from cpuft.hosts.cluster import Access, Cluster, find_slurm
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport
from cpuft.launch.stack_dumps import ActiveRun
from cpuft.serialization import load, parse_json


@dataclass(frozen=True)
class Note:
    """What whoever looks at a run has to know of its launch."""

    work: str
    hosts: tuple[Host, ...]
    """Of each rank."""
    python: str
    ssh_config: str
    launched_on: str
    """Name of the machine where the launch runs."""
    pid: int
    started: str
    """Of the launch: its number may be another process's by now."""


@contextmanager
def noted(run_dir: str, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep a note of a run while it goes on. Without a cache it goes on as well, but nobody can ask for its stacks."""
    hosts = tuple(assignment.host for assignment in cluster.assignments for _ in range(assignment.ranks))
    access, pid = cluster.access, os.getpid()
    place = cluster.work_dir(run_dir), hosts, access.python, access.transport.config
    note = Note(*place, socket.gethostname(), pid, _find_start(pid))
    with suppress(OSError, CpuftError):
        write_text(_find_note(cache_folder(environ), run_dir), json.dumps(asdict(note)))
    try:
        yield
    finally:
        with suppress(OSError, CpuftError):
            _find_note(cache_path(environ), run_dir).unlink()


@contextmanager
def lock_run(run_dir: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep every other launch of this user on this machine out of a run's folder, whether or not it exists yet.

    Without a cache folder nobody is kept out, and the run goes on all the same.

    Raises
    ------
    CpuftError: another launch works in this folder.
    """
    # The cache may be on a shared disk, and the same path on another machine may be another folder.
    name = hash_text(f"{socket.gethostname()}:{os.path.realpath(run_dir)}", 24)
    held: tuple[Path, int] | None = None
    try:
        path = cache_folder(environ) / "going" / f"{name}.lock"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        held = path, _lock(path)
    except BlockingIOError:
        advice = "wait until it has ended, or stop it, and try again"
        raise CpuftError(f"another cpuft launch is working in the run folder {run_dir}: {advice}") from None
    except (OSError, CpuftError):
        pass
    try:
        yield
    finally:
        if held:
            with suppress(OSError):
                held[0].unlink()
            os.close(held[1])


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock of the file at `path`. Raises BlockingIOError: somebody else has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had the lock before may have removed the file since it was opened here: such a lock keeps nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def find_active_run(run: str, environ: Mapping[str, str]) -> ActiveRun:
    """Where a run goes on.

    Raises CpuftError: there is no such run, it is over, or it was launched elsewhere.
    """
    run_dir = str(Path(run).absolute())
    try:
        note = load(Note, parse_json(_find_note(cache_path(environ), run_dir).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        if Path(run_dir).is_dir():
            raise CpuftError(
                f"no run is active in the folder {run}: the run has ended, or no cpuft launch of yours started it; "
                f"look into {run}/logs for what its ranks printed"
            ) from None
        raise CpuftError(
            f"there is no folder {run_dir}: give the folder of a run that is running now, for example runs/mrpc-np2"
        ) from None
    if note.launched_on != socket.gethostname():
        raise CpuftError(f"run {run} was launched on {note.launched_on}: ask for its stacks there")
    if note.started != _find_start(note.pid):
        raise CpuftError(
            f"the run in {run} has ended, and its launch was killed: look into {run}/logs for what its ranks printed"
        )
    transport = find_slurm(environ) or Transport(note.ssh_config)
    return ActiveRun(note.work, note.hosts, Access(transport, note.python))


def _find_note(cache: Path, run_dir: str) -> Path:
    return cache / "going" / f"{hash_text(run_dir, 24)}.run"


def _find_start(pid: int) -> str:
    """When a process started, in ticks since boot; "" when there is none: proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""
