"""Sessions over ssh (paramiko): the user's or the cluster's client configuration, bastions, and keys that are known."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpuft.config import LAST_PORT, is_count
from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host

if TYPE_CHECKING:
    import paramiko

CONNECT_SECONDS = 10.0
_DIAL_SECONDS = 5.0
"""For a TCP connection: a host that is there answers at once, and one that was cut off must not hold up the others."""
_CALL_SECONDS = 3.5
"""A kernel that is there has answered the third of its calls by then: they lie 1 and 2 s apart (RFC 6298)."""
_MOST_BASTIONS = 8
UNREACHABLE, KEY_UNKNOWN, KEY_CHANGED = "unreachable", "key unknown", "key changed"
LOGIN_REFUSED, TIMED_OUT = "login refused", "time-out"
_MOVES = {
    UNREACHABLE: "check its name, its port and that sshd runs there and lets this machine in",
    KEY_UNKNOWN: "compare it with what ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on the host; to accept "
    "it, run ssh once by hand and answer yes, or cpuft provision hosts with --accept-host-keys",
    KEY_CHANGED: "its key has changed: find out why before you take the old one out of known_hosts",
    LOGIN_REFUSED: "put your public key there with ssh-copy-id, or name another user with user=NAME in the hostfile",
    TIMED_OUT: "is it on, and its ssh port open to this machine?",
}


class HostError(CpuftError):
    """A host could not be used; `kind` is one of the names above, for those who act on it."""

    def __init__(self, host: str, kind: str, said: str, move: str = "") -> None:
        """`said`: what happened. `move`: what to do next, where that is not what helps against this kind as a rule."""
        super().__init__(f"host {host} cannot be used over ssh ({said}: {move or _MOVES[kind]})")
        self.host, self.kind = host, kind
        self.passes = kind in (UNREACHABLE, TIMED_OUT)


class _UnknownKeyError(Exception):
    """A server showed a key that no known_hosts file holds."""


@dataclass(frozen=True)
class Login:
    """How ssh's configuration, and the hostfile before it, say that a host is reached."""

    address: str
    port: int
    user: str = ""
    identities: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()
    """Files with host keys; empty for ssh's own."""
    alias: str = ""
    """Name under which its key is known; empty for its address and port."""
    jumps: tuple[Host, ...] = ()
    """Bastions on the way, the first one first."""
    proxy: str = ""
    """Command whose standard streams are the connection."""


def read_login(host: Host, config_path: str = "") -> Login:
    """How a host is reached by the client configuration at `config_path` (empty: the user's own)."""
    import paramiko

    path = os.path.expanduser(config_path or "~/.ssh/config")
    try:
        config = paramiko.SSHConfig.from_path(path) if os.path.exists(path) else paramiko.SSHConfig()
        found: dict[str, Any] = dict(config.lookup(host.name))
    except (paramiko.SSHException, OSError, ValueError) as error:
        raise CpuftError(f"ssh's configuration {path} cannot be read ({error}): correct it") from None
    if not is_count(str(found.get("port", 22)), most=LAST_PORT):
        raise CpuftError(f"ssh's configuration {path}: port {found['port']!r:.60} of {host.name} is none: correct it")
    proxy = found.get("proxycommand") or ""
    return Login(
        str(found.get("hostname", host.name)),
        host.port or int(found.get("port", 22)),
        host.user or str(found.get("user", "")),
        tuple(os.path.expanduser(name) for name in found.get("identityfile", ())),
        tuple(os.path.expanduser(name) for name in str(found.get("userknownhostsfile", "")).split()),
        str(found.get("hostkeyalias", "")),
        parse_jumps(str(found.get("proxyjump", "")), f"ProxyJump of host {host.name}"),
        "" if proxy == "none" else proxy,
    )


def parse_jumps(text: str, where: str) -> tuple[Host, ...]:
    """Bastions, as ssh's ProxyJump and -J have them: `[user@]name[:port]`, a comma between.

    Raises CpuftError: a name or port that is none; `where` says whose it is.
    """
    jumps = []
    for word in text.split(",") if text and text != "none" else ():
        user, _, place = word.strip().removeprefix("ssh://").rpartition("@")
        name, _, port = place.partition(":")
        if not name or len(word.split()) > 1 or (port and not is_count(port, most=LAST_PORT)):
            raise CpuftError(f"{where} {text!r:.200} names no host: write [user@]name[:port], a comma between")
        jumps.append(Host(name, port=int(port or 0), user=user))
    return tuple(jumps)


def find_bastions(login: Login, config_path: str = "") -> list[tuple[Host, Login]]:
    """All bastions on the way, the first one first. As for ssh, only the first of several may need some itself."""
    found: list[tuple[Host, Login]] = []
    while login.jumps:
        found[:0] = [(jump, read_login(jump, config_path)) for jump in login.jumps]
        login = found[0][1]
        if len(found) > _MOST_BASTIONS:
            names = ", ".join(jump.name for jump, _ in found)
            raise CpuftError(f"the way through bastions has no end ({names}): look at ProxyJump in ssh's configuration")
    return found


@contextmanager
def open_session(host: Host, config_path: str = "") -> Iterator[paramiko.SSHClient]:
    """A session with a host whose key is known, through its bastions; an unknown or changed key is never learnt here.

    Raises HostError: it cannot be reached, its key is unknown or changed, or it does not let us in.
    """
    login = read_login(host, config_path)
    with ExitStack() as stack:
        yield _log_in(host, login, _pass_bastions(login, config_path, stack), stack)


def _pass_bastions(login: Login, config_path: str, stack: ExitStack) -> paramiko.SSHClient | None:
    """A session with the last bastion before a host."""
    # paramiko's threads log tracebacks of what we tell in one line.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    before: paramiko.SSHClient | None = None
    for jump, own in find_bastions(login, config_path):
        before = _log_in(jump, own, before, stack)
    return before


def _log_in(host: Host, login: Login, before: paramiko.SSHClient | None, stack: ExitStack) -> paramiko.SSHClient:
    import paramiko

    options: dict[str, Any] = {
        "username": login.user or None,
        "key_filename": [path for path in login.identities if os.path.exists(path)] or None,
        "timeout": CONNECT_SECONDS,
        "banner_timeout": CONNECT_SECONDS,
        "auth_timeout": CONNECT_SECONDS,
    }
    with telling(host):
        client = stack.enter_context(paramiko.SSHClient())
        for path in filter(os.path.exists, login.known_hosts):
            client.load_host_keys(path)
        if not login.known_hosts:
            client.load_system_host_keys()
        client.set_missing_host_key_policy(_make_refusal())
        # ssh knows an alias's key without a port, wherever it is.
        name, port = (login.alias, 22) if login.alias else (login.address, login.port)
        try:
            client.connect(name, port, sock=_open_stream(login, before, CONNECT_SECONDS), **options)
        except paramiko.SSHException as error:
            transport = client.get_transport()
            if transport and transport.is_active() and not isinstance(error, paramiko.BadHostKeyException):
                if not options["key_filename"] and not _has_key():
                    raise HostError(
                        host.name,
                        LOGIN_REFUSED,
                        "this user has no ssh key: ~/.ssh has no id_ed25519, id_ecdsa or id_rsa, and no agent has one",
                        f"make a key with ssh-keygen -t ed25519, then put it on the host with ssh-copy-id {host.name}",
                    ) from None
                # The server is fine, and no key of ours was: paramiko's class for that is the general one.
                raise paramiko.AuthenticationException(str(error)) from None
            raise
    return client


def _has_key() -> bool:
    """Whether this user has a private key where ssh looks for one, or an agent that holds one."""
    import paramiko

    if any(os.path.exists(os.path.expanduser(f"~/.ssh/id_{kind}")) for kind in ("ed25519", "ecdsa", "rsa")):
        return True
    try:
        return bool(paramiko.Agent().get_keys())
    except (paramiko.SSHException, OSError):
        return False


def _open_stream(login: Login, before: paramiko.SSHClient | None, seconds: float) -> Any:
    """What carries the session: the bastion before it, its proxy's command, or a socket."""
    import paramiko

    if before:
        transport = before.get_transport()
        assert transport is not None
        return transport.open_channel("direct-tcpip", (login.address, login.port), ("", 0), timeout=seconds)
    if login.proxy:
        return paramiko.ProxyCommand(login.proxy)
    try:
        return socket.create_connection((login.address, login.port), timeout=min(seconds, _DIAL_SECONDS))
    except TimeoutError:
        raise
    except socket.gaierror as error:
        raise OSError(error.strerror or str(error)) from None
    except OSError as error:
        raise OSError(f"{error.strerror or error} on port {login.port}") from None


def _make_refusal() -> paramiko.MissingHostKeyPolicy:
    """paramiko's policy for a key that is not known: an exception of its own tells it from other failures."""
    import paramiko

    class Refusal(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
            shown = f"{key.get_name()} {key.get_base64()}"
            raise _UnknownKeyError(
                f"its host key {key.get_name()} {fingerprint(shown)} is not in known_hosts, because this machine "
                f"has not connected to the host before"
            )

    return Refusal()


@contextmanager
def telling(host: Host, seconds: float = CONNECT_SECONDS) -> Iterator[None]:
    """What paramiko and sockets raise, as a HostError of its kind."""
    import paramiko

    try:
        yield
    except _UnknownKeyError as error:
        raise HostError(host.name, KEY_UNKNOWN, str(error)) from None
    except paramiko.BadHostKeyException as error:
        raise HostError(host.name, KEY_CHANGED, str(error)) from None
    except paramiko.AuthenticationException as error:
        raise HostError(host.name, LOGIN_REFUSED, str(error)) from None
    except TimeoutError:
        raise HostError(host.name, TIMED_OUT, f"no answer in {seconds:.0f} s") from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise HostError(host.name, UNREACHABLE, str(error) or type(error).__name__) from None


def scan_host_key(host: Host, config_path: str = "", seconds: float = 0.0) -> str:
    """The key that the server at a host's address and port shows: "ssh-ed25519 AAAA...". It proves nothing by itself.

    `seconds`: how long its ssh server may take to answer, however busy the host is; its kernel has less time for that.
    Without, as long as a session.

    Raises HostError: no ssh server answers.
    """
    import paramiko

    login, limit = read_login(host, config_path), min(CONNECT_SECONDS, seconds or CONNECT_SECONDS)
    with ExitStack() as stack, telling(host, limit):
        before = _pass_bastions(login, config_path, stack)
        call = min(limit, _CALL_SECONDS) if seconds and not before else limit
        transport = stack.enter_context(paramiko.Transport(_open_stream(login, before, call)))
        transport.start_client(timeout=limit)
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"


def fingerprint(public_key: str) -> str:
    """A public key as `ssh-keygen -l` shows it: SHA256:..."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
