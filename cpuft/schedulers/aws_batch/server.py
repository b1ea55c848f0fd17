"""An ssh server in a thread (paramiko): one command a channel, for holders of one key, on one address."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

import paramiko
from paramiko import common

from cpuft import execute
from cpuft.schedulers.aws_batch.variables import Keys
from cpuft.terminal import notice_silence

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
_POLL_SECONDS = 0.02
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
                time.sleep(_POLL_SECONDS)
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
                notice_silence(connection)
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
            transport.join(_POLL_SECONDS)


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
        process = execute.start(("sh", "-c", line), environ, execute.PIPE)
        pairs = ((process.stdout, channel.sendall), (process.stderr, channel.sendall_stderr))
        copies = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs]
        for thread in (threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True), *copies):
            thread.start()
        while not channel.closed and (process.poll() is None or any(copy.is_alive() for copy in copies)):
            time.sleep(_POLL_SECONDS)
        if process.poll() is None:
            execute.end([process])
        channel.send_exit_status(execute.exit_code(process))


def _copy(file: Any, send: Callable[[bytes], object]) -> None:
    with suppress(OSError), file:
        while data := os.read(file.fileno(), _BLOCK):
            send(data)


def _feed(channel: paramiko.Channel, file: Any) -> None:
    with suppress(OSError), file:
        for data in iter(partial(channel.recv, _BLOCK), b""):
            file.write(data)
            file.flush()
