"""Who is alive: every rank keeps a connection to one hub, which the kernel closes when a process ends.

A store or a heartbeat would have to guess from silence, and a rank that computes with the GIL held is silent too. The
hub only relays lines and tells of closed connections, so nothing is sent while all is well.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, BinaryIO

from torch._C._distributed_c10d import Store

from cpuft.comm.watch.hub import WELCOME, Hub, prove
from cpuft.errors import CpuftError
from cpuft.rank.process import FOREIGN
from cpuft.terminal import notice_silence

KEY_VARIABLE = "CPUFT_RUN_KEY"
"""The run's key, the same for all its ranks. Where no launch has made one, the first rank's goes through the store."""

Message = dict[str, Any]
_HELLO_BYTES = 256
_JOIN_SECONDS = 60.0
_AGAIN_SECONDS = 0.2
_FOREIGN_SECONDS = 10.0
"""How long a rank waits for the first rank's own entry in the store while it finds one of somebody else's."""


class Disturbed(CpuftError):
    """Ranks did not find each other, perhaps because another host wrote to torch's store, which asks for no password.

    Its exit code is no refusal's: another start of the run may succeed, so a disturbance must not prevent it.
    """

    exit_code = 1


class Line:
    """A rank's connection to the hub. `heard` is called with each message, on a thread of its own.

    Parameters
    ----------
    first: true on exactly one rank, which opens the hub for `ranks`.

    Raises Disturbed: the hub does not let this rank in, or what the store says of it is not the run's own.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        first: bool,
        heard: Callable[[Message], None],
        join_seconds: float = _JOIN_SECONDS,
    ) -> None:
        self._hub = _open_hub(store, ranks) if first else None
        address, key = _find_hub(store, rank)
        self._heard = heard
        self._socket, self._lines = _join(address, key, rank, join_seconds)
        threading.Thread(target=self._run, name="cpuft-comm-line", daemon=True).start()

    def wait_for_all(self, seconds: float = _JOIN_SECONDS) -> None:
        """On the first rank: until all are in, or not within `seconds`."""
        if self._hub:
            self._hub.full.wait(seconds)

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
        with contextlib.suppress(OSError, ValueError), self._lines:
            for line in self._lines:
                self._heard(json.loads(line))
        self._heard({"hub": "gone"})


def _seal(key: bytes, host: str, port: int) -> str:
    return prove(key, host.encode(), str(port).encode()).decode()


def _open_hub(store: Store, ranks: Sequence[int]) -> Hub:
    own, host = os.environ.get(KEY_VARIABLE, ""), _address()
    key = own or secrets.token_hex(32)
    hub = Hub(key.encode(), host, ranks, lambda text: os.write(2, text.encode() + b"\n"))
    place = {"host": host, "port": hub.port, "seal": _seal(key.encode(), host, hub.port)}
    entry = json.dumps(place if own else place | {"key": key})
    store.set("liveness", entry)
    if own:
        threading.Thread(target=_announce, args=(store, entry, hub), name="cpuft-comm-announce", daemon=True).start()
    return hub


def _announce(store: Store, entry: str, hub: Hub) -> None:
    """Write the hub's address again until all ranks are in: anybody may have overwritten or deleted it."""
    end = time.monotonic() + _JOIN_SECONDS
    with contextlib.suppress(RuntimeError):  # the store is gone
        while not hub.full.wait(_AGAIN_SECONDS) and time.monotonic() < end:
            store.set("liveness", entry)


def _find_hub(store: Store, rank: int) -> tuple[tuple[str, int], bytes]:
    """The hub's address, which only a rank of this run can have written, and the run's key."""
    # Starting takes what starting takes, however short a collective's own limit, which is the store's too.
    store.wait(["liveness"], timedelta(seconds=_JOIN_SECONDS))
    end = time.monotonic() + _FOREIGN_SECONDS
    while not (found := _read_entry(store.get("liveness"))):
        if time.monotonic() > end:
            raise Disturbed(
                f"{FOREIGN}: what the store says of the first rank was not written with rank {rank}'s {KEY_VARIABLE}. "
                "Start all ranks by one cpuft launch, and keep other hosts away from the ports of ranks"
            )
        time.sleep(_AGAIN_SECONDS)
        store.wait(["liveness"], timedelta(seconds=_FOREIGN_SECONDS))
    return found


def _read_entry(text: bytes) -> tuple[tuple[str, int], bytes] | None:
    """The hub's address and the run's key; None for what nobody wrote who has the key."""
    try:
        place = json.loads(text)
        key = (os.environ.get(KEY_VARIABLE, "") or str(place.get("key", ""))).encode()
        address = str(place["host"]), int(place["port"])
        own = hmac.compare_digest(str(place["seal"]).encode(), _seal(key, *address).encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnicodeError):
        return None
    return (address, key) if own else None


def _join(address: tuple[str, int], key: bytes, rank: int, seconds: float) -> tuple[socket.socket, BinaryIO]:
    """Say hello; again where a crowd of strangers was in the way."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=left)
            lines = connection.makefile("rb")
            nonce, own = lines.readline(_HELLO_BYTES).strip(), str(rank).encode()
            connection.sendall(own + b" " + prove(key, nonce, own) + b"\n")
            if lines.readline(_HELLO_BYTES) == WELCOME:
                connection.settimeout(None)
                notice_silence(connection)
                return connection, lines
            connection.close()
        time.sleep(_AGAIN_SECONDS)
    raise Disturbed(
        f"rank {rank} was not let in by the first rank at {address[0]} port {address[1]} in {seconds:.0f} s: "
        f"look whether this rank runs twice, and whether a firewall is between the two hosts"
    )


def _address() -> str:
    """Where the others reach this rank: the master's address if it is this host's, else the host's name."""
    with contextlib.suppress(OSError, KeyError), socket.socket() as probe:
        probe.bind((os.environ["MASTER_ADDR"], 0))
        return os.environ["MASTER_ADDR"] or socket.gethostname()
    return socket.gethostname()
