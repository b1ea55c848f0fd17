"""Who is served, and who is not: real sessions, on this machine's own address."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import paramiko
import pytest

from cpuft.schedulers.aws_batch_node import Keys, Server, run_command
from tests.schedulers.test_aws_batch_node import NODE

KEYS = Keys(NODE)
OTHERS = {"job": Keys(replace(NODE, job="8")), "secret": Keys(replace(NODE, token="b" * 32))}
ENVIRON = {"PATH": "/usr/bin:/bin"}
BANNER = b"SSH-2.0-x\r\n"


class Site:
    """A server, and what it has told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.heard = threading.Event()
        self.lines: list[str] = []
        self.server = Server(("127.0.0.1", 0), KEYS, self._answer, self._say, seconds=3.0)
        self.place = ("127.0.0.1", self.server.port)

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.heard.set()

    def _answer(self, channel: paramiko.Channel, line: str) -> None:
        self.lines.append(line)
        run_command(ENVIRON, channel, line)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.end()


@contextmanager
def session(connection: Any, keys: Keys = KEYS) -> Iterator[paramiko.Transport]:
    with paramiko.Transport(connection) as transport:
        transport.start_client(timeout=10)
        transport.auth_publickey("anyone", keys.client)
        yield transport


def ask(transport: paramiko.Transport, line: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    channel = transport.open_session(timeout=10)
    channel.settimeout(20)
    channel.exec_command(line)
    channel.sendall(stdin)
    channel.shutdown_write()
    output, errors = channel.makefile("rb").read(), channel.makefile_stderr("rb").read()
    return channel.recv_exit_status(), output, errors


def test_a_command_has_its_streams_and_its_exit_code(site: Site) -> None:
    with session(socket.create_connection(site.place)) as transport:
        assert transport.get_remote_server_key() == KEYS.server
        data = b"x" * 3_000_000
        assert ask(transport, "cat; echo no >&2; exit 7", data) == (7, data, b"no\n")
        assert ask(transport, "kill -9 $$")[0] == 137
    assert site.said == []


def test_a_command_ends_with_its_session(site: Site) -> None:
    with session(socket.create_connection(site.place)) as transport:
        channel = transport.open_session(timeout=10)
        channel.exec_command("(trap 'echo ended >&2; exit' TERM; echo begun; while :; do sleep 0.1; done)")
        assert channel.recv(6) == b"begun\n"
    waiting = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for thread in waiting:
        thread.join(20)
    assert not any(thread.is_alive() for thread in waiting)


@pytest.mark.parametrize("other", OTHERS)
def test_who_has_another_key_is_refused(other: str, site: Site) -> None:
    with pytest.raises(paramiko.AuthenticationException), session(socket.create_connection(site.place), OTHERS[other]):
        pass
    assert site.heard.wait(10)
    assert site.said == ["cpuft: dropped a connection from 127.0.0.1: it did not prove to know the job's secret"]


@pytest.mark.parametrize("kind", ["shell", "pty", "forwarding"])
def test_there_is_nothing_but_commands(kind: str, site: Site) -> None:
    ways = {
        "shell": lambda transport: transport.open_session(timeout=10).invoke_shell(),
        "pty": lambda transport: transport.open_session(timeout=10).get_pty(),
        "forwarding": lambda transport: transport.open_channel("direct-tcpip", site.place, site.place, timeout=10),
    }
    with session(socket.create_connection(site.place)) as transport, pytest.raises(paramiko.SSHException):
        ways[kind](transport)


class Tape:
    """A connection that keeps what is sent by it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.sent = connection, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, data: bytes) -> int:
        count = self._connection.send(data)
        self.sent += data[:count]
        return count


def replay(site: Site, data: bytes) -> None:
    """Send it; the server then ends the connection by itself, or with us."""
    site.heard.clear()
    with socket.create_connection(site.place) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert site.heard.wait(20)


def test_what_was_sent_before_is_refused_when_it_comes_again(site: Site) -> None:
    """Whole, and cut anywhere."""
    tape = Tape(socket.create_connection(site.place))
    with session(tape) as transport:
        ask(transport, "true")
    for length in (len(tape.sent), len(tape.sent) // 2, 40, 1):
        replay(site, tape.sent[:length])
    assert site.lines == ["true"]
    assert len(site.said) == 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 70_000,
        BANNER,
        BANNER + b"\xff" * 16,
        BANNER + b"\x00\x00\x00\x0c" + b"\x00" * 12,
        BANNER + b"\x7f\xff\xff\xfc" + b"\x14" * (1 << 20),
    ],
    ids=("nothing", "a browser", "no end of line", "no more", "a length of 4 GB", "no kind", "a long packet"),
)
def test_what_is_no_ssh_is_refused_in_one_line(data: bytes, site: Site) -> None:
    try:
        replay(site, data)
    except (BrokenPipeError, ConnectionResetError):
        assert site.heard.wait(20)
    assert [line[:50] for line in site.said] == ["cpuft: dropped a connection from 127.0.0.1: it did"]
    with session(socket.create_connection(site.place)) as transport:
        assert ask(transport, "exit 3")[0] == 3


def test_who_says_nothing_does_not_stay(site: Site) -> None:
    with socket.create_connection(site.place) as connection:
        connection.settimeout(20)
        while connection.recv(4096):
            pass
    assert site.heard.wait(10)


@pytest.mark.parametrize("data", [b"", BANNER], ids=("silent", "a greeting and no more"))
def test_a_crowd_that_proves_nothing_keeps_no_node_out(data: bytes) -> None:
    """With seconds to go for each of them, and from the node's own address."""
    served: list[str] = []
    server = Server(("127.0.0.1", 0), KEYS, lambda channel, line: run_command(ENVIRON, channel, line), served.append)
    crowd = []
    try:
        with session(socket.create_connection(("127.0.0.1", server.port))) as early:
            for _ in range(300):
                crowd.append(socket.create_connection(("127.0.0.1", server.port)))
                crowd[-1].sendall(data)
            with session(socket.create_connection(("127.0.0.1", server.port))) as late:
                assert [ask(one, "exit 3")[0] for one in (late, early)] == [3, 3]
    finally:
        for connection in crowd:
            connection.close()
        server.end()


def test_a_command_sees_what_it_is_given(site: Site) -> None:
    with session(socket.create_connection(site.place)) as transport:
        assert ask(transport, "env | grep -c TOKEN")[1] == b"0\n"
