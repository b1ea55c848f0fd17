"""Who is alive: every rank keeps a connection to one hub, which the kernel closes when a process ends.

A store or a heartbeat would have to guess from silence, and a rank that computes with the GIL held is silent too. The
hub only relays lines and tells of closed connections, so nothing is sent while all is well.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

Message = dict[str, Any]
_SEND_SECONDS = 1.0
_JOIN_SECONDS = 60.0


class Hub:
    """A relay: what one rank writes, all ranks read; a rank whose connection closes is told as {"gone": rank}."""

    def __init__(self, token: str, host: str) -> None:
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ranks: dict[socket.socket, int] = {}
        self._partial: dict[socket.socket, bytes] = {}
        threading.Thread(target=self._run, name="cpuft-comm-hub", daemon=True).start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                else:
                    self._read(connection)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_SECONDS)
        self._partial[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        *lines, self._partial[connection] = (self._partial[connection] + data).split(b"\n")
        for line in lines:
            if connection in self._ranks:
                self._relay(line)
            elif not self._admit(connection, line):
                return

    def _admit(self, connection: socket.socket, line: bytes) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            hello = json.loads(line)
            if secrets.compare_digest(str(hello["token"]), self._token):
                self._ranks[connection] = int(hello["rank"])
                return True
        self._drop(connection)
        return False

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._partial.pop(connection)
        rank = self._ranks.pop(connection, None)
        connection.close()
        if rank is not None:
            self._relay(json.dumps({"gone": rank}).encode())

    def _relay(self, line: bytes) -> None:
        for connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.sendall(line + b"\n")


class Line:
    """A rank's connection to the hub. `heard` is called with each message, on a thread of its own."""

    def __init__(self, store: Store, rank: int, first: bool, heard: Callable[[Message], None]) -> None:
        if first:
            token = secrets.token_hex(16)
            host = _address()
            self._hub = Hub(token, host)
            store.set("liveness", json.dumps({"host": host, "port": self._hub.port, "token": token}))
        place = json.loads(store.get("liveness"))
        self._heard = heard
        self._socket = socket.create_connection((place["host"], place["port"]), timeout=_JOIN_SECONDS)
        self._socket.settimeout(None)
        self.say({"rank": rank, "token": place["token"]})
        threading.Thread(target=self._run, name="cpuft-comm-line", daemon=True).start()

    def say(self, message: Message) -> None:
        """Tell all ranks, this one too. Nothing happens when the hub is gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._heard(json.loads(line))
        self._heard({"hub": "gone"})


def _address() -> str:
    """Where the others reach this rank: the master's address if it is this host's, else the host's name."""
    master = os.environ.get("MASTER_ADDR", "")
    if not master:
        return socket.gethostname()
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((master, 0))
        return master
    return socket.gethostname()
