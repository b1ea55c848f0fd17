"""The ssh server of a node of an AWS Batch job: a real sshd on the loopback address."""

from __future__ import annotations

import getpass
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.facts import find_free_port
from cpuft.schedulers.job_node import _SESSION, Keys, serve
from tests.conftest import wait_until
from tests.schedulers.test_job_node import NODE

pytestmark = pytest.mark.real
KEYS = Keys(NODE)
OTHERS = {"job": Keys(replace(NODE, job="8")), "secret": Keys(replace(NODE, token="b" * 32))}
ENVIRON = {"PATH": "/usr/bin:/bin", "OWN": "a 'b'\n$c", "BASH_FUNC_f%%": "() { :; }"}


@contextmanager
def open_server(folder: Path, script: str = _SESSION) -> Iterator[tuple[str, int]]:
    """Where a server listens."""
    place = ("127.0.0.1", find_free_port())
    with serve(KEYS, folder, place, ENVIRON, script):
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with open_server(tmp_path) as place:
        yield place


@contextmanager
def log_in(place: tuple[str, int], keys: Keys = KEYS) -> Iterator[paramiko.Transport]:
    with paramiko.Transport(socket.create_connection(place)) as session:
        session.start_client(timeout=10)
        session.auth_publickey(getpass.getuser(), keys.login)
        yield session


def ask(session: paramiko.Transport, line: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    channel = session.open_session(timeout=10)
    channel.settimeout(20)
    channel.exec_command(line)
    channel.sendall(stdin)
    channel.shutdown_write()
    output, errors = channel.makefile("rb").read(), channel.makefile_stderr("rb").read()
    return channel.recv_exit_status(), output, errors


def test_a_command_has_its_streams_its_exit_code_and_the_nodes_variables(place: tuple[str, int]) -> None:
    with log_in(place) as session:
        assert session.get_remote_server_key() == KEYS.host
        data = b"x" * 3_000_000
        assert ask(session, "cat; echo no >&2; exit 7", data) == (7, data, b"no\n")
        assert ask(session, 'printf %s "$OWN"')[1] == ENVIRON["OWN"].encode()
        assert ask(session, "env | grep -v ^SSH_ | grep -c TOKEN")[1] == b"0\n"


def test_a_command_ends_with_its_session(place: tuple[str, int], tmp_path: Path) -> None:
    with log_in(place) as session:
        channel = session.open_session(timeout=10)
        channel.exec_command(f"trap 'touch {tmp_path}/ended; exit' TERM; echo begun; while :; do sleep 0.1; done")
        assert channel.recv(6) == b"begun\n"
    wait_until((tmp_path / "ended").exists)


@pytest.mark.parametrize("other", OTHERS)
def test_another_key_is_refused(other: str, place: tuple[str, int]) -> None:
    with pytest.raises(paramiko.AuthenticationException), log_in(place, OTHERS[other]):
        pass


@pytest.mark.parametrize("kind", ["pty", "forwarding"])
def test_a_session_gets_no_terminal_and_no_forwarding(kind: str, place: tuple[str, int]) -> None:
    ways = {
        "pty": lambda session: session.open_session(timeout=10).get_pty(),
        "forwarding": lambda session: session.open_channel("direct-tcpip", place, place, timeout=10),
    }
    with log_in(place) as session, pytest.raises(paramiko.SSHException):
        ways[kind](session)


def test_the_main_node_runs_nothing_that_a_node_asks_for(tmp_path: Path) -> None:
    """Whatever it is, the node's registration runs, here a stand-in for it."""
    with open_server(tmp_path, 'printf "%s" "$SSH_ORIGINAL_COMMAND"\n') as place, log_in(place) as session:
        line = f"touch {tmp_path}/made; $(touch {tmp_path}/made)"
        assert ask(session, line)[:2] == (0, line.encode())
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [pytest.param(b"", marks=pytest.mark.proof), b"SSH-2.0-x\r\n"],
    ids=["silent", "a greeting and no more"],
)
def test_a_hundred_silent_connections_keep_no_node_out_and_are_dropped(data: bytes, place: tuple[str, int]) -> None:
    with ExitStack() as stack:
        early = stack.enter_context(log_in(place))
        crowd = [stack.enter_context(socket.create_connection(place)) for _ in range(100)]
        for connection in crowd:
            connection.sendall(data)
        start = time.monotonic()
        late = stack.enter_context(log_in(place))
        assert [ask(session, "exit 3")[0] for session in (late, early)] == [3, 3]
        assert time.monotonic() - start < 8
        crowd[0].settimeout(30)
        while crowd[0].recv(4096):
            pass


def test_a_port_in_use_is_named(place: tuple[str, int], tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=rf"sshd cannot use 127\.0\.0\.1 port {place[1]} \(Address already in use\)"):
        serve(KEYS, tmp_path, place, ENVIRON, _SESSION).__enter__()


def test_the_keys_on_disk_are_for_this_user_alone(place: tuple[str, int], tmp_path: Path) -> None:
    assert (tmp_path / "host_key").stat().st_mode & 0o077 == 0
    shown = subprocess.run(["ssh-keygen", "-yf", tmp_path / "host_key"], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[:2] == KEYS.host_line.split()
