"""How commands and files reach a host: this machine, ssh, or ssh through a bastion. Only this module knows which."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cpuft import execute
from cpuft.config import LAST_PORT, is_count
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts import facts
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
            link = client.get_transport()
            if link and link.is_active() and not isinstance(error, paramiko.BadHostKeyException):
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
        link = before.get_transport()
        assert link is not None
        return link.open_channel("direct-tcpip", (login.address, login.port), ("", 0), timeout=seconds)
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
        link = stack.enter_context(paramiko.Transport(_open_stream(login, before, call)))
        link.start_client(timeout=limit)
        key = link.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"


def fingerprint(public_key: str) -> str:
    """A public key as `ssh-keygen -l` shows it: SHA256:..."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


H = TypeVar("H")
T = TypeVar("T")
_AT_ONCE = 32
_BLOCK = 1 << 18
_POLL_SECONDS = 0.005
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")
_SILENT_SECONDS = 6.0
"""Within which an ssh server that is there has told its key."""
KEEP_ALIVE = ("-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=2")
"""A host that was cut off is noticed within 9 s: ranks that talk to it are so within 7."""


@dataclass
class _Sessions:
    """Those that stay open, each with what closes it."""

    stay: bool = False
    open: dict[Host, tuple[paramiko.SSHClient, ExitStack]] = field(default_factory=dict)

    def close(self, host: Host) -> None:
        self.open.pop(host)[1].close()


@dataclass(frozen=True)
class Transport:
    """The way to the hosts of a cluster."""

    bootstrap: ClassVar[str] = ""
    """How mpirun starts its proxies on them, where that is not by ssh."""
    config: str = ""
    """ssh's client configuration; empty for the user's own."""
    elsewhere: bool = False
    """Whether no host is this machine, though one may have its address: another network has the same private ones."""
    silent: set[str] = field(default_factory=set, compare=False)
    """Hosts that did not answer when they were last asked: who cleans up spares them, for each question costs 10 s."""
    sessions: _Sessions = field(default_factory=_Sessions, compare=False, repr=False)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Inside, each host is logged in to once, however much is run there one after another."""
        self.sessions.stay = True
        try:
            yield
        finally:
            self.sessions.stay = False
            for host in list(self.sessions.open):
                self.sessions.close(host)

    @contextmanager
    def _session(self, host: Host) -> Iterator[paramiko.SSHClient]:
        if not self.sessions.stay:
            with open_session(host, self.config) as client:
                yield client
            return
        if host not in self.sessions.open:
            stack = ExitStack()
            self.sessions.open[host] = stack.enter_context(open_session(host, self.config)), stack
        try:
            yield self.sessions.open[host][0]
        except BaseException:  # it may be of no use any more
            self.sessions.close(host)
            raise

    def address(self, host: Host) -> str:
        """Where the other hosts reach this one: its IPv4 address, or behind a bastion the name that only they resolve.

        A host that the hostfile names by its address has that one, whatever ssh's configuration makes of it from here.

        Raises CpuftError: its name has no address.
        """
        if _IPV4.fullmatch(host.name):
            return host.name
        login = self._login(host)
        try:
            return socket.gethostbyname(login.address)
        except OSError as error:
            if login.jumps or login.proxy:
                return login.address
            raise CpuftError(
                f"host {host.name} has no address ({error}): check its spelling in the hostfile, or write its address"
            ) from None

    def is_here(self, host: Host) -> bool:
        """Whether a host is this machine. With an ssh port of its own it is a container or a tunnel."""
        if host.port or self.elsewhere:
            return False
        login = self._login(host)
        try:
            address = socket.gethostbyname(login.address)
        except OSError:
            return False
        others = login.port != 22 or login.jumps or login.proxy
        return not others and (address.startswith("127.") or address in facts.read_interfaces().values())

    def _login(self, host: Host) -> Login:
        """As ssh's configuration says; this machine's own name needs none, and no library that reads it."""
        return read_login(host, self.config) if host.name != "localhost" else Login(host.name, host.port or 22)

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        """Run a command on a host, give it `stdin`, wait `seconds` at most.

        Raises HostError: it cannot be reached, its key is unknown or changed, it does not let us in, or it takes
        longer.
        """
        if self.is_here(host):
            return execute.run_quietly(argv, seconds, stdin)
        with self._session(host) as client, telling(host, seconds):
            return _converse(client, shlex.join(argv), stdin.encode(), seconds)

    def find_silent(self, names: Sequence[str], seconds: float = _SILENT_SECONDS) -> set[str]:
        """The hosts, this machine apart, that do not answer in time: off, cut off or frozen. No login by ssh."""
        answers = attempt(lambda one: self.is_here(one) or self._greet(one, seconds), [*map(Host, names)])
        silent = {name for name, answer in zip(names, answers) if isinstance(answer, CpuftError)}
        self.silent.difference_update(names)
        self.silent.update(silent)
        return silent

    def _greet(self, host: Host, seconds: float) -> object:
        return scan_host_key(host, self.config, seconds)

    def way(self, host: Host) -> tuple[str, ...]:
        """The words before a shell line that take it to a host by ssh's own program; none where it is this machine.

        For plans: people read them and run them by hand.
        """
        if self.is_here(host):
            return ()
        words: tuple[str, ...] = ("-F", self.config) if self.config else ()
        words += ("-o", "BatchMode=yes", *KEEP_ALIVE)
        words += ("-l", host.user) if host.user else ()
        words += ("-p", str(host.port)) if host.port else ()
        return ("ssh", *words, host.name)


def _converse(client: paramiko.SSHClient, line: str, waiting: bytes, seconds: float) -> Answer:
    """Both directions of a command at once: neither end may wait for the other to read."""
    link = client.get_transport()
    assert link is not None
    channel = link.open_session(timeout=seconds)
    channel.exec_command(line)
    end, output, errors = time.monotonic() + seconds, bytearray(), bytearray()
    while True:
        idle = True
        if not channel.closed and channel.send_ready() and not channel.eof_sent:
            if waiting:
                waiting, idle = waiting[channel.send(waiting[:_BLOCK]) :], False
            else:
                channel.shutdown_write()
        while channel.recv_ready():
            output += channel.recv(_BLOCK)
            idle = False
        while channel.recv_stderr_ready():
            errors += channel.recv_stderr(_BLOCK)
            idle = False
        if channel.exit_status_ready() and (channel.eof_received or channel.closed) and idle:
            code = channel.recv_exit_status()
            return Answer(code, output.decode(errors="replace"), errors.decode(errors="replace"))
        if time.monotonic() > end:
            raise TimeoutError
        if idle:
            time.sleep(_POLL_SECONDS)


def side_by_side(function: Callable[[H], T], hosts: Sequence[H]) -> list[T]:
    """The function's answer for every host, asked all at once. Raises CpuftError that names every one that failed."""
    answers = attempt(function, hosts)
    failures = [answer for answer in answers if isinstance(answer, CpuftError)]
    if failures:
        error = CpuftError("; ".join(map(str, failures)))
        error.passes = all(failure.passes for failure in failures)
        raise error
    return [answer for answer in answers if not isinstance(answer, CpuftError)]


def attempt(function: Callable[[H], T], hosts: Sequence[H]) -> list[T | CpuftError]:
    """The function's answer for every host, or why there is none, in the order of the hosts."""

    def one(host: H) -> T | CpuftError:
        try:
            return function(host)
        except CpuftError as error:
            return error

    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(one, hosts))
