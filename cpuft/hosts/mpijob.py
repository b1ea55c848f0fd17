"""The pods of an MPIJob of Kubeflow's operator, or of a TrainJob of its Trainer with the same key and hostfile: how the
launcher reaches them, and what its workers run.

The operator gives one key pair to all pods of a job, for logins. Workers that `python -m cpuft.hosts.mpijob` starts use
it as their host key, too, so that no host key has to be accepted on first use: whoever has the job's key is in the job.
All pods of a job run as the same user, which need not be root.

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
from itertools import repeat, takewhile
from pathlib import Path
from typing import TypeVar

from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.files import make_private_folder, write_text
from cpuft.hosts import ssh_config
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import KEY_CHANGED, UNREACHABLE, HostError, SshTransport
from cpuft.retry import retry

PORT = 2222
"""As in the operator's own images: users other than root may listen there, and it is not the port of a node's sshd."""
_KEYS = ("/etc/mpi-ssh", "~/.ssh")
"""Where the job's keys may be: in the manifests of cpuft submit, and where the operator puts them without its word."""
_FOLDER = Path(f"/var/tmp/cpuft-mpijob-{os.geteuid()}")
"""The same on all pods, because mpirun's ssh on a worker reads it, too."""
_START_SECONDS, _RETRY_SECONDS = 60.0, 1.0
"""How long a pod that has become ready may take to be reached by its name, and the pause between two attempts."""
T = TypeVar("T")


@dataclass(frozen=True)
class MpiJobTransport(SshTransport):
    """The pods of an MPIJob, reached by ssh with the job's key."""

    deadline: float = 0.0
    """A value of time.monotonic. Until then a pod that cannot be reached is tried again, because it may be starting."""

    def is_here(self, host: Host) -> bool:
        """Return whether a host is the launcher's own pod, or is called "localhost"."""
        # A pod's hostname is the first part of its name in the hostfile.
        return host.name.partition(".")[0] in (socket.gethostname(), "localhost")

    def address(self, host: Host) -> str:
        """Return a pod's IPv4 address; wait for it until `deadline`. Raises CpuftError: its name has none by then."""
        return self._retry(host, partial(super().address, host))

    def _run_remotely(self, host: Host, argv: Sequence[str], stdin: str, seconds: float) -> Answer:
        return self._retry(host, partial(super()._run_remotely, host, argv, stdin, seconds))

    def _retry(self, host: Host, call: Callable[[], T]) -> T:
        pauses = takewhile(lambda pause: time.monotonic() < self.deadline, repeat(_RETRY_SECONDS))
        try:
            return retry(call, pauses, may_help=lambda error: getattr(error, "kind", UNREACHABLE) == UNREACHABLE)
        except HostError as error:
            if error.kind != KEY_CHANGED:
                raise
            raise CpuftError(
                f"host {host.name} does not show the job's key as its host key: "
                f"start workers by python -m cpuft.hosts.mpijob, or name your own --ssh-config"
            ) from None


def make_transport() -> MpiJobTransport:
    """Write the ssh files of an MPIJob, and return the transport to its pods from any of them, which tries unreachable
    ones for 60 s from now. Raises CpuftError: this pod has no key of an MPIJob.
    """
    config = write_ssh_config(find_keys(), _FOLDER)
    return MpiJobTransport(config, deadline=time.monotonic() + _START_SECONDS)


def find_keys() -> Path:
    """Return the folder of the job's keys: /etc/mpi-ssh if it is there, else ~/.ssh."""
    folders = [Path(os.path.expanduser(path)) for path in _KEYS]  # a user without a name may have no home
    return next((path for path in folders if path.is_dir()), folders[-1])


def write_ssh_config(keys: Path, folder: Path) -> str:
    """Write ssh's files for hosts whose host key is id_rsa.pub in `keys` to `folder`, made with mode 700; return the
    path `folder`/ssh_config. Raises CpuftError: there is no such key, or others may write to `folder`.
    """
    try:
        kind, key = (keys / "id_rsa.pub").read_text(encoding="utf-8").split()[:2]
        private = (keys / "id_rsa").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CpuftError(
            f"this pod has no key of an MPIJob ({error}): set sshAuthMountPath to {keys}, or name --ssh-config"
        ) from None
    make_private_folder(folder, "restart the pod")
    # ssh and sshd refuse a key that belongs to their user and that others may read; a mounted one may be of that kind.
    write_text(folder / "id_rsa", private)
    os.chmod(folder / "id_rsa", 0o600)
    write_text(folder / "known_hosts", f"mpijob {kind} {key}\n")
    write_text(folder / "authorized_keys", f"{kind} {key}\n")
    text = ssh_config.format_shared_key_config("mpijob", f"{folder}/id_rsa", f"{folder}/known_hosts", PORT)
    write_text(folder / "ssh_config", text)
    return str(folder / "ssh_config")


def sshd_command(folder: Path) -> tuple[str, ...]:
    """Return the argv of a worker's ssh server on port 2222, with the files of `write_ssh_config` in `folder`."""
    # StrictModes: /var/tmp may be a mounted folder that others may write to.
    return ssh_config.sshd_command(
        f"{folder}/id_rsa", PORT, StrictModes="no", AuthorizedKeysFile=f"{folder}/authorized_keys"
    )


def main() -> None:
    """Write ssh's files for logins to other pods, and become a worker's ssh server; exit with 2 if that fails."""
    try:
        write_ssh_config(find_keys(), _FOLDER)
        ssh_config.prepare_sshd()
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(2)
    command = sshd_command(_FOLDER)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
