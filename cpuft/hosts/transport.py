"""How commands and files reach a host: on this machine, or by ssh, perhaps through a bastion.

Only a transport knows how a host is reached. The forms in jobs: `cpuft.hosts.slurm`, `cpuft.hosts.mpijob`.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import re
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cpuft import execute
from cpuft.argv import make_shell_line
from cpuft.errors import CpuftError, TransientError, refuse_other_systems
from cpuft.execute import Answer
from cpuft.files import read_raw
from cpuft.hosts import facts, ssh_config
from cpuft.hosts.hostfile import NEEDS_IPV4, Host
from cpuft.hosts.ssh_config import Login, find_bastions, read_login, ssh_command
from cpuft.retry import retry
from cpuft.terminal import detect_dead_peer

if TYPE_CHECKING:
    import paramiko

H = TypeVar("H")
T = TypeVar("T")
_CONNECTIONS = 32
"""Most hosts that are asked at the same time, unless they have to meet each other."""
_DIAL_SECONDS = 5.0
"""Time limit for a TCP connection: a host that is up answers at once; one that was cut off must not delay others."""
_PROBE_DIAL_SECONDS = 3.5
"""The same for `find_unreachable`: the kernel of a host that is up has answered one of three SYN packets by then. They
are 1 and 2 s apart (RFC 6298)."""
_PROBE_SECONDS = 6.0
"""Time limit for the key exchange in `find_unreachable`."""
_PROHIBITED = 1  # RFC 4254, section 5.1: SSH_OPEN_ADMINISTRATIVELY_PROHIBITED
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")
_BEGIN = "cpuft: the command begins"
_NAME_HOSTS = "name Linux hosts with --cluster or --hostfile, or run the command on Linux, such as in cpuft's container"

UNREACHABLE, KEY_UNKNOWN, KEY_CHANGED = "unreachable", "key unknown", "key changed"
"""Kinds of `HostError`: no connection or a broken one; the host's key is in no known_hosts file; another is there."""
LOGIN_REFUSED, TIMED_OUT, NO_COMMANDS = "login refused", "time-out", "no commands"
"""Kinds of `HostError`: the host accepts no key of this user; the host or the command took too long; the login shell
prints something before each command, which would be taken for the command's output, or ends without running it."""
_ADVICE = {
    UNREACHABLE: "check its name and its port, and that sshd runs there and accepts connections from this machine",
    KEY_UNKNOWN: "compare it with what ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on the host; to accept "
    "it, run ssh once by hand and answer yes, or cpuft provision hosts with --accept-host-keys",
    KEY_CHANGED: "its key has changed: find out why before you remove the old one from known_hosts",
    LOGIN_REFUSED: "put your public key there with ssh-copy-id, or give another user with user=NAME in the hostfile",
    TIMED_OUT: "check that it is on, and that its ssh port is open to this machine",
    NO_COMMANDS: "let ~/.bashrc there, or the start-up file of another login shell, do this only when interactive",
}
_DROPPED = "Error reading SSH protocol banner"
"""paramiko's message when a server closes the connection at once, as sshd does beyond its MaxStartups."""
_DROPPED_PAUSES = (0.3, 0.6, 1.2, 2.4, 4.8)
"""Seconds before further attempts to log in to such a server, at random between half of them and all."""


class HostError(CpuftError):
    """A host could not be used over ssh. Callers act on `kind`, one of the six constants above."""

    def __init__(self, host: str, kind: str, what: str, advice: str = "") -> None:
        """Make the message of `what` happened and of what to do: `advice`, or what usually helps against this kind."""
        super().__init__(f"host {host} cannot be used over ssh ({what}: {advice or _ADVICE[kind]})")
        self.host, self.kind = host, kind
        self.is_transient = kind in (UNREACHABLE, TIMED_OUT)


@dataclass(frozen=True)
class Transport(ABC):
    """How the hosts of a cluster are reached. Nothing else in cpuft runs a command on a host or copies a file to it.

    Commands for a host that is this machine are run here, without any server. To call a method for several hosts at
    once, in threads, use `map_hosts` and `try_hosts`.
    """

    bootstrap: ClassVar[str] = ""
    """mpirun's name for how its proxies start on the hosts, such as "slurm"; empty for ssh."""
    config: str = ""
    """Path of ssh's client configuration; empty for the user's own, or where ssh is not used."""
    here: str | None = None
    """Name of the host that is this machine, where that was told: empty if none is, because other networks have the
    same private addresses. None where addresses decide."""
    unreachable: set[str] = field(default_factory=set, compare=False)
    """Names of the hosts that did not answer `find_unreachable` last. Cleaning up leaves them out, because each
    question to such a host takes 10 s."""
    hosts: dict[str, Host] = field(default_factory=dict, compare=False)
    """Hosts of the hostfile by name, as far as they are known, with the ports and users of their ssh servers."""

    def find_host(self, name: str) -> Host:
        """Return the host of this name in `hosts`; for another name a host with ssh's own port and user."""
        return self.hosts.get(name) or Host(name)

    @abstractmethod
    def is_here(self, host: Host) -> bool:
        """Return whether a host is this machine. Raises CpuftError: ssh's configuration, if used, cannot be read."""

    @abstractmethod
    def address(self, host: Host) -> str:
        """Return where the other hosts of the cluster reach this one: an IPv4 address, or a name that they resolve.
        Raises CpuftError: the host has no address.
        """

    def addresses(self, hosts: Sequence[Host]) -> list[str]:
        """Return the address of each host, or its name if it is one of several behind different ports of one address,
        as a router forwards them: the hosts know each other by their names. Raises CpuftError: a host has no address.
        """
        found = [self.address(host) for host in hosts]
        ports = {one: [host.port for host, other in zip(hosts, found) if other == one] for one in found}
        behind = {one for one, shared in ports.items() if len({*shared}) == len(shared) > 1}
        return [host.name if one in behind else one for host, one in zip(hosts, found)]

    @abstractmethod
    def command_prefix(self, host: Host) -> tuple[str, ...]:
        """Return the argv that a shell line is appended to, to run it on a host; () where the host is this machine. It
        is for the steps of plans, which people read and run by hand.
        """

    @abstractmethod
    def _run_remotely(self, host: Host, argv: Sequence[str], stdin: str, seconds: float) -> Answer:
        """Do what `run` does for a host that is not this machine."""

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        """Run a command on a host, wait for its end, and return its exit code and output, whatever they are.

        Every argument reaches the command as it is. On this machine a command that does not exist returns exit code
        127, and one that takes longer than `seconds` or cannot be started 126. Logging in has time limits of its own.

        Raises CpuftError (over ssh HostError, with its kind): another host cannot be reached, its host key is unknown
        or has changed, it refuses the login, or the command takes longer than `seconds`; or the host is this machine,
        which has Windows.
        """
        if self.is_here(host):
            refuse_other_systems("a host of cpuft", _NAME_HOSTS, allows_macos=True)
            return execute.run_command(argv, seconds, stdin)
        return self._run_remotely(host, argv, stdin, seconds)

    def refuse_here(self, host: Host, what: str) -> None:
        """Raise CpuftError if a host is this machine and that has another system than Linux, which `what` needs."""
        if sys.platform != "linux" and self.is_here(host):
            refuse_other_systems(what, _NAME_HOSTS)

    def find_unreachable(self, names: Sequence[str], seconds: float = _PROBE_SECONDS) -> set[str]:
        """Return the names of the hosts that do not answer within `seconds`, or cannot be asked; raise no CpuftError.
        All hosts are asked at the same time, and this machine always answers. Over ssh only the key exchange is tried,
        so that a host that would refuse the login answers, too. The attribute `unreachable` is updated for `names`.
        """
        hosts = [self.find_host(name) for name in names]
        answers = try_hosts(lambda host: self.is_here(host) or self._probe(host, seconds), hosts)
        found = {name for name, answer in zip(names, answers) if isinstance(answer, CpuftError)}
        self.unreachable.difference_update(names)
        self.unreachable.update(found)
        return found

    def _probe(self, host: Host, seconds: float) -> object:
        """Return anything when a host answers. Raises CpuftError when it does not."""
        return self.run(host, ("true",), seconds=seconds)

    @contextmanager
    def keep_sessions(self) -> Iterator[None]:
        """Inside, log in to each host only once for all commands that are run one after another. Where no session is
        needed, as in a Slurm job, this does nothing.
        """
        yield


@dataclass
class _Sessions:
    """Open sessions by host, each with what closes it; `keep` while new ones stay open after a command."""

    keep: bool = False
    open: dict[Host, tuple[paramiko.SSHClient, ExitStack]] = field(default_factory=dict)

    def close(self, host: Host) -> None:
        self.open.pop(host)[1].close()


@dataclass(frozen=True)
class SshTransport(Transport):
    """Hosts that are reached by ssh with the client configuration `config`, and this machine."""

    sessions: _Sessions = field(default_factory=_Sessions, compare=False, repr=False)

    def is_here(self, host: Host) -> bool:
        """Return whether a host is this machine, by `here`, else by its address; False with a port, a bastion or a
        ProxyCommand. Raises CpuftError: ssh's configuration is wrong.
        """
        if self.here is not None:
            return host.name == self.here
        if host.port:  # it is a container or a tunnel
            return False
        login = self._read_login(host)
        try:
            address = socket.gethostbyname(login.address)
        except (OSError, UnicodeError):
            return False
        if login.port != 22 or login.jumps or login.proxy:
            return False
        return address.startswith("127.") or address in facts.read_interfaces().values()

    def address(self, host: Host) -> str:
        """Return a host's IPv4 address, that of the hostfile rather than of ssh's configuration; behind a bastion its
        name, where only the other hosts resolve it. Raises CpuftError: it has no IPv4 address.
        """
        if _IPV4.fullmatch(host.name):
            return host.name
        if ":" in host.name:
            raise CpuftError(f"host {host.name} {NEEDS_IPV4}")
        login = self._read_login(host)
        try:
            return socket.gethostbyname(login.address)
        except (OSError, UnicodeError) as error:
            if login.jumps or login.proxy:
                return login.address
            with suppress(OSError, UnicodeError):
                socket.getaddrinfo(login.address, None, socket.AF_INET6)
                raise CpuftError(f"host {host.name}: its only address {NEEDS_IPV4}") from None
            raise CpuftError(
                f"host {host.name} has no address ({error}): check its spelling in the hostfile, or write its address"
            ) from None

    def command_prefix(self, host: Host) -> tuple[str, ...]:
        """Return the argv ("ssh", ..., NAME) that a shell line is appended to; () where the host is this machine."""
        return () if self.is_here(host) else ssh_command(host, self.config, self._read_login(host).replaced)

    def _run_remotely(self, host: Host, argv: Sequence[str], stdin: str, seconds: float) -> Answer:
        with self._session(host) as client, _raise_host_errors(host, seconds):
            line = f"echo {_BEGIN}; {make_shell_line(argv)}"
            answer = _run_in_session(client, line, stdin.encode(), seconds)
        before, begun, output = answer.output.partition(f"{_BEGIN}\n")
        if before or not begun:
            printed = " ".join((before or answer.text).split())[:80]
            raise HostError(
                host.name,
                NO_COMMANDS,
                f"its login shell prints {printed!r} before each command"
                if begun
                else f"its login shell ended with exit code {answer.exit_code} before the command ran: {printed!r}",
            )
        return replace(answer, output=output)

    def _probe(self, host: Host, seconds: float) -> object:
        return scan_host_key(host, self.config, seconds)

    @contextmanager
    def keep_sessions(self) -> Iterator[None]:
        """Inside, log in to each host only once for all commands that are run one after another, and again after a
        session has ended or a command failed to run. Of nested calls, the outer one closes the sessions.
        """
        if self.sessions.keep:
            yield
            return
        self.sessions.keep = True
        try:
            yield
        finally:
            self.sessions.keep = False
            for host in list(self.sessions.open):
                self.sessions.close(host)

    @contextmanager
    def _session(self, host: Host) -> Iterator[paramiko.SSHClient]:
        if not self.sessions.keep:
            with open_session(host, self.config) as client:
                yield client
            return
        if host in self.sessions.open and not _is_active(self.sessions.open[host][0]):
            self.sessions.close(host)
        if host not in self.sessions.open:
            stack = ExitStack()
            self.sessions.open[host] = stack.enter_context(open_session(host, self.config)), stack
        try:
            yield self.sessions.open[host][0]
        except BaseException:  # the session may be broken
            self.sessions.close(host)
            raise

    def _read_login(self, host: Host) -> Login:
        # read_login needs paramiko, which a launch on this machine must not import.
        return read_login(host, self.config) if host.name != "localhost" else Login(host.name, host.port or 22)


def _is_active(client: paramiko.SSHClient) -> bool:
    link = client.get_transport()
    return link is not None and link.is_active()


def map_hosts(function: Callable[[H], T], hosts: Sequence[H], most: int = _CONNECTIONS) -> list[T]:
    """Call a function for all hosts, up to `most` at the same time, and return its results in their order. Raises
    CpuftError, with all messages, when all calls have ended and some raised it; it is transient if all of them are.
    """
    results = try_hosts(function, hosts, most)
    failures = [result for result in results if isinstance(result, CpuftError)]
    if failures:
        kind = TransientError if all(failure.is_transient for failure in failures) else CpuftError
        raise kind("; ".join(map(str, failures)))
    return [result for result in results if not isinstance(result, CpuftError)]


def try_hosts(function: Callable[[H], T], hosts: Sequence[H], most: int = _CONNECTIONS) -> list[T | CpuftError]:
    """Call a function for all hosts, up to `most` at a time; return for each, in order, its result or CpuftError."""

    def call(host: H) -> T | CpuftError:
        try:
            return function(host)
        except CpuftError as error:
            return error

    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(most, len(hosts))) as pool:
        return list(pool.map(call, hosts))


@contextmanager
def open_session(host: Host, config_path: str = "") -> Iterator[paramiko.SSHClient]:
    """Log in to a host, through its bastions, for the time of the block; the value is paramiko's client. Unknown and
    changed host keys are refused. HostError: a host cannot be used; another CpuftError: ssh's configuration is wrong.
    """
    login = read_login(host, config_path)
    with ExitStack() as stack:
        yield _log_in(host, login, _log_in_to_bastions(login, config_path, stack), stack)


def _log_in_to_bastions(login: Login, config_path: str, stack: ExitStack) -> paramiko.SSHClient | None:
    # paramiko's threads log tracebacks of errors that are reported in one line here.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    bastion: paramiko.SSHClient | None = None
    for jump, jump_login in find_bastions(login, config_path):
        bastion = _log_in(jump, jump_login, bastion, stack)
    return bastion


def _log_in(host: Host, login: Login, bastion: paramiko.SSHClient | None, stack: ExitStack) -> paramiko.SSHClient:
    pauses = (pause * random.uniform(0.5, 1) for pause in _DROPPED_PAUSES)
    log_in = partial(_try_to_log_in, host, login, bastion, stack)
    return retry(log_in, pauses, may_help=lambda error: _DROPPED in str(error))


def _try_to_log_in(
    host: Host, login: Login, bastion: paramiko.SSHClient | None, stack: ExitStack
) -> paramiko.SSHClient:
    import paramiko

    seconds = ssh_config.CONNECT_SECONDS
    options: dict[str, Any] = dict.fromkeys(("timeout", "auth_timeout"), seconds)
    # Of two limits that end at once, either may win, and an unreachable host would count as one that drops connections.
    options["banner_timeout"] = 2 * seconds
    options["key_filename"] = [path for path in login.identities if os.path.exists(path)] or None
    with _raise_host_errors(host):
        client = stack.enter_context(paramiko.SSHClient())
        # ssh looks up the key of an alias without a port, whatever the port is.
        name, port = (login.alias, 22) if login.alias else (login.address, login.port)
        known_name = name if port == 22 else f"[{name}]:{port}"
        own = login.known_hosts or (os.path.expanduser("~/.ssh/known_hosts"),)
        _load_host_keys(client, (*own, *login.shared_known_hosts), known_name)
        client.set_missing_host_key_policy(_refuse_unknown_keys(host))
        try:
            stream = _open_stream(login, bastion, seconds)
            client.connect(name, port, login.user or None, sock=stream, **options)
        except paramiko.SSHException as error:
            link = client.get_transport()
            if link and link.is_active() and not link.initial_kex_done:
                # paramiko tries to log in although the time limit of the key exchange has passed.
                raise TimeoutError from None
            if link and link.is_active() and not isinstance(error, paramiko.BadHostKeyException):
                if not options["key_filename"] and not _has_key():
                    raise HostError(
                        host.name,
                        LOGIN_REFUSED,
                        "this user has no ssh key: ~/.ssh has no id_ed25519, id_ecdsa or id_rsa, and no agent has one",
                        f"make a key with ssh-keygen -t ed25519, then put it on the host with ssh-copy-id {host.name}",
                    ) from None
                # The key exchange succeeded and every key was refused. paramiko raises its general class for that.
                raise paramiko.AuthenticationException(str(error)) from None
            raise
    return client


def _load_host_keys(client: paramiko.SSHClient, paths: Iterable[str], name: str) -> None:
    """Let a client accept the keys of one name in known_hosts files; paramiko's loader takes long for many hosts."""
    from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
    from paramiko.ssh_exception import SSHException

    keys, lines = client.get_host_keys(), [line for path in paths for line in read_raw(Path(path)).splitlines()]
    marked = [words for line in lines if (words := line.split(None, 4))[:1] == ["@revoked"] and len(words) > 3]
    revoked = {words[3] for words in marked if _matches(name, words[1])}
    for line in lines:
        names = (line.split(None, 1) or [""])[0]
        # A name that begins with | is a hash, which only paramiko can compare. It knows no patterns.
        is_hash = names.startswith("|")
        if not is_hash and not _matches(name, names):
            continue
        with suppress(SSHException, InvalidHostKey):
            entry = HostKeyEntry.from_line(line.strip())
            if entry is None or entry.key is None or entry.key.get_base64() in revoked:
                continue
            for one in (entry.hostnames or ()) if is_hash else (name,):
                # Of two keys of the same type, the first one counts, as in paramiko.
                if entry.key.get_name() not in (keys.lookup(one) or {}):
                    keys.add(one, entry.key.get_name(), entry.key)


def _matches(name: str, patterns: str) -> bool:
    """Return whether a name fits one of the patterns of a line of known_hosts, and none that begins with `!`."""
    fits = [one for one in patterns.split(",") if fnmatchcase(name, one.removeprefix("!").replace("[", "[[]"))]
    return bool(fits) and not any(one.startswith("!") for one in fits)


def _has_key() -> bool:
    import paramiko

    if any(os.path.exists(os.path.expanduser(f"~/.ssh/id_{kind}")) for kind in ("ed25519", "ecdsa", "rsa")):
        return True
    try:
        return bool(paramiko.Agent().get_keys())
    except (paramiko.SSHException, OSError):
        return False


def _open_stream(login: Login, bastion: paramiko.SSHClient | None, seconds: float) -> Any:
    """Return what carries a session: a channel of the bastion, the ProxyCommand's streams, or a socket."""
    import paramiko

    if bastion:
        link = bastion.get_transport()
        assert link is not None
        try:
            return link.open_channel("direct-tcpip", (login.address, login.port), ("", 0), timeout=seconds)
        except paramiko.ChannelException as error:
            advice = ": see AllowTcpForwarding and PermitOpen in its sshd_config" * (error.code == _PROHIBITED)
            raise OSError(f"the bastion does not connect to it, {error.text}{advice}") from None
    if login.proxy:
        return paramiko.ProxyCommand(login.proxy)
    try:
        connection = socket.create_connection((login.address, login.port), timeout=min(seconds, _DIAL_SECONDS))
        detect_dead_peer(connection)  # and what was not sent yet never arrives there
        return connection
    except TimeoutError:
        raise
    except UnicodeError:  # a part of the name is empty or longer than 63 characters (RFC 1035)
        raise OSError("its name is not a valid host name") from None
    except OSError as error:
        where = "" if isinstance(error, socket.gaierror) else f" on port {login.port}"
        raise OSError(f"{error.strerror or error}{where}") from None


def _refuse_unknown_keys(host: Host) -> paramiko.MissingHostKeyPolicy:
    import paramiko

    class Refusal(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
            shown = f"{key.get_name()} {key.get_base64()}"
            raise HostError(
                host.name,
                KEY_UNKNOWN,
                f"its host key {key.get_name()} {fingerprint(shown)} is not in known_hosts, because this machine "
                f"has not connected to the host before",
            )

    return Refusal()


@contextmanager
def _raise_host_errors(host: Host, seconds: float = ssh_config.CONNECT_SECONDS) -> Iterator[None]:
    import paramiko

    try:
        yield
    except paramiko.BadHostKeyException as error:
        raise HostError(host.name, KEY_CHANGED, str(error)) from None
    except paramiko.AuthenticationException as error:
        raise HostError(host.name, LOGIN_REFUSED, str(error)) from None
    except TimeoutError:
        raise HostError(host.name, TIMED_OUT, f"no answer in {seconds:.0f} s") from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        what = str(error) or type(error).__name__
        advice = "if many log in there at the same time, raise MaxStartups in sshd_config" if _DROPPED in what else ""
        raise HostError(host.name, UNREACHABLE, what, advice) from None


def _run_in_session(client: paramiko.SSHClient, line: str, stdin: bytes, seconds: float) -> Answer:
    """Run a shell line. Three threads serve its streams, because neither end may wait for the other to read."""
    import paramiko

    link = client.get_transport()
    assert link is not None
    channel = link.open_session(timeout=seconds)
    errors, is_late = list[bytes](), threading.Event()

    def send() -> None:
        with suppress(OSError, EOFError):  # the command need not read, and the connection may be broken
            channel.sendall(stdin)
            channel.shutdown_write()

    def give_up() -> None:
        is_late.set()
        with suppress(paramiko.SSHException, OSError, EOFError):  # the connection may be broken, too
            channel.close()

    sender = threading.Thread(target=send, daemon=True)
    reader = threading.Thread(target=lambda: errors.append(channel.makefile_stderr("rb").read()), daemon=True)
    # paramiko waits without limit for the server's answers. A closed channel ends this.
    closer = threading.Timer(seconds, give_up)
    closer.daemon = True
    closer.start()
    try:
        channel.exec_command(line)
        sender.start()
        reader.start()
        output = channel.makefile("rb").read()
        reader.join()
        code = channel.recv_exit_status()
    except (paramiko.SSHException, EOFError):
        if not is_late.is_set():
            raise
    finally:
        closer.cancel()
    if is_late.is_set():
        raise TimeoutError
    if code < 0:  # paramiko's value for no exit code, which must not pass for an answer of the command
        raise EOFError("the connection broke while a command ran there, or a signal ended the command")
    return Answer(code, output.decode(errors="replace"), b"".join(errors).decode(errors="replace"))


def scan_host_key(host: Host, config_path: str = "", seconds: float = 0.0) -> str:
    """Return the public key that a host's ssh server shows, "ssh-ed25519 AAAA...", without a login. It is not verified.
    `seconds` is the time limit for the key exchange, before which the kernel has 3.5 s to accept the connection; 0 for
    the limits of a session. Raises CpuftError: the host or a bastion cannot be used.
    """
    import paramiko

    login, limit = read_login(host, config_path), min(ssh_config.CONNECT_SECONDS, seconds or ssh_config.CONNECT_SECONDS)
    with ExitStack() as stack, _raise_host_errors(host, limit):
        bastion = _log_in_to_bastions(login, config_path, stack)
        dial = min(limit, _PROBE_DIAL_SECONDS) if seconds and not bastion else limit
        link = stack.enter_context(paramiko.Transport(_open_stream(login, bastion, dial)))
        link.start_client(timeout=limit)
        key = link.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"


def fingerprint(public_key: str) -> str:
    """Return the fingerprint of a public key "TYPE BASE64 [COMMENT]" as `ssh-keygen -l` shows it: "SHA256:..."."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
