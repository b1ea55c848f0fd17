"""The hub of who is alive: a relay between ranks, on one port of the first one.

Until all ranks are there its port is open to anybody: who does not prove in time, in few bytes, that they know the
run's key is dropped. After that it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from cpuft.terminal import notice_silence

STRANGERS = 256
"""Connections that have not said hello yet; one more costs the oldest its place."""
WELCOME = b"welcome\n"

_HELLO_SECONDS = 5.0
_BEGIN_SECONDS = 30.0
_LINE_BYTES = 1 << 17
_TOLD = 5


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
        listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._ranks: dict[asyncio.StreamWriter, int] = {}
        self._strangers: list[asyncio.Task[str]] = []
        self._refused = 0
        self.full = threading.Event()
        """Set when all ranks are in."""
        begun = threading.Event()
        run = self._run(listener, begun)
        threading.Thread(target=asyncio.run, args=(run,), name="cpuft-comm-hub", daemon=True).start()
        # The loop has the descriptors that it needs by then: what the process opens next cannot take them.
        begun.wait(_BEGIN_SECONDS)

    async def _run(self, listener: socket.socket, begun: threading.Event) -> None:
        self._over = asyncio.Event()
        # Where no file descriptor is left to accept with, asyncio says so here, and tries again in a second.
        asyncio.get_running_loop().set_exception_handler(lambda _, found: self._tell(found["message"]))
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=_LINE_BYTES, start_serving=False)
        await self._server.start_serving()
        begun.set()
        await self._over.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, from its hello to its end."""
        address, *_ = writer.get_extra_info("peername") or ("nowhere",)
        notice_silence(writer.get_extra_info("socket"))
        hello = asyncio.create_task(self._greet(reader, writer))
        self._strangers.append(hello)
        if len(self._strangers) > STRANGERS:
            self._strangers[0].cancel()
        done, _ = await asyncio.wait([hello], timeout=self._hello_seconds)
        self._strangers.remove(hello)
        reason = "came after all ranks" if self.full.is_set() else f"was the oldest of {STRANGERS} without a hello"
        if not done:
            hello.cancel()
            reason = f"said no hello in {self._hello_seconds:g} s"
        elif not hello.cancelled():
            reason = hello.result()
        if reason:
            self._tell(f"dropped a connection from {address}: it {reason}")
        else:
            await self._hear(reader, writer)
        writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Let a rank in, which says "RANK PROOF", each once; else why not. Before the proof nothing is parsed."""
        nonce = secrets.token_hex(16).encode()
        writer.write(nonce + b"\n")
        try:
            hello = await reader.readuntil()
        except asyncio.LimitOverrunError:
            return "sent too long a line"
        except (OSError, EOFError):
            return "hung up"
        rank, _, proof = hello[:-1].partition(b" ")
        if not hmac.compare_digest(proof, prove(self._key, nonce, rank)):
            return "does not know the run's key"
        if rank not in self._missing:
            return f"says it is rank {rank.decode(errors='replace')}, which is in already or not of this run"
        self._missing.remove(rank)
        self._ranks[writer] = int(rank)
        writer.write(WELCOME)
        if not self._missing:
            self._close_door()
        return ""

    def _close_door(self) -> None:
        """All ranks are in: nobody else has any business here."""
        self._server.close()
        self.full.set()
        for hello in self._strangers:
            if hello is not asyncio.current_task():
                hello.cancel()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            while True:
                self._relay(await reader.readuntil())
        self._relay(json.dumps({"gone": self._ranks.pop(writer)}).encode() + b"\n")
        if not self._missing and not self._ranks:
            self._over.set()

    def _relay(self, line: bytes) -> None:
        for writer in self._ranks:
            # A rank that is stopped reads nothing.
            if writer.transport.get_write_buffer_size() < _LINE_BYTES:
                writer.write(line)

    def _tell(self, text: str) -> None:
        self._refused += 1
        more = "; no more of these are told" if self._refused == _TOLD else ""
        if self._refused <= _TOLD:
            self._say(f"cpuft comm: the hub {text}{more}")


def prove(key: bytes, *words: bytes) -> bytes:
    """What only a holder of the run's key can say about `words`: 64 hexadecimal digits."""
    return hmac.new(key, b" ".join(words), "sha256").hexdigest().encode()
