"""One door to a host: whether it is this machine or behind ssh, or behind a bastion, is known here and nowhere else."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts import facts, ssh
from cpuft.hosts.hostfile import Host

if TYPE_CHECKING:
    import paramiko

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
class Door:
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
            with ssh.open_session(host, self.config) as client:
                yield client
            return
        if host not in self.sessions.open:
            stack = ExitStack()
            self.sessions.open[host] = stack.enter_context(ssh.open_session(host, self.config)), stack
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

    def _login(self, host: Host) -> ssh.Login:
        """As ssh's configuration says; this machine's own name needs none, and no library that reads it."""
        return ssh.read_login(host, self.config) if host.name != "localhost" else ssh.Login(host.name, host.port or 22)

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        """Run a command on a host, give it `stdin`, wait `seconds` at most.

        Raises HostError: it cannot be reached, its key is unknown or changed, it does not let us in, or it takes
        longer.
        """
        if self.is_here(host):
            return execute.run_quietly(argv, seconds, stdin)
        with self._session(host) as client, ssh.telling(host, seconds):
            return _converse(client, shlex.join(argv), stdin.encode(), seconds)

    def find_silent(self, names: Sequence[str], seconds: float = _SILENT_SECONDS) -> set[str]:
        """The hosts, this machine apart, that do not answer in time: off, cut off or frozen. No login by ssh."""
        answers = attempt(lambda one: self.is_here(one) or self._greet(one, seconds), [*map(Host, names)])
        silent = {name for name, answer in zip(names, answers) if isinstance(answer, CpuftError)}
        self.silent.difference_update(names)
        self.silent.update(silent)
        return silent

    def _greet(self, host: Host, seconds: float) -> object:
        return ssh.scan_host_key(host, self.config, seconds)

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
    transport = client.get_transport()
    assert transport is not None
    channel = transport.open_session(timeout=seconds)
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
