"""The only module that talks ssh (paramiko): run a command on a host whose key is known."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import shlex
import shutil
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host

if TYPE_CHECKING:
    import paramiko

_CONNECT_SECONDS = 10.0
H = TypeVar("H")
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a command said, and how it ended."""

    exit_code: int
    output: str
    errors: str


def run(
    host: Host, command: str, stdin: str = "", seconds: float = 60.0, config_path: str = "", stdin_file: str = ""
) -> Answer:
    """Run a shell command on a host, give it `stdin` or the file `stdin_file`, wait `seconds` at most.

    Host keys come from the known_hosts files; an unknown or changed key is refused, never learnt here.

    Raises
    ------
    CpuftError: the host cannot be reached, its key is unknown or changed, it does not let us in, or it takes longer.
    """
    with _connect(host, config_path) as client, _named(host, seconds):
        stream, stdout_file, stderr_file = client.exec_command(command, timeout=seconds)
        if stdin_file:
            with open(stdin_file, "rb") as file:
                shutil.copyfileobj(file, stream, 1 << 18)
        else:
            stream.write(stdin)
        stream.flush()
        stream.channel.shutdown_write()
        output, errors = stdout_file.read().decode(errors="replace"), stderr_file.read().decode(errors="replace")
        return Answer(stdout_file.channel.recv_exit_status(), output, errors)


def fetch_folder(host: Host, source: str, target: str, seconds: float = 300.0, config_path: str = "") -> None:
    """Copy what is in folder `source` of a host into the folder `target` here, as one stream.

    Raises
    ------
    CpuftError: as `run`, or the folder is not there.
    """
    with _connect(host, config_path) as client, _named(host, seconds):
        _, stream, errors = client.exec_command(f"tar -C {shlex.quote(source)} -cf - .", timeout=seconds)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                # Python before 3.10.12 and 3.11.4 has no filters (PEP 706); the cluster's own hosts made the archive.
                safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(target, **safely)  # type: ignore[arg-type]
        except tarfile.TarError:
            said = errors.read().decode(errors="replace").strip()
            raise CpuftError(
                f"folder {source} of host {host.name} cannot be fetched ({said}): look at it there"
            ) from None


def scan_host_key(address: str, port: int = 22) -> str:
    """The key that the server at `address` shows: "ssh-ed25519 AAAA...". It proves nothing by itself.

    Raises
    ------
    CpuftError: no ssh server answers.
    """
    import paramiko

    with _named(Host(address), _CONNECT_SECONDS):
        connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        with connection, paramiko.Transport(connection) as transport:
            transport.start_client(timeout=_CONNECT_SECONDS)
            key = transport.get_remote_server_key()
            return f"{key.get_name()} {key.get_base64()}"


def fingerprint(public_key: str) -> str:
    """A public key as `ssh-keygen -l` shows it: SHA256:..."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


@contextmanager
def _connect(host: Host, config_path: str) -> Iterator[paramiko.SSHClient]:
    import paramiko  # an eighth of a second: only for those who do have other hosts

    # Its threads log tracebacks of what we tell in one line.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    options = _read_config(host, config_path)
    with paramiko.SSHClient() as client:
        client.load_system_host_keys()
        for path in options.get("userknownhostsfile", "").split():
            if os.path.exists(os.path.expanduser(path)):
                client.load_host_keys(os.path.expanduser(path))
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        with _named(host, _CONNECT_SECONDS):
            client.connect(
                options["hostname"],
                port=int(options["port"]),
                username=options.get("user") or None,
                key_filename=options.get("identityfile") or None,
                timeout=_CONNECT_SECONDS,
                banner_timeout=_CONNECT_SECONDS,
                auth_timeout=_CONNECT_SECONDS,
            )
        yield client


@contextmanager
def _named(host: Host, seconds: float) -> Iterator[None]:
    """What paramiko and sockets raise, as a CpuftError that names the host."""
    import paramiko

    try:
        yield
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise CpuftError(f"host {host.name} cannot be used over ssh ({_cause(error, seconds)})") from None


def side_by_side(function: Callable[[H], T], hosts: Sequence[H]) -> list[T]:
    """The function's answer for every host, asked all at once. Raises CpuftError that names every one that failed."""
    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        answers = [pool.submit(function, host) for host in hosts]
    failures = [str(answer.exception()) for answer in answers if isinstance(answer.exception(), CpuftError)]
    if failures:
        raise CpuftError("; ".join(failures))
    return [answer.result() for answer in answers]


def quote_command(command: Sequence[str], settings: Mapping[str, str]) -> str:
    """One line for the shell at the other end, with environment settings before it."""
    words = ["env", *(f"{name}={value}" for name, value in settings.items())] if settings else []
    return shlex.join([*words, *command])


def _cause(error: Exception, seconds: float) -> str:
    text = str(error) or type(error).__name__
    if "not found in known_hosts" in text:
        return f"{text}: add its key to known_hosts after you have compared it"
    if "does not match" in text:
        return f"{text}: its key has changed: find out why before you take the old one out of known_hosts"
    if "protocol banner" in text:
        return "what answered on its port did not greet as an ssh server: does sshd run there, and let this machine in?"
    if "timed out" in text or isinstance(error, TimeoutError):
        return f"no answer in {seconds:.0f} s: is it on, and its ssh port open to this machine?"
    if "Authentication" in text or "No authentication" in text:
        return f"{text}: put your public key into its authorized_keys"
    return f"{text}: check its name, its port and that sshd runs"


def _read_config(host: Host, config_path: str) -> dict[str, str]:
    """hostname, port, user, identityfile and userknownhostsfile of a host; the hostfile wins over ssh's config."""
    import paramiko

    config = paramiko.SSHConfig()
    path = os.path.expanduser(config_path or "~/.ssh/config")
    if os.path.exists(path):
        config = paramiko.SSHConfig.from_path(path)
    found = config.lookup(host.name)
    identity = found.get("identityfile", "")
    return {
        "hostname": str(found.get("hostname", host.name)),
        "port": str(host.port or found.get("port", 22)),
        "user": host.user or str(found.get("user", "")),
        "identityfile": identity[0] if isinstance(identity, list) and identity else "",
        "userknownhostsfile": str(found.get("userknownhostsfile", "")),
    }
