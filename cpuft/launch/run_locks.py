"""Know which runs are active, so that their stacks can be read and no second launch works in the same folder.

Both are files in the user's cache that a launch keeps locked. Linux releases the locks however the launch ends.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpuft import transfer
from cpuft.errors import CpuftError
from cpuft.files import cache_folder, cache_path, hash_text, is_locked
from cpuft.hosts import slurm
from cpuft.hosts.cluster import Access, Cluster
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


@contextmanager
def register_run(run_dir: str, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep a note about the run in `run_dir`, an absolute path without links, in the user's cache inside the `with`
    block, for `find_active_run`. If the cache cannot be written, or another process has this note, there is no note.
    """
    hosts, access = tuple(cluster.hosts[name] for name in cluster.rank_hosts), cluster.access
    note = _RunNote(cluster.work_dir(run_dir), hosts, access.python, access.transport.config)
    with ExitStack() as stack:
        with suppress(OSError, CpuftError):
            held = stack.enter_context(_hold(_name_file(cache_folder(environ), run_dir, "run")))
            os.truncate(held, 0)
            os.write(held, json.dumps(asdict(note)).encode())
        yield


@contextmanager
def _hold(path: Path) -> Iterator[int]:
    """Keep a file and its lock inside; the value is its descriptor. Raises BlockingIOError: another process has it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    held = transfer.open_locked(str(path))
    try:
        yield held
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(held)


@contextmanager
def lock_run(run_dir: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep other launches of this user on this machine out of a run folder, whether or not the folder exists yet. If
    the user's cache cannot be written, nothing is locked. Raises CpuftError at once if another launch has the lock.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_hold(_name_file(cache_folder(environ), run_dir, "lock")))
        except BlockingIOError:
            advice = "wait until it has ended, or stop it, and try again"
            raise CpuftError(f"another cpuft launch is working in the run folder {run_dir}: {advice}") from None
        except (OSError, CpuftError):
            pass
        yield


def find_active_run(run: str, environ: Mapping[str, str]) -> ActiveRun:
    """Return where the run with the folder `run` is active, from the note that its launch keeps in the user's cache.
    Asks no host. Raises CpuftError: no run that was launched on this machine is active in the folder.
    """
    run_dir, note = os.path.realpath(run), None
    with suppress(OSError, ValueError):
        path = _name_file(cache_path(environ), run_dir, "run")
        if is_locked(path):  # a launch that was killed leaves its note
            note = load(_RunNote, parse_json(path.read_text(encoding="utf-8")))
    if not note and not Path(run_dir).is_dir():
        raise CpuftError(
            f"there is no folder {run_dir}: give the folder of a run that is running now, for example runs/mrpc-np2"
        )
    if not note:
        raise CpuftError(
            f"no run is active in the folder {run}: the run has ended, or no cpuft launch of yours on this machine "
            f"started it; look into {run}/logs for what its ranks printed"
        )
    transport = slurm.find_transport(environ) or SshTransport(note.ssh_config)
    return ActiveRun(note.work, note.hosts, Access(transport, replace(NO_CLUSTER, python=note.python)))


def _name_file(cache: Path, run_dir: str, ending: str) -> Path:
    # The cache may be on a shared disk, and the same path on another machine may be another folder.
    name = hash_text(f"{socket.gethostname()}:{os.path.realpath(run_dir)}", 24)
    return cache / "going" / f"{name}.{ending}"
