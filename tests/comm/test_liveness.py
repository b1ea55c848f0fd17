"""The hub accepts ranks that know the run's key, each once, and nothing that anybody else sends ends it."""

from __future__ import annotations

import json
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from cpuft.comm import liveness
from cpuft.comm.liveness import (
    KEY_VARIABLE,
    MAX_UNVERIFIED,
    Hub,
    LivenessConnection,
    Message,
    make_proof,
)
from cpuft.errors import CpuftError
from tests.comm.ranks import fork_ranks, mpirun

KEY = b"the run's key"
HELLO_SECONDS = 0.5
Connect = Callable[[bytes], socket.socket]


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def hub(reports: list[str], monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(liveness, "_HELLO_SECONDS", HELLO_SECONDS)
    return Hub(KEY, "127.0.0.1", (0, 1), reports.append)


@pytest.fixture
def connect(hub: Hub) -> Iterator[Connect]:
    """Opens a connection to the hub and sends bytes."""
    opened = []

    def open_connection(data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
        opened.append(connection)
        connection.sendall(data)
        return connection

    yield open_connection
    for connection in opened:
        connection.close()


def join(hub: Hub, rank: bytes, key: bytes = KEY, more: bytes = b"") -> tuple[socket.socket, bytes]:
    """Say hello as a rank does, and return the connection and the hub's answer."""
    connection = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    nonce = connection.recv(100).strip()
    connection.sendall(rank + b" " + make_proof(key, nonce, rank) + b"\n" + more)
    try:
        return connection, connection.recv(100)
    except ConnectionResetError:
        return connection, b""


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection within its time limit."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def check_hub_works(hub: Hub) -> None:
    """Check that both ranks can join, and that one receives the other's message and is told of its end."""
    (first, welcome), (second, _) = join(hub, b"0"), join(hub, b"1")
    assert welcome == b"welcome\n"
    second.sendall(b'{"ask": 1}\n')
    assert first.recv(100) == b'{"ask": 1}\n'
    second.close()
    assert json.loads(first.recv(100)) == {"gone": 1}
    first.close()


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (b"[" * 200 + b"\n", "does not know the run's key"),
        (b"[" * 200_000, "sent too long a line"),
        (b'{"rank": 0, "token": ""}\n', "does not know the run's key"),
        (b"0 " + b"0" * 64 + b"\n", "does not know the run's key"),
        (b"\n\n\n", "does not know the run's key"),
        (b"\xff\x00 \xff\n", "does not know the run's key"),
        (b"GET / HTTP/1.1", f"sent no hello in {HELLO_SECONDS:g} s"),
        (b"", f"sent no hello in {HELLO_SECONDS:g} s"),
    ],
    ids=["deep", "endless", "json", "proof", "empty", "bytes", "late", "silent"],
)
def test_a_connection_without_the_key_is_closed_and_reported(
    hub: Hub, connect: Connect, reports: list[str], noise: bytes, reason: str
) -> None:
    assert is_closed(connect(noise))
    assert reports == [f"cpuft comm: the liveness hub closed a connection from 127.0.0.1, which {reason}"]
    check_hub_works(hub)


def test_a_flood_of_bytes_is_not_stored(hub: Hub, connect: Connect) -> None:
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        connect(b"x" * (16 << 20)).sendall(b"x")
    check_hub_works(hub)


def test_too_many_unverified_connections_close_the_oldest(hub: Hub, connect: Connect, reports: list[str]) -> None:
    crowd = [connect(b"") for _ in range(MAX_UNVERIFIED + 10)]
    assert all(is_closed(connection) for connection in crowd[:10])
    check_hub_works(hub)
    assert len(reports) == 5
    assert reports[-1].endswith("; further ones are not reported")


def test_the_hub_survives_a_lack_of_file_descriptors(hub: Hub, connect: Connect, reports: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare.fileno() + 1, hard))
    try:
        # The kernel completes the connection, but the hub has no file descriptor for accept.
        spare.connect(("127.0.0.1", hub.port))
        time.sleep(HELLO_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        spare.close()
    check_hub_works(hub)


def test_an_unknown_rank_or_a_second_connection_of_a_rank_is_refused(hub: Hub, reports: list[str]) -> None:
    first, _ = join(hub, b"0")
    assert join(hub, b"77")[1] == b""
    assert join(hub, b"0")[1] == b""
    assert join(hub, b"1", key=b"another key")[1] == b""
    # No message was sent about them, and rank 0 is still connected.
    second, _ = join(hub, b"1", more=b'{"ask": 1}\n')
    assert first.recv(100) == b'{"ask": 1}\n'
    assert [line.rpartition(", which ")[2] for line in reports] == [
        "is connected already or not of this run",
        "is connected already or not of this run",
        "does not know the run's key",
    ]
    first.close()
    second.close()


def test_the_port_is_closed_when_all_ranks_are_connected(hub: Hub) -> None:
    unverified = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    ranks = [join(hub, b"0")[0], join(hub, b"1")[0]]
    assert is_closed(unverified)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    for rank in ranks:
        rank.close()


def connect_rank(store: Store, rank: int, messages: list[Message]) -> LivenessConnection:
    return LivenessConnection(store, rank, (0, 1), rank == 0, messages.append)


def test_the_key_is_not_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store, messages = HashStore(), list[Message]()
    lines = [connect_rank(store, 0, messages), connect_rank(store, 1, messages)]
    assert set(json.loads(store.get("liveness"))) == {"host", "port", "seal"}
    assert b"sesame" not in store.get("liveness")
    for line in lines:
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


@pytest.mark.parametrize("key", ["other", ""])
def test_an_entry_of_another_run_in_the_store_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(liveness, "_FOREIGN_SECONDS", 0.5)
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store = HashStore()
    line = connect_rank(store, 0, [])
    monkeypatch.setenv(KEY_VARIABLE, key)
    message = "was not written by this run: .* not written with rank 1's CPUFT_RUN_KEY"
    with pytest.raises(liveness.StartupDisturbedError, match=message) as raised:
        connect_rank(store, 1, [])
    assert raised.value.exit_code == 1  # not that of a refused option: the run may be started again
    line.close()
    monkeypatch.delenv(KEY_VARIABLE)


@pytest.mark.parametrize("value", ["", "[]", "7", '{"host": "h", "port": [], "seal": "x"}', "attacker", "\xff"])
def test_a_wrong_entry_in_the_store_is_replaced(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The first rank writes its own entry repeatedly until all ranks are connected."""
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store, messages = HashStore(), list[Message]()
    first = connect_rank(store, 0, messages)
    place = json.dumps({"host": "127.0.0.1", "port": 9, "seal": liveness._seal_address(b"attacker", "127.0.0.1", 9)})
    store.set("liveness", place if value == "attacker" else value)
    second = connect_rank(store, 1, messages)
    for line in (first, second):
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


def test_a_deleted_entry_in_the_store_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store, messages = HashStore(), list[Message]()
    first = connect_rank(store, 0, messages)
    store.delete_key("liveness")
    second = connect_rank(store, 1, messages)
    for line in (first, second):
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


def test_another_host_that_writes_to_torchs_store_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker connects to a real store over TCP, and overwrites and deletes its entries."""
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other, attacker = (TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2))
    messages = list[Message]()
    first = connect_rank(PrefixStore("run", server), 0, messages)
    attacker.delete_key("run/liveness")
    second = list[LivenessConnection]()
    rank = threading.Thread(
        target=lambda: second.append(connect_rank(PrefixStore("run", other), 1, messages)), daemon=True
    )
    attacker.set("run/liveness", "wrong")
    rank.start()
    rank.join(8)
    assert second
    for line in (first, *second):
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


def test_a_host_that_is_silent_for_seven_seconds_counts_as_lost() -> None:
    line = connect_rank(HashStore(), 0, [])
    assert line._hub is not None
    (writer,) = line._hub._ranks
    for end in (line._socket, writer.get_extra_info("socket")):
        idle, interval, limit = (
            end.getsockopt(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        )
        assert idle + 4 * interval == 7 == limit / 1000
    line.close()


def test_a_rank_cannot_join_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    line = connect_rank(store, 0, [])
    monkeypatch.setattr(liveness, "_JOIN_SECONDS", 0.5)
    with pytest.raises(CpuftError, match=re.escape("check whether this rank runs twice")):
        LivenessConnection(store, 0, (0, 1), False, lambda _: None)
    line.close()


def test_reading_the_store_does_not_suffice_to_end_a_run() -> None:
    run = fork_ranks(2, "tests.comm.outsider", seconds=60, CPUFT_RUN_KEY="sesame")
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("passed") == 2


def test_a_delayed_rank_can_still_join_the_hub() -> None:
    run = mpirun(2, "tests.comm.delayed_rank", seconds=45)
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("passed") == 2
