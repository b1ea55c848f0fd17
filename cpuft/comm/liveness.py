"""Detection of lost ranks: every rank keeps a connection to one hub, which the kernel closes when a process ends.

A store or periodic heartbeats would have to guess from silence, and a rank that computes while it holds the GIL is
silent too. The hub only relays messages and reports closed connections, so nothing is sent while all is well. Until all
ranks are connected, its port accepts anybody, and closes connections that do not soon prove to know the run's key.
"""

from __future__ import annotations

import asyncio
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

from cpuft.errors import CpuftError
from cpuft.rank.process import FOREIGN_STORE_ENTRY
from cpuft.terminal import detect_dead_peer

KEY_VARIABLE = "CPUFT_RUN_KEY"
"""Environment variable with the key of all ranks; if it is not set, the first rank shares one through the store."""
MAX_UNVERIFIED = 256
"""Most connections without a hello. One more closes the oldest of them."""
WELCOME = b"welcome\n"

Message = dict[str, Any]

_HELLO_SECONDS = 5.0
_HELLO_BYTES = 256
_START_SECONDS = 30.0
_LINE_BYTES = 1 << 17
_MAX_REPORTS = 5
_JOIN_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_FOREIGN_SECONDS = 10.0
"""How long a rank waits while the store holds an entry about the hub that the first rank did not write."""


class StartupDisturbedError(CpuftError):
    """Ranks did not find each other, perhaps because another host wrote to torch's store, which has no password."""

    exit_code = 1  # not that of a refused option: another start of the run may succeed


class Hub:
    """A relay on the first rank: what one rank sends, all ranks receive. A closed connection becomes {"gone": rank}.

    Making one opens a free port of the address `host` only, and starts its thread. The port is closed when all ranks
    are connected, each once; the thread ends when all have left, and calls `report` for the first 5 refusals.
    """

    def __init__(self, key: bytes, host: str, ranks: Sequence[int], report: Callable[[str], object]) -> None:
        self._key, self._missing, self._report = key, {str(rank).encode() for rank in ranks}, report
        listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._ranks: dict[asyncio.StreamWriter, int] = {}
        self._unverified: list[asyncio.Task[str]] = []
        self._refused = 0
        self.is_full = threading.Event()
        started = threading.Event()
        run = self._run(listener, started)
        threading.Thread(target=asyncio.run, args=(run,), name="cpuft-comm-hub", daemon=True).start()
        # Wait until the event loop has its file descriptors, so that later ones of this process cannot exhaust them.
        started.wait(_START_SECONDS)

    async def _run(self, listener: socket.socket, started: threading.Event) -> None:
        self._over = asyncio.Event()
        # If no file descriptor is left for accept, asyncio calls this handler and tries again after a second.
        asyncio.get_running_loop().set_exception_handler(lambda _, found: self._report_refusal(found["message"]))
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=_LINE_BYTES, start_serving=False)
        await self._server.start_serving()
        started.set()
        await self._over.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, *_ = writer.get_extra_info("peername") or ("nowhere",)
        detect_dead_peer(writer.get_extra_info("socket"))
        hello = asyncio.create_task(self._verify(reader, writer))
        self._unverified.append(hello)
        if len(self._unverified) > MAX_UNVERIFIED:
            self._unverified[0].cancel()
        done, _ = await asyncio.wait([hello], timeout=_HELLO_SECONDS)
        self._unverified.remove(hello)
        reason = (
            "came after all ranks" if self.is_full.is_set() else f"was the oldest of {MAX_UNVERIFIED} without hello"
        )
        if not done:
            hello.cancel()
            reason = f"sent no hello in {_HELLO_SECONDS:g} s"
        elif not hello.cancelled():
            reason = hello.result()
        if reason:
            self._report_refusal(f"closed a connection from {address}, which {reason}")
        else:
            await self._relay_messages(reader, writer)
        writer.transport.abort()

    async def _verify(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Accept a rank that sends "RANK PROOF", each rank once; return "" or why it was refused."""
        nonce = secrets.token_hex(16).encode()
        writer.write(nonce + b"\n")
        try:
            hello = await reader.readuntil()
        except asyncio.LimitOverrunError:
            return "sent too long a line"
        except (OSError, EOFError):
            return "closed it without a hello"
        rank, _, proof = hello[:-1].partition(b" ")  # nothing else is parsed before the proof is verified
        if not hmac.compare_digest(proof, make_proof(self._key, nonce, rank)):
            return "does not know the run's key"
        if rank not in self._missing:
            return f"claims to be rank {rank.decode(errors='replace')}, which is connected already or not of this run"
        self._missing.remove(rank)
        self._ranks[writer] = int(rank)
        writer.write(WELCOME)
        if not self._missing:
            self._stop_accepting()
        return ""

    def _stop_accepting(self) -> None:
        self._server.close()
        self.is_full.set()
        for hello in self._unverified:
            if hello is not asyncio.current_task():
                hello.cancel()

    async def _relay_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            while True:
                self._send_to_all(await reader.readuntil())
        self._send_to_all(json.dumps({"gone": self._ranks.pop(writer)}).encode() + b"\n")
        if not self._missing and not self._ranks:
            self._over.set()

    def _send_to_all(self, line: bytes) -> None:
        for writer in self._ranks:
            # A stopped rank reads nothing: its buffer must not grow without limit.
            if writer.transport.get_write_buffer_size() < _LINE_BYTES:
                writer.write(line)

    def _report_refusal(self, text: str) -> None:
        self._refused += 1
        more = "; further ones are not reported" if self._refused == _MAX_REPORTS else ""
        if self._refused <= _MAX_REPORTS:
            self._report(f"cpuft comm: the liveness hub {text}{more}")


def make_proof(key: bytes, *fields: bytes) -> bytes:
    """Return the HMAC-SHA256 of `fields`, joined by spaces, as 64 hexadecimal digits in ASCII."""
    return hmac.new(key, b" ".join(fields), "sha256").hexdigest().encode()


class LivenessConnection:
    """A rank's connection to the hub. Making one blocks until the hub accepts the rank, at most 60 s.

    `is_first` is true on the one rank that opens the hub. `on_message` is called on a thread with what ranks send, with
    {"gone": rank} when a rank's connection is closed, and with {"hub": "gone"} at the end.

    Raises StartupDisturbedError if the hub does not accept this rank in time, or the store's entry is not this run's
    own; RuntimeError if there is no entry within 60 s; OSError if the first rank cannot listen on its own address.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], is_first: bool, on_message: Callable[[Message], None]
    ) -> None:
        self._hub = _open_hub(store, ranks) if is_first else None
        address, key = _find_hub(store, rank)
        self._on_message = on_message
        self._socket, self._lines = _join(address, key, rank)
        threading.Thread(target=self._run, name="cpuft-comm-liveness", daemon=True).start()

    def wait_for_all(self) -> None:
        """On the first rank, wait up to 60 s until all ranks are connected, without an error; elsewhere do nothing."""
        if self._hub:
            self._hub.is_full.wait(_JOIN_SECONDS)

    def send(self, message: Message) -> None:
        """Send a message to all ranks, also to this one. Does nothing if the hub is lost.

        The hub closes the connection of a rank whose message has more than 128 KiB as JSON.
        """
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the connection: the other ranks receive {"gone": rank}."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._lines:
            for line in self._lines:
                self._on_message(json.loads(line))
        self._on_message({"hub": "gone"})


def _seal_address(key: bytes, host: str, port: int) -> str:
    return make_proof(key, host.encode(), str(port).encode()).decode()


def _open_hub(store: Store, ranks: Sequence[int]) -> Hub:
    shared_key, host = os.environ.get(KEY_VARIABLE, ""), _own_address()
    key = shared_key or secrets.token_hex(32)
    hub = Hub(key.encode(), host, ranks, lambda text: os.write(2, text.encode() + b"\n"))
    place = {"host": host, "port": hub.port, "seal": _seal_address(key.encode(), host, hub.port)}
    entry = json.dumps(place if shared_key else place | {"key": key})
    store.set("liveness", entry)
    if shared_key:
        threading.Thread(target=_announce, args=(store, entry, hub), name="cpuft-comm-announce", daemon=True).start()
    return hub


def _announce(store: Store, entry: str, hub: Hub) -> None:
    """Write the hub's address repeatedly until all ranks are connected: anybody may overwrite or delete it."""
    end = time.monotonic() + _JOIN_SECONDS
    with contextlib.suppress(RuntimeError):  # the store is gone
        while not hub.is_full.wait(_RETRY_SECONDS) and time.monotonic() < end:
            store.set("liveness", entry)


def _find_hub(store: Store, rank: int) -> tuple[tuple[str, int], bytes]:
    """Return the hub's (host, port), which only a rank of this run can have written, and the run's key."""
    # Ranks may start far apart, so this wait has a limit of its own and not that of collectives, which the store has.
    store.wait(["liveness"], timedelta(seconds=_JOIN_SECONDS))
    end = time.monotonic() + _FOREIGN_SECONDS
    while not (found := _read_entry(store.get("liveness"))):
        if time.monotonic() > end:
            raise StartupDisturbedError(
                f"{FOREIGN_STORE_ENTRY}: the first rank's address was not written with rank {rank}'s {KEY_VARIABLE}. "
                "Start all ranks with one cpuft launch, and keep other hosts away from the ports of ranks"
            )
        time.sleep(_RETRY_SECONDS)
        store.wait(["liveness"], timedelta(seconds=_FOREIGN_SECONDS))
    return found


def _read_entry(text: bytes) -> tuple[tuple[str, int], bytes] | None:
    try:
        place = json.loads(text)
        key = (os.environ.get(KEY_VARIABLE, "") or str(place.get("key", ""))).encode()
        address = str(place["host"]), int(place["port"])
        is_own = hmac.compare_digest(str(place["seal"]).encode(), _seal_address(key, *address).encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnicodeError):
        return None
    return (address, key) if is_own else None


def _join(address: tuple[str, int], key: bytes, rank: int) -> tuple[socket.socket, BinaryIO]:
    """Connect to the hub and say hello, repeatedly if unverified connections crowd this one out."""
    end = time.monotonic() + _JOIN_SECONDS
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=left)
            lines = connection.makefile("rb")
            nonce, name = lines.readline(_HELLO_BYTES).strip(), str(rank).encode()
            connection.sendall(name + b" " + make_proof(key, nonce, name) + b"\n")
            if lines.readline(_HELLO_BYTES) == WELCOME:
                connection.settimeout(None)
                detect_dead_peer(connection)
                return connection, lines
            connection.close()
        time.sleep(_RETRY_SECONDS)
    raise StartupDisturbedError(
        f"rank {rank} could not join the first rank at {address[0]} port {address[1]} within {_JOIN_SECONDS:.0f} s: "
        f"check whether this rank runs twice, and whether a firewall separates the two hosts"
    )


def _own_address() -> str:
    """Return where other ranks reach this one: MASTER_ADDR if it is an address of this host, else the host's name."""
    with contextlib.suppress(OSError, KeyError), socket.socket() as probe:
        probe.bind((os.environ["MASTER_ADDR"], 0))
        return os.environ["MASTER_ADDR"] or socket.gethostname()
    return socket.gethostname()
