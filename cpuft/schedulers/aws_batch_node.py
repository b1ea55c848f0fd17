"""What every node of an AWS Batch job runs: all meet, the main node runs the launch, and all end as it does."""

from __future__ import annotations

import hmac
import io
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from types import FrameType
from typing import Any

import paramiko
from paramiko import common

from cpuft import execute
from cpuft.config import is_count
from cpuft.errors import RESUMABLE, CpuftError
from cpuft.files import hash_text, write_text
from cpuft.hosts import facts
from cpuft.hosts.cluster import JOB
from cpuft.hosts.ssh_config import Member, format_inside
from cpuft.terminal import detect_dead_peer

TOKEN = "CPUFT_BATCH_TOKEN"
"""The job's secret, which Batch fetches from Secrets Manager."""
SECONDS = "CPUFT_MEET_SECONDS"
"""Within which all nodes must have met: an image of some GB may still be on its way to the last one."""
_MEET_SECONDS, _DAY = "600", 86400
_NUMBERS = ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES")
_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_JOB = "AWS_BATCH_JOB_ID"
_LEAST_LETTERS = 32


@dataclass(frozen=True)
class Node:
    """A node's place in its job."""

    job: str
    index: int
    main: int
    count: int
    address: str
    """Of the main node, which Batch does not tell itself."""
    seconds: int
    token: str = field(repr=False)


def parse_node(environ: Mapping[str, str]) -> Node:
    """A node's place. Raises CpuftError: variables are missing or contradict each other, or there is no token."""
    said = ", ".join(f"{name}={environ.get(name, '')[:40]!r}" for name in _NUMBERS)
    # A node's own name is the job's with its index behind.
    job, texts = environ.get(_JOB, "").partition("#")[0], [environ.get(name, "") for name in _NUMBERS]
    if not job or not all(is_count(text, 0, 99_999) for text in texts):
        raise CpuftError(f"this is no node of a multi-node job of AWS Batch ({said}): start it by cpuft submit batch")
    index, main, count = map(int, texts)
    if max(index, main) >= count:
        raise CpuftError(f"Batch's variables contradict each other ({said}): see which of them the job sets itself")
    address, token, seconds = environ.get(_ADDRESS, ""), environ.get(TOKEN, ""), environ.get(SECONDS, _MEET_SECONDS)
    if not _is_address(address) if address else index != main:
        raise CpuftError(f"{_ADDRESS}={address[:40]!r} is no address of a main node: leave it to Batch")
    if count > 1 and len(token) < _LEAST_LETTERS:
        what = "is too short a secret" if token else "is not set"
        raise CpuftError(f"{TOKEN} {what}: give cpuft submit batch --secret one of {_LEAST_LETTERS} characters or more")
    if not is_count(seconds, most=_DAY):
        raise CpuftError(f"{SECONDS}={seconds[:40]!r}: give whole seconds, {_DAY} at most")
    return Node(job, index, main, count, address, int(seconds), token)


def _is_address(text: str) -> bool:
    try:
        return not IPv4Address(text).is_unspecified
    except ValueError:
        return False


def passing(text: str) -> CpuftError:
    """An error for which no input is to blame: another attempt may do."""
    error = CpuftError(text)
    error.is_transient = True
    return error


def choose_address(interfaces: Mapping[str, str], routed: str) -> str:
    """Where the main node listens: its one address of a network of its own; of several `routed`, by which it reaches
    others. Containers have one of 169.254.0.0/16 beside it, by which they ask for their role.

    Raises CpuftError: there is none.
    """
    own = [one for one in interfaces.values() if not (IPv4Address(one).is_loopback or IPv4Address(one).is_link_local)]
    if routed in own or len(own) == 1:
        return routed if routed in own else own[0]
    said = ", ".join(f"{name} {address}" for name, address in sorted(interfaces.items()))
    raise CpuftError(f"the main node cannot tell its address among {said}: give the job a network mode of awsvpc")


class Keys:
    """A server's key and its clients' (ed25519): the same on all nodes of a job, and others in other jobs."""

    def __init__(self, node: Node) -> None:
        import paramiko

        made = [_make_key(node, role) for role in ("server", "client", "mark")]
        self.server, self.client, mark = (paramiko.Ed25519Key(file_obj=io.StringIO(text)) for text in made)
        self.client_file = made[1]
        """The client's private key, for ssh."""
        self.server_line = f"{self.server.get_name()} {self.server.get_base64()}"
        """The server's public key."""
        self.mark = f".cpuft-{hash_text(mark.get_base64(), 16)}"
        """A file of the main node's: who sees it works in the same folder."""


def _make_key(node: Node, role: str) -> str:
    """A private key in OpenSSH's form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    words = f"cpuft {role} {node.job}".encode(errors="surrogateescape")
    seed = hmac.digest(node.token.encode(errors="surrogateescape"), words, "sha256")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    return Ed25519PrivateKey.from_private_bytes(seed).private_bytes(*form).decode()


Answer = Callable[[paramiko.Channel, str], None]
"""What is done about a command, in a thread of its own."""
Say = Callable[[str], object]
PROOF_SECONDS, _STRANGERS, _STRANGERS_BYTES = 10.0, 256, 1 << 16
"""Connections that have not proved yet to hold the key: how long that may take, how many of them there may be at a
time, and how many bytes each may send."""
_GREETING_SECONDS = 3.0
"""Within which a connection must have sent its first byte: ssh clients send their version at once."""
_TOLD = 5
_SOON, _END_SECONDS = 0.01, 8.0
_SERVER_POLL_SECONDS = 0.02
_BLOCK = 1 << 16


class Server:
    """Serves until it is closed; sessions stay.

    Parameters
    ----------
    place: address and port, the only ones that it listens on; port 0 for any.
    keys: its own key, and that of whoever may log in.
    say: told of the first refused connections.
    seconds: within which a connection has to prove to hold the key.

    Each connection has a thread. Of more than `_STRANGERS` unproved ones the oldest of the busiest address is dropped:
    connections that stay silent cannot keep a node out, which needs less than a second for its proof.
    """

    def __init__(
        self, place: tuple[str, int], keys: Keys, answer: Answer, say: Say, seconds: float = PROOF_SECONDS
    ) -> None:
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        self._keys, self._answer, self._say, self._seconds = keys, answer, say, seconds
        self._listener = socket.create_server(place, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._closed, self._refused = False, 0
        self._strangers: dict[socket.socket, str] = {}
        """Connections without a proof yet, the oldest first, each with its address."""
        self._lock = threading.Lock()
        """Held by whoever reads or changes `_strangers`."""
        self._transports: list[paramiko.Transport] = []
        self._answers: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="cpuft-batch", daemon=True).start()

    def close(self) -> None:
        """Let nobody else in."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def end(self) -> None:
        """End all sessions, and what was started in them."""
        self.close()
        end = time.monotonic() + _END_SECONDS
        for transport in self._transports:
            transport.close()
        for answer in self._answers:
            answer.join(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, (address, _) = self._listener.accept()
            except OSError:  # closed, or no descriptor is left for now
                time.sleep(_SERVER_POLL_SECONDS)
                continue
            self._admit(connection, address)
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Count a new connection among the unproved ones, and drop the one that gives way to it."""
        with self._lock:
            self._strangers[connection] = address
            if len(self._strangers) <= _STRANGERS:
                return
            busiest, _ = Counter(self._strangers.values()).most_common(1)[0]
            oldest = next(one for one, whose in self._strangers.items() if whose == busiest)
            del self._strangers[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def _forget(self, connection: socket.socket) -> None:
        """No longer count a connection among the unproved ones."""
        with self._lock:
            self._strangers.pop(connection, None)

    def _serve(self, connection: socket.socket, address: str) -> None:
        """A connection, from its first byte to its last."""
        transport = None
        with closing(connection), suppress(OSError, EOFError, paramiko.SSHException):
            try:
                detect_dead_peer(connection)
                connection.settimeout(min(_GREETING_SECONDS, self._seconds))
                if connection.recv(1, socket.MSG_PEEK):
                    bounded: Any = _Bounded(connection, lambda: _is_known(transport))
                    transport = paramiko.Transport(bounded)
                    self._wait_for_proof(transport, lambda: self._forget(connection))
            finally:
                self._forget(connection)
            if transport and _is_known(transport):
                transport.join()
                return
        if transport:
            transport.close()
        self._refused += 1
        if self._refused <= _TOLD and not self._closed:
            self._say(f"cpuft: dropped a connection from {address}: it did not prove to know the job's secret")

    def _begin(self, channel: paramiko.Channel, line: str) -> None:
        # Not at once: only when this has returned the client hears that its request is granted.
        timer = threading.Timer(_SOON, self._answer, (channel, line))
        timer.daemon = True
        timer.start()
        self._answers.append(timer)

    def _wait_for_proof(self, transport: paramiko.Transport, proved: Callable[[], object]) -> None:
        transport.add_server_key(self._keys.server)
        self._transports.append(transport)
        transport.start_server(threading.Event(), _Interface(self._keys.client, self._begin, proved))
        end = time.monotonic() + self._seconds
        while transport.is_alive() and not _is_known(transport) and time.monotonic() < end:
            transport.join(_SERVER_POLL_SECONDS)


def _is_known(transport: paramiko.Transport | None) -> bool:
    """Whether its other end has proved to hold the key; also when it is over."""
    return bool(transport and transport.auth_handler and transport.auth_handler.is_authenticated())


class _Bounded:
    """A socket that takes no more than a little from strangers: paramiko believes any length that they announce."""

    def __init__(self, connection: socket.socket, known: Callable[[], bool]) -> None:
        self._connection, self._known, self._bytes = connection, known, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def recv(self, size: int) -> bytes:
        data = self._connection.recv(size)
        self._bytes += len(data)
        if self._bytes > _STRANGERS_BYTES and not self._known():
            raise EOFError
        return data


class _Interface(paramiko.ServerInterface):
    """Commands for whoever holds the key, and nothing else: no shell, terminal or forwarding."""

    def __init__(self, client: paramiko.PKey, answer: Answer, proved: Callable[[], object]) -> None:
        self._client, self._answer, self._proved = client, answer, proved

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if key != self._client:
            return int(common.AUTH_FAILED)
        self._proved()  # before the client hears of it: from then on it must not be dropped
        return int(common.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        refused = common.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        return int(common.OPEN_SUCCEEDED if kind == "session" else refused)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._answer(channel, command.decode(errors="surrogateescape"))
        return True


def run_command(environ: Mapping[str, str], channel: paramiko.Channel, line: str) -> None:
    """Run a shell line as sshd does; when its channel ends before it, so does all that it started."""
    with closing(channel), suppress(OSError, EOFError, paramiko.SSHException):
        process = execute.start_process(("sh", "-c", line), environ, execute.PIPE)
        pairs = ((process.stdout, channel.sendall), (process.stderr, channel.sendall_stderr))
        copies = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs]
        for thread in (threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True), *copies):
            thread.start()
        while not channel.closed and (process.poll() is None or any(copy.is_alive() for copy in copies)):
            time.sleep(_SERVER_POLL_SECONDS)
        if process.poll() is None:
            execute.stop_processes([process])
        channel.send_exit_status(execute.exit_code_of(process))


def _copy(file: Any, send: Callable[[bytes], object]) -> None:
    with suppress(OSError), file:
        while data := os.read(file.fileno(), _BLOCK):
            send(data)


def _feed(channel: paramiko.Channel, file: Any) -> None:
    with suppress(OSError), file:
        for data in iter(partial(channel.recv, _BLOCK), b""):
            file.write(data)
            file.flush()


_MEET = re.compile(r"meet (0|[1-9][0-9]{0,4}) ([1-9][0-9]{0,4}) (yes|no)", re.ASCII)
_POLL_SECONDS = 0.05
_INTERRUPT_SECONDS = 30.0
"""Within which a launch ends after Ctrl-C."""
_LEAVE_SECONDS = 5.0
_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way there is the way out."""


@dataclass(frozen=True)
class Guest:
    """Another node, once it has come."""

    address: str
    port: int
    """Of its server."""
    shares: bool
    """Whether it sees the main node's folder."""
    channel: paramiko.Channel
    """Open while it lives; the other end's is closed when it has been told to go."""


def parse_meet(line: str) -> tuple[int, int, bool]:
    """What a node says when it comes: its index, its server's port, and whether it sees the main node's folder.

    Raises CpuftError: it says something else.
    """
    found = _MEET.fullmatch(line)
    if not found or int(found[2]) > 65_535:
        raise CpuftError(f"{line[:80]!r} is nothing that a node of this job says: start one image on all nodes")
    return int(found[1]), int(found[2]), found[3] == "yes"


class Meeting:
    """Who has come, who is gone, and who has been told to go. Raises OSError where it cannot listen."""

    def __init__(self, node: Node, keys: Keys, place: tuple[str, int], say: Say) -> None:
        self._node, self._say = node, say
        self.guests: dict[int, Guest] = {}
        self.asked: set[int] = set()
        """Those that were told to go, and are still there."""
        self._server = Server(place, keys, self._greet, say)
        self.port = self._server.port

    def _greet(self, channel: paramiko.Channel, line: str) -> None:
        try:
            index, port, shares = parse_meet(line)
            if index in self.guests or index == self._node.main or index >= self._node.count:
                raise CpuftError(f"node {index} is here already, or none of this job's {self._node.count}")
            self.guests[index] = Guest(channel.getpeername()[0], port, shares, channel)
        except CpuftError as error:
            self._say(f"cpuft: refused a node: {error}")
            _dismiss(channel, 2)

    def look(self) -> list[int]:
        """Who is gone."""
        self.asked = {index for index, guest in self.guests.items() if guest.channel.eof_received}
        return [index for index, guest in sorted(self.guests.items()) if guest.channel.closed]

    def wait(self) -> None:
        """Until all have come; then the meeting is closed. Raises CpuftError that names those who did not."""
        end = time.monotonic() + self._node.seconds
        while missing := sorted(set(range(self._node.count)) - {self._node.main, *self.guests}):
            if gone := self.look():
                raise passing(f"{_name_nodes(gone)} went before all had come: see the log there")
            if time.monotonic() > end:
                raise passing(
                    f"{_name_nodes(missing)} did not come within {self._node.seconds} s: see the log there, "
                    f"or set {SECONDS} in the job's definition to more"
                )
            time.sleep(_POLL_SECONDS)
        self._server.close()

    def end(self, code: int) -> None:
        """Tell all the exit code, and wait a little for them to go."""
        transports = [guest.channel.get_transport() for guest in self.guests.values()]
        for guest in self.guests.values():
            _dismiss(guest.channel, code)
        end = time.monotonic() + _LEAVE_SECONDS
        while any(transport.is_active() for transport in transports) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        self._server.end()


def _dismiss(channel: paramiko.Channel, code: int) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException):
        channel.send_exit_status(code)
        channel.close()


def _name_nodes(indexes: Sequence[int]) -> str:
    return f"node{'s' * (len(indexes) > 1)} {', '.join(map(str, indexes))}"


def lead(node: Node, port: int, command: Sequence[str], environ: Mapping[str, str], say: Say) -> int:
    """The main node's part: wait for the others, run the command, tell all its exit code.

    Raises CpuftError: not all have come, or there is no such command.
    """
    address = node.address or choose_address(facts.read_interfaces(), facts.read_route(_ELSEWHERE))
    keys, code = Keys(node), RESUMABLE
    mark = Path(keys.mark).absolute()
    try:
        mark.touch()
        meeting = Meeting(node, keys, (address, port), say)
    except OSError as error:
        raise CpuftError(f"nodes cannot meet at {address} port {port} ({error.strerror}): see what is there") from None
    try:
        meeting.wait()
        with tempfile.TemporaryDirectory(prefix="cpuft-") as root:
            write_cluster(keys, address, meeting.guests, f"{root}/job")
            code = run_command_here(command, {**environ, JOB: f"{root}/job"}, say, meeting)
        return code
    finally:
        meeting.end(code)
        mark.unlink(missing_ok=True)


def write_cluster(keys: Keys, address: str, guests: Mapping[int, Guest], folder: str) -> None:
    """The nodes as a cluster that this one is the master of: what `cpuft.hosts.registry` reads, and ssh."""
    members = [Member(address, address, "", key=keys.server_line)]
    members += [Member(one.address, one.address, "", one.port, keys.server_line) for _, one in sorted(guests.items())]
    shares = all(guest.shares for guest in guests.values())
    files = format_inside(members, folder, sys.executable, shares_files=shares)
    for name, text in (files | {"id_ed25519": keys.client_file}).items():
        write_text(Path(folder, name), text)
    os.chmod(f"{folder}/id_ed25519", 0o600)


def run_command_here(
    command: Sequence[str], environ: Mapping[str, str], say: Say, meeting: Meeting | None = None
) -> int:
    """Run the command to its end; its exit code. Signals go on to it, as Ctrl-C does when a node is gone.

    Raises CpuftError: there is no such command.
    """
    try:
        process = execute.start_process(command, environ)
    except OSError as error:
        raise CpuftError(f"{command[0]} cannot be started ({error.strerror}): is it in the image?") from None
    sent: set[int] = set()

    def send(number: int, frame: FrameType | None = None) -> None:
        """Once: Batch tells all nodes at the same time, and a second SIGTERM would leave no time for a checkpoint."""
        if number not in sent:
            sent.add(number)
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, send)
    end, gone = 0.0, list[int]()
    while process.poll() is None and not (end and time.monotonic() > end):
        gone = meeting.look() if meeting else []
        if gone and not end:
            say(f"cpuft: {_name_nodes(gone)} of the job is gone, and with it the job: another attempt goes on")
            send(signal.SIGINT)
            end = time.monotonic() + _INTERRUPT_SECONDS
        elif meeting and meeting.asked and signal.SIGTERM not in sent:
            say(f"cpuft: {_name_nodes(sorted(meeting.asked))} of the job was told to go")
            send(signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    execute.stop_processes([process])
    code = execute.exit_code_of(process)
    return RESUMABLE if code and gone else code


PORT = 7077
"""Of the main node; the others take any."""
_NODE_POLL_SECONDS, _AGAIN_SECONDS = 0.05, 0.5


def run_node(words: Sequence[str], environ: Mapping[str, str], port: int = PORT) -> int:
    """A node's part in a job, from its start to its end; the exit code, which is the command's on all nodes.

    `words`: the folder to work in, which is made; and the command that the main node runs.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if len(words) < 2:
            raise CpuftError("name a folder and a command: python -m cpuft.schedulers.aws_batch_node FOLDER COMMAND...")
        node = parse_node(environ)
        _enter(words[0])
        rest = {name: value for name, value in environ.items() if name != TOKEN}
        if node.count == 1:
            return run_command_here(words[1:], rest, _say)
        return lead(node, port, words[1:], rest, _say) if node.index == node.main else _follow(node, rest, port)
    except CpuftError as error:
        _say(f"cpuft: error: {error}")
        return RESUMABLE if error.is_transient else 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _enter(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise CpuftError(f"{folder} cannot be worked in ({error.strerror}): name another folder") from None


def _follow(node: Node, environ: Mapping[str, str], port: int) -> int:
    """Any other node's part. Raises CpuftError: it does not find the main node, or loses it."""
    keys = Keys(node)
    told: list[int] = []
    connection, transport = _dial(node, port, keys)
    with transport:
        server = Server((connection.getsockname()[0], 0), keys, partial(run_command, environ), _say)
        try:
            channel = transport.open_session(timeout=PROOF_SECONDS)
            sees = "yes" if os.path.exists(keys.mark) else "no"
            channel.exec_command(f"meet {node.index} {server.port} {sees}")
            signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
            while not channel.exit_status_ready():
                if told and not channel.eof_sent:
                    channel.shutdown_write()
                time.sleep(_NODE_POLL_SECONDS)
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the main node is gone
        finally:
            code = channel.exit_status
            transport.close()
            server.end()
    if code < 0:
        raise passing(f"node {node.index} has lost the main node {node.address}: see the log there")
    return code


def _dial(node: Node, port: int, keys: Keys) -> tuple[socket.socket, paramiko.Transport]:
    """A session with the main node, which may start later than this one.

    Raises CpuftError: it is not there in time, or has another secret.
    """
    end, other = time.monotonic() + node.seconds, f"node {node.index} and the main node have different secrets"
    while True:
        try:
            connection = socket.create_connection((node.address, port), timeout=PROOF_SECONDS)
            detect_dead_peer(connection)
            transport = paramiko.Transport(connection)
            transport.start_client(timeout=PROOF_SECONDS)
            if transport.get_remote_server_key() != keys.server:
                transport.close()
                raise CpuftError(f"{other}: give all nodes the same {TOKEN}")
            transport.auth_publickey("cpuft", keys.client)
            return connection, transport
        except paramiko.AuthenticationException:
            raise CpuftError(f"{other}: give all nodes the same {TOKEN}") from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            if time.monotonic() > end:
                raise passing(
                    f"node {node.index} did not reach the main node {node.address} port {port} within {node.seconds} s "
                    f"({error}): see the log there, and let the job's security group reach itself"
                ) from None
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1:], os.environ))
