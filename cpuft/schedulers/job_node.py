"""What every node of a job of AWS Batch, dstack or SkyPilot runs: all meet, the main node runs the launch, and all end
as it does.

All that these services tell a node alike is its number and the address of the main node. So every other node starts an
sshd, for the main node to use, and registers it with the main node over ssh. When all have registered, the main node
writes the ssh files of a cluster and starts the command, in which `cpuft launch` finds that cluster. The sessions stay
open to the end: they show which nodes are alive, and bring each node the exit code.

All keys are made of the job's secret, so no host key is accepted unseen. The main node runs nothing for other nodes but
the registration (`register`), whatever they ask for.

Sources of the variables: the user guide of AWS Batch, "Multi-node parallel job environment variables"; dstack's
documentation, "Distributed tasks"; SkyPilot's, "Distributed multi-node jobs".
"""

from __future__ import annotations

import hmac
import io
import logging
import os
import re
import secrets
import select
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import paramiko

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import RESUMABLE, CpuftError, TransientError, explain_os_error
from cpuft.files import hash_text, is_locked, write_text
from cpuft.hosts import facts, ssh_config
from cpuft.hosts.cluster import JOB
from cpuft.schedulers.base import JOB_SECRET
from cpuft.serialization import is_count
from cpuft.terminal import detect_dead_peer
from cpuft.transfer import open_locked

Say = Callable[[str], object]
SECONDS = "CPUFT_MEET_SECONDS"
"""Environment variable: seconds in which all nodes must register. An image of some GB may take long to reach a node."""
_MODULE = "cpuft.schedulers.job_node"
PORT = 7077
"""Port of the main node; the other nodes use any free port."""
_DEFAULT_SECONDS, _MOST_SECONDS = "600", 86400
_SHORTEST_SECRET = 32
_REGISTRATION = re.compile(r"([0-9.]{7,15}) ([0-9.]{7,15}) (0|[1-9][0-9]{0,4}) ([1-9][0-9]{0,4}) (yes|no)", re.ASCII)
_LEAVING = "leaving"
"""What a node sends to the main node when it has received SIGTERM."""
_MAIN, _IS_LEAVING, _CODE = "main", ".leaving", ".code"
"""In the folder of the registrations: a file that the main node holds the lock of, and what stands in place of .node in
the name of a registration for a file that says that the node is leaving, and for a link to its exit code."""
_EVERYWHERE = "0.0.0.0"
"""AWS Batch does not tell the main node its own address."""
_CONNECT_SECONDS, _RETRY_SECONDS, _POLL_SECONDS = 10.0, 0.5, 0.2
_INTERRUPT_SECONDS, _LEAVE_SECONDS = 30.0, 30.0
"""Time limits for a launch to end after Ctrl-C, and for the other nodes to end after the launch."""
_SERVER = {
    "AuthenticationMethods": "publickey",
    # A connection that does not log in is dropped after 10 s, and 500 of them do not keep a node out.
    "LoginGraceTime": "10",
    "MaxStartups": "500:30:1000",
    # The folder of the keys is below /tmp, where others may write, and belongs to this user alone.
    "StrictModes": "no",
    # Without the limit others could fill the job's log.
    "LogLevel": "FATAL",
}
_SESSION = '[ "$SSH_ORIGINAL_COMMAND" ] || exit 1\nexec setpriv --pdeathsig TERM sh -c "$SSH_ORIGINAL_COMMAND"\n'
"""What a node's ssh server runs for the main node: its command, which ends when its session does."""


@dataclass(frozen=True)
class _Service:
    """Names of the variables by which a service tells a node its place in its job."""

    name: str
    job: str
    index: str
    count: str
    address: str
    """Of the address of the main node, in its first line; AWS Batch does not tell it to the main node itself."""
    main: str = ""
    """Of the index of the main node; "" where that is 0."""


_SERVICES = (
    _Service(
        "AWS Batch",
        "AWS_BATCH_JOB_ID",
        "AWS_BATCH_JOB_NODE_INDEX",
        "AWS_BATCH_JOB_NUM_NODES",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX",
    ),
    _Service("dstack", "DSTACK_RUN_NAME", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    _Service("SkyPilot", "SKYPILOT_TASK_ID", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
)


@dataclass(frozen=True)
class Node:
    """A node's place in its job."""

    job: str
    index: int
    main: int
    """Index of the main node."""
    count: int
    """Number of nodes."""
    address: str
    """Address of the main node; it may be empty on the main node itself."""
    seconds: int
    """Seconds within which all nodes must have registered."""
    token: str = field(repr=False)


def parse_node(environ: Mapping[str, str]) -> Node:
    """Return this node's place in its job, from the variables of its service, CPUFT_JOB_TOKEN and CPUFT_MEET_SECONDS
    (default 600). Raises CpuftError: no service has set its variables, a variable is not valid, or there are several
    nodes and no secret of 32 characters.
    """
    service = next((one for one in _SERVICES if environ.get(one.job)), None)
    if service is None:
        services = ", ".join(one.name for one in _SERVICES)
        raise CpuftError(f"this is not a node of a job of {services}: start it by cpuft submit")
    names = [name for name in (service.index, service.count, service.main) if name]
    shown = ", ".join(f"{name}={environ.get(name, '')[:40]!r}" for name in names)
    if not all(is_count(environ.get(name, ""), 0, 99_999) for name in names):
        raise CpuftError(f"this is not a node of a job with several nodes ({shown}): start it by cpuft submit")
    index, count, main = (int(environ[name]) if name else 0 for name in (service.index, service.count, service.main))
    address = environ.get(service.address, "").partition("\n")[0]
    token, seconds = environ.get(JOB_SECRET, ""), environ.get(SECONDS, _DEFAULT_SECONDS)
    if count > 1 and len(token) < _SHORTEST_SECRET:
        what = "is too short" if token else "is not set"
        raise CpuftError(
            f"{JOB_SECRET} {what}: submit the job by cpuft submit, with --secret on AWS Batch, which takes a secret of "
            f"{_SHORTEST_SECRET} characters or more"
        )
    if not is_count(seconds, most=_MOST_SECONDS):
        raise CpuftError(f"{SECONDS}={seconds[:40]!r}: give a whole number of seconds, at most {_MOST_SECONDS}")
    # On AWS Batch, a node's identifier is that of its job, followed by # and its index.
    return Node(environ[service.job].partition("#")[0], index, main, count, address, int(seconds), token)


class Keys:
    """The job's keys (ed25519): the same on all nodes of a job, different for other jobs and other secrets."""

    def __init__(self, node: Node) -> None:
        self.host_file, self.login_file = (_make_key(node, role) for role in ("server", "client"))
        """The private keys in OpenSSH's form: the host key of all nodes, and the key to log in with."""
        texts = (self.host_file, self.login_file)
        self.host, self.login = (paramiko.Ed25519Key(file_obj=io.StringIO(text)) for text in texts)
        self.host_line, self.login_line = (f"{key.get_name()} {key.get_base64()}" for key in (self.host, self.login))
        self.mark = f".cpuft-{hash_text(self.login_line, 16)}"
        """Name of a file of the main node: a node that sees it works in the same folder."""


def _make_key(node: Node, role: str) -> str:
    """Return a private key in OpenSSH's form that depends on the secret, the job and the key's role only."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    message = f"cpuft {role} {node.job}".encode(errors="surrogateescape")
    seed = hmac.digest(node.token.encode(errors="surrogateescape"), message, "sha256")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    return Ed25519PrivateKey.from_private_bytes(seed).private_bytes(*form).decode()


@contextmanager
def serve(keys: Keys, folder: Path, place: tuple[str, int], environ: Mapping[str, str], script: str) -> Iterator[None]:
    """Inside, an ssh server listens on one address and port. Open sessions go on after it has stopped.

    Whoever has the job's key may log in without a terminal or forwarding, and runs `script`, POSIX shell that has the
    command in $SSH_ORIGINAL_COMMAND. `folder` is for the server's files, and must be this user's alone. Raises
    CpuftError: there is no sshd, or it cannot use the port; TransientError: it does not start.
    """
    ssh_config.prepare_sshd()
    try:
        socket.create_server(place).close()
    except OSError as error:
        raise CpuftError(
            f"sshd cannot use {place[0]} port {place[1]} ({os.strerror(error.errno or 0)}): check what uses it"
        ) from None
    variables = {name: value for name, value in environ.items() if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    (folder / "session.sh").write_bytes(f"{exports}{script}".encode(errors="surrogateescape"))
    write_text(folder / "authorized_keys", f'restrict,command="/bin/sh {folder}/session.sh" {keys.login_line}\n')
    write_text(folder / "host_key", keys.host_file)
    os.chmod(folder / "host_key", 0o600)
    files = {"AuthorizedKeysFile": f"{folder}/authorized_keys", "ListenAddress": f"{place[0]}:{place[1]}"}
    command = ssh_config.sshd_command(f"{folder}/host_key", place[1], "-f", "/dev/null", **_SERVER, **files)
    server = execute.start_process(command, environ)
    try:
        end = time.monotonic() + _CONNECT_SECONDS
        while not _listens(place):
            if server.poll() is not None or time.monotonic() > end:
                raise TransientError(f"sshd does not start on {place[0]} port {place[1]}: see its message above")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        execute.stop_processes([server])


def _listens(place: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(place, timeout=_CONNECT_SECONDS):
        return True
    return False


def parse_registration(text: str) -> tuple[str, str, int, int, bool]:
    """Return a node's (address, main node's address as it sees that, index, port, whether it sees the main folder) from
    "10.0.0.2 10.0.0.1 1 7078 yes". Raises CpuftError: the text has another form.
    """
    found = _REGISTRATION.fullmatch(text)
    if not found or int(found[4]) > 65_535:
        raise CpuftError(f"{text[:80]!r} is not the registration of a node: start the same image on all nodes")
    return found[1], found[2], int(found[3]), int(found[4]), found[5] == "yes"


def register(folder: str, environ: Mapping[str, str]) -> int:
    """Register a node by a file in `folder`, which this process locks; runs on the main node in that node's session.

    `environ` is that of sshd, whose SSH_ORIGINAL_COMMAND is the registration. Reads standard input, and returns the
    exit code that the main node gives beside the file, or 255 when either end has gone, or on a full disk.
    """
    path = Path(folder, f"{secrets.token_hex(8)}.node")
    asked = " ".join(environ.get("SSH_ORIGINAL_COMMAND", "").split())
    node, _, here, *_ = environ["SSH_CONNECTION"].split()
    try:
        held = open_locked(str(path.with_suffix(".new")))  # until this process ends
        os.write(held, f"{node} {here} {asked}\n".encode(errors="replace"))
        path.with_suffix(".new").rename(path)
    except OSError:
        return 255
    while is_locked(f"{folder}/{_MAIN}"):
        if select.select([sys.stdin], [], [], _RETRY_SECONDS)[0]:
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                return 255
            if data == f"{_LEAVING}\n".encode():
                path.with_suffix(_IS_LEAVING).touch()
        with suppress(OSError):
            return int(os.readlink(path.with_suffix(_CODE)))
    return 255


@dataclass(frozen=True)
class OtherNode:
    """Another node, as its registration describes it."""

    path: Path
    """The file that its `register` holds the lock of."""
    address: str
    port: int
    """Port of its ssh server."""
    shares_folder: bool
    """Whether it sees the main node's folder."""

    @property
    def is_gone(self) -> bool:
        """Whether its session has ended."""
        return not is_locked(self.path)

    def dismiss(self, code: int) -> None:
        """Let the node end with an exit code. Nothing happens if it has one already."""
        with suppress(OSError):
            os.symlink(str(code), self.path.with_suffix(_CODE))  # unlike a file, it fits on a full disk


class Registry:
    """The other nodes that registered with the main node by files in a folder, which is made at once."""

    def __init__(self, node: Node, folder: Path, say: Say) -> None:
        self._node, self._folder, self._say, self._seen = node, folder, say, set[Path]()
        folder.mkdir()
        self._held = open_locked(f"{folder}/{_MAIN}")
        self.nodes: dict[int, OtherNode] = {}
        """The other nodes by index."""
        self.address = ""
        """Address of the main node, by which the others reach it."""

    def _update(self) -> None:
        """Take in the registrations that have come since the last call."""
        for path in {*self._folder.glob("*.node")} - self._seen:
            self._seen.add(path)
            try:
                address, here, index, port, shares_folder = parse_registration(path.read_text(errors="replace").strip())
                if index in self.nodes or index == self._node.main or index >= self._node.count:
                    raise CpuftError(f"node {index} has registered already, or is not one of {self._node.count} nodes")
            except CpuftError as error:
                self._say(f"cpuft: refused a node: {error}")
                OtherNode(path, "", 0, False).dismiss(2)
            else:
                self.nodes[index], self.address = OtherNode(path, address, port, shares_folder), here

    def find_gone(self) -> list[int]:
        """Return the indexes of the nodes whose sessions have ended, sorted."""
        return sorted(index for index, other in self.nodes.items() if other.is_gone)

    def find_leaving(self) -> list[int]:
        """Return the indexes of the nodes that have received SIGTERM, sorted."""
        return sorted(index for index, other in self.nodes.items() if other.path.with_suffix(_IS_LEAVING).exists())

    def wait(self) -> None:
        """Wait until all nodes have registered. Raises TransientError: a node has gone, or `Node.seconds` are over."""
        end = time.monotonic() + self._node.seconds
        while True:
            self._update()
            missing = sorted(set(range(self._node.count)) - {self._node.main, *self.nodes})
            if not missing:
                return
            if gone := self.find_gone():
                raise TransientError(f"{_name_nodes(gone)} ended before all nodes had registered: see the log there")
            if time.monotonic() > end:
                raise TransientError(
                    f"{_name_nodes(missing)} did not register within {self._node.seconds} s: see the log there, "
                    f"or set {SECONDS} in the job's definition to more"
                )
            time.sleep(_POLL_SECONDS)

    def dismiss(self, code: int) -> None:
        """Let all nodes end with an exit code, and wait up to 30 s until they have ended."""
        for other in self.nodes.values():
            other.dismiss(code)
        end = time.monotonic() + _LEAVE_SECONDS
        while len(self.find_gone()) < len(self.nodes) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        os.close(self._held)


def _name_nodes(indexes: Sequence[int]) -> str:
    return f"node{'s' * (len(indexes) > 1)} {', '.join(map(str, indexes))}"


def _run_main_node(node: Node, port: int, command: Sequence[str], environ: Mapping[str, str], say: Say) -> int:
    """Wait for all nodes, run the command, and give its exit code, or 75 if this raises, to the others; return it."""
    keys, code = Keys(node), RESUMABLE
    mark = Path(keys.mark).absolute()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cpuft-"))
        registry = Registry(node, Path(folder, "nodes"), say)
        registering = shlex.join([*module_command(sys.executable, _MODULE), "--register", f"{folder}/nodes"])
        mark.touch()  # other nodes that see it know that they share this folder
        stack.callback(mark.unlink, missing_ok=True)
        stack.callback(lambda: registry.dismiss(code))
        with serve(keys, Path(folder), (_EVERYWHERE, port), environ, f"exec {registering}\n"):
            registry.wait()
        _write_cluster(keys, registry.address, registry.nodes, f"{folder}/job")
        code = run_command(command, {**environ, JOB: f"{folder}/job"}, say, registry)
    return code


def _write_cluster(keys: Keys, address: str, nodes: Mapping[int, OtherNode], folder: str) -> None:
    others = (ssh_config.Member(one.address, one.address, "", one.port) for _, one in sorted(nodes.items()))
    members = [replace(one, key=keys.host_line) for one in (ssh_config.Member(address, address, ""), *others)]
    shares = all(one.shares_folder for one in nodes.values())
    files = ssh_config.format_inside(members, folder, sys.executable, shares_files=shares)
    for name, text in (files | {"id_ed25519": keys.login_file}).items():
        write_text(Path(folder, name), text)
    os.chmod(f"{folder}/id_ed25519", 0o600)


def run_command(command: Sequence[str], environ: Mapping[str, str], say: Say, registry: Registry | None = None) -> int:
    """Run the job's command to its end and return its exit code; 75 where it failed after another node had gone.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the command; their handlers stay. When another node has
    gone, the command gets SIGINT, and is ended after 30 s. OSError: the command cannot be started.
    """
    process = execute.start_process(command, environ)
    sent: set[int] = set()

    def send(number: int, frame: FrameType | None = None) -> None:
        """Send a signal once: a service signals all nodes, and a second one would leave no time for a checkpoint."""
        if number not in sent:
            sent.add(number)
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, send)
    end, gone = 0.0, list[int]()
    while process.poll() is None and not (end and time.monotonic() > end):
        if registry:
            gone = registry.find_gone()
            if gone and not end:
                say(f"cpuft: {_name_nodes(gone)} has gone: the job ends, and another attempt resumes the run")
                send(signal.SIGINT)
                end = time.monotonic() + _INTERRUPT_SECONDS
            elif (leaving := registry.find_leaving()) and signal.SIGTERM not in sent:
                say(f"cpuft: {_name_nodes(leaving)} of the job received an interruption notice")
                send(signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    execute.stop_processes([process])
    code = execute.exit_code_of(process)
    return RESUMABLE if code and gone else code


def _run_other_node(node: Node, environ: Mapping[str, str], port: int) -> int:
    """Serve the main node's commands until it ends this node; return its exit code. It is told of a SIGTERM, once."""
    keys = Keys(node)
    signals: list[int] = []
    connection, session = _dial_main_node(node, port, keys)
    code = -1
    with ExitStack() as stack:
        stack.enter_context(session)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpuft-")))
        own_port = facts.find_free_port()
        stack.enter_context(serve(keys, folder, (connection.getsockname()[0], own_port), environ, _SESSION))
        with suppress(OSError, EOFError, paramiko.SSHException):  # the main node has gone
            channel = session.open_session(timeout=_CONNECT_SECONDS)
            channel.exec_command(f"{node.index} {own_port} {'yes' if os.path.exists(keys.mark) else 'no'}")
            signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
            has_told = False
            while not channel.exit_status_ready():
                if signals and not has_told:
                    channel.sendall(f"{_LEAVING}\n".encode())
                    has_told = True
                time.sleep(_POLL_SECONDS)
            code = channel.exit_status
    if code in (-1, 255):
        raise TransientError(f"node {node.index} has lost the main node {node.address}: see the log there")
    return code


def _dial_main_node(node: Node, port: int, keys: Keys) -> tuple[socket.socket, paramiko.Transport]:
    """Log in to the main node, which may start later than this one; return (connection, session)."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # its threads log tracebacks of errors handled here
    end = time.monotonic() + node.seconds
    differs = CpuftError(
        f"node {node.index} and the main node have different secrets: give all nodes the same {JOB_SECRET}"
    )
    while True:
        try:
            connection = socket.create_connection((node.address, port), timeout=_CONNECT_SECONDS)
            detect_dead_peer(connection)
            session = paramiko.Transport(connection)
            session.start_client(timeout=_CONNECT_SECONDS)
            if session.get_remote_server_key() != keys.host:
                session.close()
                raise differs
            session.auth_publickey(ssh_config.find_user(), keys.login)
            return connection, session
        except paramiko.AuthenticationException:
            raise differs from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            if time.monotonic() > end:
                raise TransientError(
                    f"node {node.index} did not reach the main node {node.address} port {port} within {node.seconds} s "
                    f"({error}): see the log there, and let the job's security group reach itself"
                ) from None
        time.sleep(_RETRY_SECONDS)


def run_node(argv: Sequence[str], environ: Mapping[str, str], port: int = PORT) -> int:
    """Do a node's part in a job: work in the folder argv[0], and on the main node run the command argv[1:].

    Returns the command's exit code on all nodes; after an error 75 if another attempt may succeed, else 2. SIGTERM ends
    a node with 143 until the command runs or the node has registered.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        node = parse_node(environ)
        os.makedirs(argv[0], exist_ok=True)
        os.chdir(argv[0])
        rest = {name: value for name, value in environ.items() if name != JOB_SECRET}
        if node.count == 1:
            return run_command(argv[1:], rest, _print)
        if node.index == node.main:
            return _run_main_node(node, port, argv[1:], rest, _print)
        return _run_other_node(node, rest, port)
    except CpuftError as error:
        _print(f"cpuft: error: {error}")
        return RESUMABLE if error.is_transient else 2
    except OSError as error:
        _print(f"cpuft: error: {explain_os_error(error) or error}")
        return RESUMABLE  # the node of another attempt may have room on its disk


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    given, variables = sys.argv[1:], os.environ
    sys.exit(register(given[1], variables) if given[:1] == ["--register"] else run_node(given, variables))
