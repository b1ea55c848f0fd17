"""The hub takes ranks that know the run's key, each once, and nothing that anybody else sends ends it."""

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
from cpuft.comm.liveness import KEY_VARIABLE, MAX_UNVERIFIED, Hub, LivenessConnection, Message, make_proof
from cpuft.errors import CpuftError
from tests.comm.ranks import mpirun

KEY = b"the run's key"
HELLO_SECONDS = 0.5
Knock = Callable[[bytes], socket.socket]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def hub(told: list[str]) -> Hub:
    return Hub(KEY, "127.0.0.1", (0, 1), told.append, HELLO_SECONDS)


@pytest.fixture
def knock(hub: Hub) -> Iterator[Knock]:
    """A connection to the hub that says something."""
    opened = []

    def connect(words: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
        opened.append(connection)
        connection.sendall(words)
        return connection

    yield connect
    for connection in opened:
        connection.close()


def join(hub: Hub, rank: bytes, key: bytes = KEY, more: bytes = b"") -> tuple[socket.socket, bytes]:
    """Say hello as a rank does; the connection, and what the hub answered."""
    connection = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    nonce = connection.recv(100).strip()
    connection.sendall(rank + b" " + make_proof(key, nonce, rank) + b"\n" + more)
    try:
        return connection, connection.recv(100)
    except ConnectionResetError:
        return connection, b""


def is_dropped(connection: socket.socket) -> bool:
    """Whether the other end hangs up, within the connection's time limit."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def check_all_is_well(hub: Hub) -> None:
    """Both ranks get in, and one hears the other, and that it leaves."""
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
def test_a_stranger_is_dropped_and_told(hub: Hub, knock: Knock, told: list[str], noise: bytes, reason: str) -> None:
    assert is_dropped(knock(noise))
    assert told == [f"cpuft comm: the liveness hub closed a connection from 127.0.0.1, which {reason}"]
    check_all_is_well(hub)


def test_a_flood_is_not_kept(hub: Hub, knock: Knock) -> None:
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        knock(b"x" * (16 << 20)).sendall(b"x")
    check_all_is_well(hub)


def test_more_strangers_than_there_is_room_for_are_dropped(hub: Hub, knock: Knock, told: list[str]) -> None:
    crowd = [knock(b"") for _ in range(MAX_UNVERIFIED + 10)]
    assert all(is_dropped(connection) for connection in crowd[:10])
    check_all_is_well(hub)
    assert len(told) == 5
    assert told[-1].endswith("; further ones are not reported")


def test_no_file_descriptor_is_left(hub: Hub, knock: Knock, told: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare.fileno() + 1, hard))
    try:
        # Connecting is done by the kernel; the hub has no descriptor to accept with.
        spare.connect(("127.0.0.1", hub.port))
        time.sleep(HELLO_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        spare.close()
    check_all_is_well(hub)


def test_a_rank_beyond_the_world_or_a_second_time_is_refused(hub: Hub, told: list[str]) -> None:
    first, _ = join(hub, b"0")
    assert join(hub, b"77")[1] == b""
    assert join(hub, b"0")[1] == b""
    assert join(hub, b"1", key=b"another key")[1] == b""
    # Nobody heard of them, and rank 0 is still there.
    second, _ = join(hub, b"1", more=b'{"ask": 1}\n')
    assert first.recv(100) == b'{"ask": 1}\n'
    assert [line.rpartition(", which ")[2] for line in told] == [
        "is connected already or not of this run",
        "is connected already or not of this run",
        "does not know the run's key",
    ]
    first.close()
    second.close()


def test_nobody_can_come_when_all_are_in(hub: Hub) -> None:
    stranger = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    ranks = [join(hub, b"0")[0], join(hub, b"1")[0]]
    assert is_dropped(stranger)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", hub.port), timeout=10)
    for rank in ranks:
        rank.close()


def meet(store: Store, rank: int, heard: list[Message], seconds: float = 10) -> LivenessConnection:
    return LivenessConnection(store, rank, (0, 1), rank == 0, heard.append, seconds)


def test_the_key_is_not_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store, heard = HashStore(), list[Message]()
    lines = [meet(store, 0, heard), meet(store, 1, heard)]
    assert set(json.loads(store.get("liveness"))) == {"host", "port", "seal"}
    assert b"sesame" not in store.get("liveness")
    for line in lines:
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


@pytest.mark.parametrize("key", ["other", ""])
def test_a_hub_of_somebody_else_is_not_believed(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(liveness, "_FOREIGN_SECONDS", 0.5)
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store = HashStore()
    line = meet(store, 0, [])
    monkeypatch.setenv(KEY_VARIABLE, key)
    told = "was not written by this run: .* not written with rank 1's CPUFT_RUN_KEY"
    with pytest.raises(liveness.StartupDisturbedError, match=told) as raised:
        meet(store, 1, [])
    assert raised.value.exit_code == 1  # no refusal: the run may be started again
    line.close()
    monkeypatch.delenv(KEY_VARIABLE)


@pytest.mark.parametrize("value", ["", "[]", "7", '{"host": "h", "port": [], "seal": "x"}', "stranger", "\xff"])
def test_what_a_stranger_writes_to_the_store_is_waited_out(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The first rank writes its own entry again, until all are in."""
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store, heard = HashStore(), list[Message]()
    first = meet(store, 0, heard)
    place = json.dumps({"host": "127.0.0.1", "port": 9, "seal": liveness._seal_address(b"stranger", "127.0.0.1", 9)})
    store.set("liveness", place if value == "stranger" else value)
    second = meet(store, 1, heard)
    for line in (first, second):
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


def test_a_key_that_a_stranger_deletes_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    store, heard = HashStore(), list[Message]()
    first = meet(store, 0, heard)
    store.delete_key("liveness")
    second = meet(store, 1, heard)
    for line in (first, second):
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


def test_another_host_that_writes_to_torchs_store_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real store over TCP, and a stranger who connects to it and overwrites and deletes what it finds."""
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other, stranger = (TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2))
    heard = list[Message]()
    first = meet(PrefixStore("run", server), 0, heard)
    stranger.delete_key("run/liveness")
    second = list[LivenessConnection]()
    rank = threading.Thread(target=lambda: second.append(meet(PrefixStore("run", other), 1, heard)), daemon=True)
    stranger.set("run/liveness", "mischief")
    rank.start()
    rank.join(8)
    assert second
    for line in (first, *second):
        line.close()
    monkeypatch.delenv(KEY_VARIABLE)


def test_a_rank_that_is_there_already_is_not_let_in() -> None:
    store = HashStore()
    line = meet(store, 0, [])
    with pytest.raises(CpuftError, match=re.escape("check whether this rank runs twice")):
        LivenessConnection(store, 0, (0, 1), False, lambda _: None, join_seconds=0.5)
    line.close()


def test_who_reads_the_store_can_end_nothing() -> None:
    run = mpirun(2, "tests.comm.outsider", seconds=60, CPUFT_RUN_KEY="sesame")
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("all right") == 2


def test_a_rank_that_comes_late_finds_the_hub_awake() -> None:
    run = mpirun(2, "tests.comm.delayed_rank", seconds=45)
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("all right") == 2
