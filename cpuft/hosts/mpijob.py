"""A job of Kubeflow's operator (MPIJob): the way to its workers, who are known by the job's own key.

The operator gives all pods of a job one key, for logins. Workers that `python -m cpuft.hosts.mpijob` starts show it as
their host key, too, so that no key has to be believed on first use: whoever has the job's key is of the job.

Source: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.files import make_private, write_text
from cpuft.hosts import transport as transport_module
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport

PORT = 2222
"""As in the operator's own images: who is not root may listen there, and a node's sshd is elsewhere."""
_KEYS = Path("~/.ssh")
"""Where the operator puts the job's key."""
_FOLDER = Path(f"/var/tmp/cpuft-mpijob-{os.geteuid()}")
"""The same on all pods: mpirun's ssh on a worker reads what is there, too."""
_SSHD = "/usr/sbin/sshd"
_CONFIG = """Host *
    Port {port}
    HostKeyAlias mpijob
    IdentityFile {keys}/id_rsa
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    UpdateHostKeys no
    BatchMode yes
"""
_OPTIONS = (
    "StrictModes=no",  # a secret's folder is open to all, and only this pod sees it
    "PasswordAuthentication=no",
    "MaxStartups=100:30:300",  # all hosts connect at once
    "MaxSessions=100",
    "ClientAliveInterval=5",
    "ClientAliveCountMax=3",
    "PidFile=none",
)
_START_SECONDS, _EVERY_SECONDS = 60.0, 1.0
"""A pod that has just become ready has a name seconds later; how often it is asked for."""
T = TypeVar("T")


@dataclass(frozen=True)
class MpiJobTransport(Transport):
    """The way to the pods of a job."""

    until: float = 0.0
    """Pods may still be starting: so long, in time.monotonic's seconds, they are asked again."""

    def is_here(self, host: Host) -> bool:
        """Whether it is the launcher's own pod, which may be a worker, too; pods are called as their names begin."""
        return host.name.partition(".")[0] in (socket.gethostname(), "localhost")

    def address(self, host: Host) -> str:
        """As `Transport.address`."""
        return self._patiently(host, partial(Transport.address, self, host))

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        """As `Transport.run`. Raises CpuftError: also for a worker without the job's key."""
        return self._patiently(host, partial(Transport.run, self, host, argv, stdin, seconds))

    def _patiently(self, host: Host, ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except CpuftError as error:
                kind = error.kind if isinstance(error, transport_module.HostError) else transport_module.UNREACHABLE
                if kind == transport_module.KEY_CHANGED:
                    raise CpuftError(
                        f"host {host.name} does not have the job's key for its host key: "
                        f"start workers by python -m cpuft.hosts.mpijob, or name your own --ssh-config"
                    ) from None
                if kind != transport_module.UNREACHABLE or time.monotonic() > self.until:
                    raise
            time.sleep(_EVERY_SECONDS)


def open_mpijob_transport(keys: Path = _KEYS, folder: Path = _FOLDER) -> MpiJobTransport:
    """The way to a job's pods, from each of them. Raises CpuftError: the operator has put no key here."""
    return MpiJobTransport(trust(keys.expanduser(), folder), until=time.monotonic() + _START_SECONDS)


def trust(keys: Path, folder: Path) -> str:
    """Write into `folder` what ssh needs to know pods by the key in `keys`; the path of its configuration.

    Raises CpuftError: there is none.
    """
    try:
        kind, key = (keys / "id_rsa.pub").read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError) as error:
        raise CpuftError(
            f"this pod has no key of an MPIJob ({error}): let sshAuthMountPath be {keys}, or name --ssh-config"
        ) from None
    make_private(folder, "start the pod anew")
    write_text(folder / "known_hosts", f"mpijob {kind} {key}\n")
    write_text(folder / "ssh_config", _CONFIG.format(port=PORT, keys=keys, folder=folder))
    return str(folder / "ssh_config")


def sshd_command(keys: Path) -> tuple[str, ...]:
    """A worker's sshd, which has the job's key for its host key."""
    return (_SSHD, "-D", "-e", "-p", str(PORT), "-h", f"{keys}/id_rsa", *(f"-o{option}" for option in _OPTIONS))


def main() -> None:
    """A worker, from its start. Exit code 2, with one line: it has no key, or no sshd."""
    keys = _KEYS.expanduser()
    try:
        trust(keys, _FOLDER)
        if not os.path.exists(_SSHD):
            raise CpuftError(f"there is no {_SSHD}: take an image that has openssh-server")
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(2)
    if not os.geteuid():
        os.makedirs("/run/sshd", exist_ok=True)  # where it locks up its half that has no rights
    os.execv(_SSHD, sshd_command(keys))


if __name__ == "__main__":
    main()
