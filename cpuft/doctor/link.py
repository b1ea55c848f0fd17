"""Measures this host's links to others over one TCP connection each; sent as it is to the Python of each host.

Only the standard library, and nothing of ours. All hosts run it at once, each with its own list of peers in an order
in which no host is ever busy with two of them.
"""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

_BLOCK = 1 << 20
_PINGS = 200
_PATIENCE_SECONDS = 8.0


def measure(order: dict[str, Any]) -> list[dict[str, Any]]:
    """For each peer what was measured, or why it was not.

    `order` holds: port (agreed, free on all), peers ([address, whether this host calls it], in turn), seconds (of
    sending each way). Each answer has `peer` and either `error`, or `bits_per_second` as received here and, where this
    host called, `latency_us`: half a round trip of one byte, the median of 200.
    """
    answers: list[dict[str, Any]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", order["port"]))
        server.listen(64)
        waiting: dict[str, socket.socket] = {}
        for peer, calls in order["peers"]:
            try:
                end = time.monotonic() + _PATIENCE_SECONDS
                line = _call(peer, order["port"], end) if calls else _await(server, peer, waiting, end)
                with line:
                    line.settimeout(_PATIENCE_SECONDS)
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    answers.append({"peer": peer} | (_ask(line, order) if calls else _serve(line, order)))
            except OSError as error:
                answers.append({"peer": peer, "error": str(error) or type(error).__name__})
        for line in waiting.values():
            line.close()
    return answers


def _call(peer: str, port: int, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((peer, port), timeout=1.0)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _await(server: socket.socket, peer: str, waiting: dict[str, socket.socket], end: float) -> socket.socket:
    """The connection that `peer` makes; others, whose turn comes later, are kept waiting."""
    while peer not in waiting:
        server.settimeout(max(0.01, end - time.monotonic()))
        line, (address, _) = server.accept()
        waiting[address] = line
    return waiting.pop(peer)


def _ask(line: socket.socket, order: dict[str, Any]) -> dict[str, Any]:
    trips = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        line.sendall(b"p")
        if not line.recv(1):
            raise OSError("the peer hung up")
        trips.append(time.perf_counter() - start)
    _send(line, order["seconds"])
    return {"latency_us": statistics.median(trips) / 2 * 1e6, "bits_per_second": _receive(line)}


def _serve(line: socket.socket, order: dict[str, Any]) -> dict[str, Any]:
    for _ in range(_PINGS):
        line.sendall(line.recv(1))
    rate = _receive(line)
    _send(line, order["seconds"])
    return {"bits_per_second": rate}


def _send(line: socket.socket, seconds: float) -> None:
    block = bytes(_BLOCK)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        line.sendall(block)
    line.shutdown(socket.SHUT_WR)


def _receive(line: socket.socket) -> float:
    """Bits a second, from the first byte that comes to the last."""
    total, start, buffer = 0, 0.0, bytearray(_BLOCK)
    while count := line.recv_into(buffer):
        start = start or time.perf_counter()
        total += count
    return total * 8 / max(1e-9, time.perf_counter() - start) if total else 0.0
