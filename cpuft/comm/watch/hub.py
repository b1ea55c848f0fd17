"""The hub of who is alive: a relay between ranks, on one port of the first one.

Until all ranks are there its port is open to anybody: who does not prove in time, in few bytes, that they know the
run's key is dropped. After that it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HELLO_BYTES = 256
STRANGERS = 256
"""Connections that have not said hello yet; one more costs the oldest its place."""
WELCOME = b"welcome\n"

_HELLO_SECONDS = 5.0
_LINE_BYTES = 1 << 20
_SEND_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_TOLD = 5


@dataclass
class _Peer:
    """The other end of a connection."""

    address: str
    rank: int = -1
    """-1 for a stranger."""
    partial: bytes = b""
    nonce: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())
    since: float = field(default_factory=time.monotonic)


class Hub:
    """A relay: what one rank writes, all ranks read; a rank whose connection closes is told as {"gone": rank}.

    Parameters
    ----------
    host: the only address that it listens on.
    ranks: who may join, each once.
    say: told of the first refused connections, each with its reason.
    hello_seconds: how long a stranger may take to say hello.
    """

    def __init__(
        self,
        key: bytes,
        host: str,
        ranks: Sequence[int],
        say: Callable[[str], object],
        hello_seconds: float = _HELLO_SECONDS,
    ) -> None:
        self._key, self._missing, self._say = key, {str(rank).encode() for rank in ranks}, say
        self._hello_seconds = hello_seconds
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ranks: dict[socket.socket, _Peer] = {}
        self._strangers: dict[socket.socket, _Peer] = {}
        self._refused = 0
        self.full = threading.Event()
        """Set when all ranks are in."""
        threading.Thread(target=self._run, name="cpuft-comm-hub", daemon=True).start()

    def _run(self) -> None:
        while self._missing or self._ranks:
            for key, _ in self._selector.select(self._hello_seconds / 5 if self._strangers else None):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif connection in self._ranks or connection in self._strangers:
                    self._read(connection)
            late = time.monotonic() - self._hello_seconds
            for connection in [one for one, peer in self._strangers.items() if peer.since < late]:
                self._refuse(connection, f"said no hello in {self._hello_seconds:g} s")

    def _accept(self) -> None:
        if len(self._strangers) >= STRANGERS:
            self._refuse(next(iter(self._strangers)), f"was the oldest of {STRANGERS} without a hello")
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                for oldest in list(self._strangers)[:1]:
                    self._refuse(oldest, "had the last file descriptor")
                time.sleep(_PAUSE_SECONDS)  # the one who waits keeps the listener ready
            return
        connection.settimeout(_SEND_SECONDS)
        notice_silence(connection)
        peer = self._strangers[connection] = _Peer(str(address[0]))
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            connection.sendall(peer.nonce + b"\n")

    def _read(self, connection: socket.socket) -> None:
        peer = self._ranks.get(connection) or self._strangers[connection]
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._refuse(connection, "hung up")
            return
        *lines, peer.partial = (peer.partial + data).split(b"\n")
        for line in lines:
            if peer.rank >= 0:
                self._relay(line)
            elif not self._admit(connection, peer, line):
                return
        if len(peer.partial) > (_LINE_BYTES if peer.rank >= 0 else HELLO_BYTES):
            self._refuse(connection, "sent too long a line")

    def _admit(self, connection: socket.socket, peer: _Peer, line: bytes) -> bool:
        """Let a rank in: "RANK PROOF", at most once each. Nothing is parsed before the proof has been checked."""
        rank, _, proof = line[:HELLO_BYTES].partition(b" ")
        if not hmac.compare_digest(proof, prove(self._key, peer.nonce, rank)):
            self._refuse(connection, "does not know the run's key")
        elif rank not in self._missing:
            self._refuse(
                connection, f"says it is rank {rank.decode(errors='replace')}, which is in already or not of this run"
            )
        else:
            self._missing.remove(rank)
            peer.rank = int(rank)
            self._ranks[connection] = self._strangers.pop(connection)
            with contextlib.suppress(OSError):
                connection.sendall(WELCOME)
            if not self._missing:
                self._close_door()
        return peer.rank >= 0

    def _close_door(self) -> None:
        """All ranks are in: nobody else has any business here."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection in list(self._strangers):
            self._refuse(connection, "came after all ranks")
        self.full.set()

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        """Hang up on anybody. A rank's leaving is told to the others; a stranger's to `say`, a few times."""
        if stranger := self._strangers.pop(connection, None):
            self._refused += 1
            more = "; no more of these are told" if self._refused == _TOLD else ""
            if self._refused <= _TOLD:
                self._say(f"cpuft comm: the hub dropped a connection from {stranger.address}: it {reason}{more}")
        self._selector.unregister(connection)
        connection.close()
        if peer := self._ranks.pop(connection, None):
            self._relay(json.dumps({"gone": peer.rank}).encode())

    def _relay(self, line: bytes) -> None:
        for connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.sendall(line + b"\n")


def notice_silence(connection: socket.socket) -> None:
    """Have the kernel end it 7 s after the other host was cut off; the last option is for data on its way (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 7000)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prove(key: bytes, *words: bytes) -> bytes:
    """What only a holder of the run's key can say about `words`: 64 hexadecimal digits."""
    return hmac.new(key, b" ".join(words), "sha256").hexdigest().encode()
