"""Send files to many hosts as a tree: one copy goes to the first host, and the hosts send the files on to each other.

`python -m cpuft.launch.relay` reads a `RelayOrder` as JSON and starts `python -m cpuft.launch.relay receive` on each
host over ssh. Hosts often cannot log in to each other, so each listens on its address in the cluster's network until
the hosts that it serves have connected. Both ends must show a certificate that the sender makes for one transfer (TLS
1.3). The certificate and its private key reach the hosts on the standard input of ssh, and are never on a disk.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import select
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from cpuft import execute, transfer
from cpuft.errors import CpuftError, join_last_lines
from cpuft.serialization import load, parse_json
from cpuft.terminal import detect_dead_peer

FAN_OUT = 2
"""Number of hosts to which a host sends. Its link carries that many copies. In a chain it would carry one, but a host
that is lost keeps the files from all hosts after it."""
_READY = b"cpuft-relay-ready "
"""Beginning of the line with which a receiver tells its port. Earlier lines are of the host's shell."""
_READY_SECONDS = 60.0
"""How long hosts may take to start their receivers. Later ones get a copy of their own from the sender."""
_CONNECT_SECONDS = 15.0
"""How long a host waits for the hosts that it serves, and for the host that serves it."""
_HANDSHAKE_SECONDS = 5.0
"""How long one host may take to show its certificate, so that a stranger does not keep others from being served."""
_STALLED_SECONDS = 45
"""A host is lost if it has taken no data for so long, for example because its disk does not answer. Who sends to the
host that serves it waits longer (`transfer.STALLED_SECONDS`)."""
_BACKLOG = 64
"""Connections that wait to be accepted: more than a host serves, so that strangers do not keep others away."""
_DIRECT = 8
"""Most hosts that get a copy of their own from the sender at the same time, after the tree did not serve them."""
_FIRST_DAY, _LAST_DAY = datetime.datetime(2000, 1, 1), datetime.datetime(2999, 1, 1)
"""When a certificate is valid: its end is the end of the processes that have it, and clocks of hosts may be wrong."""


@dataclass(frozen=True)
class Receiver:
    """A host that is to get the files."""

    host: str
    address: str
    """Address in the cluster's network, on which the host may listen; empty if it has none."""
    command: tuple[str, ...]
    """argv with which the sender starts `python -m cpuft.launch.relay receive` on the host."""


@dataclass(frozen=True)
class RelayOrder:
    """What is sent to which hosts."""

    folder: str
    names: tuple[str, ...]
    """Files and folders in `folder`. Links are followed, and __pycache__ is left out."""
    place: tuple[str, ...]
    """On the hosts: this user's private folder, the folder below it that gets the files, and a bundle's checksum."""
    receivers: tuple[Receiver, ...]


@dataclass(frozen=True)
class ReceiverOrder:
    """First line of a receiver's standard input."""

    place: tuple[str, ...]
    address: str
    """Address on which the receiver listens; empty if it is the only one."""
    certificate: str
    """Private key and certificate of the transfer as PEM, which is a secret; empty if the receiver is the only one."""


@dataclass(frozen=True)
class RelayPlace:
    """Second line of a receiver's standard input: its place in the tree."""

    parent: str
    """Address of the host that sends to this one. If it is empty, the files follow on standard input."""
    port: int
    children: int


def send(order: RelayOrder) -> dict[str, tuple[int, str]]:
    """Send the files to all hosts; return by name (exit code, last errors) of each host that does not have them then. A
    host that the tree does not serve gets a copy of its own. Raises CpuftError: a file cannot be read here.
    """
    in_tree = [receiver for receiver in order.receivers if receiver.address]
    failed = _send_tree(order, in_tree) if len(in_tree) > 1 else {}
    served = {receiver.host for receiver in in_tree if len(in_tree) > 1} - failed.keys()
    left = [receiver for receiver in order.receivers if receiver.host not in served]
    with ThreadPoolExecutor(max_workers=_DIRECT) as pool:
        results = list(pool.map(lambda receiver: _send_tree(order, [receiver]), left))
    return {host: failure for result in results for host, failure in result.items()}


def count_children(index: int, hosts: int) -> int:
    """Return to how many hosts, 0 to 2, number `index` of a tree of `hosts` sends; i gets it from (i - 1) // 2, 0 is
    first.
    """
    return len(range(FAN_OUT * index + 1, min(FAN_OUT * (index + 1) + 1, hosts)))


def _send_tree(order: RelayOrder, receivers: Sequence[Receiver]) -> dict[str, tuple[int, str]]:
    """Send the files to hosts, of which each but the first gets them from another host. Returns as `send` does."""
    certificate = _make_certificate() if len(receivers) > 1 else ""
    end = time.monotonic() + _READY_SECONDS
    with ExitStack() as stack:
        links = [stack.enter_context(_Link(receiver)) for receiver in receivers]
        for link in links:
            link.tell(ReceiverOrder(order.place, link.receiver.address if certificate else "", certificate))
        # A host that did not start is no part of the tree, so that no other host has to wait for it.
        ready = [link for link in links if link.wait_until_ready(end)]
        for link in links:
            if link not in ready:
                link.give_up(end)
        for index, link in enumerate(ready):
            parent = ready[(index - 1) // FAN_OUT] if index else None
            address, port = (parent.receiver.address, parent.port) if parent else ("", 0)
            link.tell(RelayPlace(address, port, count_children(index, len(ready))))
        for link in links:
            if link not in ready[:1]:
                link.close_input()
        if ready:
            _feed(order, ready[0], not certificate)
        failures = {link.receiver.host: link.finish() for link in links}
        return {host: failure for host, failure in failures.items() if failure[0]}


class _Link:
    """A receiver's process, and what this process and the receiver tell each other."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.port = 0
        self._output = b""
        self._problem = ""

    def __enter__(self) -> _Link:
        self._process = execute.start_process(self.receiver.command, os.environ, execute.PIPE)
        return self

    def __exit__(self, *failure: object) -> None:
        with suppress(OSError), self._process:  # which closes its streams
            execute.stop_processes([self._process])

    def tell(self, message: ReceiverOrder | RelayPlace) -> None:
        """Write a line to the receiver, if it has not ended."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dataclasses.asdict(message)).encode() + b"\n")
            self._process.stdin.flush()

    def open_stream(self) -> transfer.Stream:
        assert self._process.stdin
        assert self._process.stdout
        return transfer.open_stream(self._process.stdout.fileno(), self._process.stdin.fileno())

    def close_input(self) -> None:
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdin = None

    def wait_until_ready(self, end: float) -> bool:
        """Wait until the receiver has told its port; return False if it has ended, or at `end` (time.monotonic)."""
        assert self._process.stdout
        output = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN | select.POLLHUP)
        while poll.poll(max(0.0, end - time.monotonic()) * 1000):
            data = os.read(output, 1 << 16)
            self._output += data
            for line in self._output.split(b"\n")[:-1]:
                if line.startswith(_READY):
                    self.port = int(line.removeprefix(_READY))
                    return True
            if not data:
                return False
        return False

    def give_up(self, end: float) -> None:
        """End the receiver, which has not told its port, if it has not ended by itself at `end` (time.monotonic)."""
        # One that fails closes its output a little before it ends, and its exit code says what failed.
        execute.wait_for_exit(self._process, max(0.0, end - time.monotonic()))
        if self._process.poll() is None:
            execute.stop_processes([self._process])
            self._problem = f"the host did not start to receive within {_READY_SECONDS:.0f} s"

    def finish(self) -> tuple[int, str]:
        """Wait for the receiver's end; return its exit code, 0 if it has stored the files, and its last errors."""
        self.close_input()
        if self._problem:
            return 1, self._problem
        _, errors = self._process.communicate()
        return execute.exit_code_of(self._process), join_last_lines(errors.decode(errors="replace"), most=3)


def _feed(order: RelayOrder, link: _Link, is_alone: bool) -> None:
    try:
        found = transfer.walk_names(order.folder, order.names)
        transfer.send(link.open_stream(), found, is_alone)
    except transfer.LostError:
        pass  # its command says why
    except (transfer.TransferError, OSError) as error:
        raise CpuftError(str(error)) from None
    finally:
        link.close_input()


def _make_certificate() -> str:
    """Return a new private key and a certificate that it has signed itself, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cpuft")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    made = builder.not_valid_before(_FIRST_DAY).not_valid_after(_LAST_DAY).sign(key, hashes.SHA256())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return (key.private_bytes(*form) + made.public_bytes(form[0])).decode()


def _make_context(protocol: int, certificate: str) -> ssl.SSLContext:
    """Return TLS settings that accept only who has the private key of this certificate, and show the same one."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the name in the certificate is that of no host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate[certificate.index("-----BEGIN CERTIFICATE") :])
    with execute.open_memory_file() as file:
        file.write(certificate.encode())
        file.flush()
        context.load_cert_chain(execute.path_of(file))
    return context


def receive(given: io.BufferedReader) -> None:
    """Receive files as a `ReceiverOrder` and a `RelayPlace` on standard input say, send them on, and store them. Prints
    its port first, 0 without one. Raises CpuftError: no `RelayPlace` came; else as `transfer.receive_folder`.
    """
    os.umask(0o077)
    told = load(ReceiverOrder, parse_json(given.readline().decode()))
    with ExitStack() as stack:
        port = 0
        if told.address:
            server = stack.enter_context(socket.create_server((told.address, 0), backlog=_BACKLOG))
            port = server.getsockname()[1]
        sys.stdout.buffer.write(b"%s%d\n" % (_READY, port))
        sys.stdout.buffer.flush()
        line = given.readline()
        if not line:
            raise CpuftError(
                "this host got no order in time, or the launcher has ended: read its messages, and launch again"
            )
        place = load(RelayPlace, parse_json(line.decode()))
        source = stack.enter_context(_connect(place, told.certificate)) if place.parent else given
        children = _accept(server, place.children, told.certificate) if place.children else []
        if told.address:
            server.close()
        for child in children:
            stack.enter_context(child)
        stream = transfer.open_stream(_PassedOn(source, children), sys.stdout.fileno())
        try:
            transfer.receive_folder(stream, told.place, is_answered=not told.address)
        except (OSError, transfer.RefusedError):
            stream.drain()  # if this disk is full, the other hosts still get the files
            raise


@contextmanager
def _connect(place: RelayPlace, certificate: str) -> Iterator[io.BufferedReader]:
    context = _make_context(ssl.PROTOCOL_TLS_CLIENT, certificate)
    plain = socket.create_connection((place.parent, place.port), timeout=_CONNECT_SECONDS)
    with context.wrap_socket(plain) as connection, connection.makefile("rb") as stream:
        connection.settimeout(None)
        detect_dead_peer(connection)
        yield stream


def _accept(server: socket.socket, count: int, certificate: str) -> list[ssl.SSLSocket]:
    """Wait for `count` hosts with the certificate, and return the connections of those that came in time."""
    context = _make_context(ssl.PROTOCOL_TLS_SERVER, certificate)
    end, children = time.monotonic() + _CONNECT_SECONDS, list[ssl.SSLSocket]()
    while len(children) < count and (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        # Whoever has no certificate is no reason to stop waiting for those who have one.
        with suppress(OSError):
            plain, _ = server.accept()
            plain.settimeout(min(left, _HANDSHAKE_SECONDS))
            child = context.wrap_socket(plain, server_side=True)
            child.settimeout(None)
            detect_dead_peer(child)
            child.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_SECONDS * 1000)
            children.append(child)
    return children


class _PassedOn(io.RawIOBase):
    """A stream that sends what is read from it to all children. A child whose connection was lost gets no more."""

    def __init__(self, source: io.BufferedReader, children: list[ssl.SSLSocket]) -> None:
        self._source, self._left = source, list(children)

    def readable(self) -> bool:
        return True

    def readinto(self, place: Any) -> int:
        with transfer.raise_lost():
            data = self._source.read1(len(place))
        for child in self._left[:]:
            try:
                child.sendall(data)
            except OSError:
                self._left.remove(child)
        place[: len(data)] = data
        return len(data)


def main() -> None:
    """Send what a `RelayOrder` on standard input says, as JSON, or with the argument `receive` receive. Exits with 1
    after a failure, with 255 if only ssh failed.
    """
    if sys.argv[1:] == ["receive"]:
        from cpuft.rank.process import end_with_parent  # which Windows cannot import

        end_with_parent(signal.SIGTERM)
        try:
            receive(cast(io.BufferedReader, sys.stdin.buffer))
        except (CpuftError, transfer.TransferError, transfer.RefusedError, OSError) as error:
            sys.exit(f"cpuft: error: {error}")
        return
    order = load(RelayOrder, parse_json(sys.stdin.read()))
    try:
        failures = send(order)
    except CpuftError as error:
        sys.exit(f"cpuft: error: {error}")
    for host, (_, reason) in failures.items():
        print(f"{host}: {reason}", file=sys.stderr)
    only_ssh = {code for code, _ in failures.values()} == {execute.SSH_FAILED}
    sys.exit(execute.SSH_FAILED if only_ssh else bool(failures))


if __name__ == "__main__":
    main()
