"""Sending files to many hosts as a tree: here all hosts are folders of this machine."""

from __future__ import annotations

import io
import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from cpuft.argv import module_command
from cpuft.errors import CpuftError
from cpuft.launch import relay
from cpuft.launch.relay import Receiver, ReceiverOrder, RelayOrder, RelayPlace, count_children, send
from cpuft.transfer import Stream, hash_blocks, make_checksum, walk_names
from cpuft.transfer import send as send_files

RECEIVE = (*module_command(sys.executable, "cpuft.launch.relay"), "receive")
ENDS_EARLY = (
    sys.executable,
    "-c",
    "import os, cpuft.launch.relay as relay\n"
    "class EndsEarly(relay._PassedOn):\n"
    "    left = 3\n"
    "    def readinto(self, place):\n"
    "        self.left -= 1\n"
    "        return super().readinto(place) if self.left else os._exit(9)\n"
    "relay._PassedOn = EndsEarly\n"
    "relay.main()",
    "receive",
)
"""A receiver that is lost after some bytes."""
SMALL_DISK = ("bash", "-c", 'ulimit -f 400; trap "" XFSZ; exec "$@"', "limit", *RECEIVE)
"""A receiver that can store 400 kB."""


def place_host(root: Path, name: str, command: Sequence[str] = RECEIVE, address: str = "127.0.0.1") -> Receiver:
    """A host whose disk is a folder."""
    (root / name).mkdir()
    return Receiver(name, address, ("sh", "-c", f"cd {shlex.quote(str(root / name))}; exec {shlex.join(command)}"))


@pytest.fixture
def order(tmp_path: Path) -> RelayOrder:
    """What is sent: a folder with a large file, a program, a link and a compiled module."""
    source = tmp_path / "source" / "model"
    (source / "__pycache__").mkdir(parents=True)
    (source / "__pycache__" / "a.pyc").write_text("compiled")
    (source / "weights").write_bytes(os.urandom(3_000_000))
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to(source / "run")
    found = [*walk_names(str(source.parent), ("model",))]
    checksum = make_checksum(found, [digest for _, digest in hash_blocks(found)])
    return RelayOrder(str(source.parent), ("model",), ("mine", "mine/inputs/abc", checksum), ())


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the hosts to which the sender itself sends the files."""
    names, own = list[str](), relay._feed

    def feed(order: RelayOrder, link: relay._Link, is_alone: bool) -> None:
        names.append(link.receiver.host)
        own(order, link, is_alone)

    monkeypatch.setattr(relay, "_feed", feed)
    return names


def has_files(order: RelayOrder, root: Path, host: str) -> bool:
    """Whether a host has all files, and no part of others."""
    inputs, source = root / host / "mine" / "inputs", Path(order.folder)
    if sorted(path.name for path in inputs.iterdir()) != ["abc", "abc.files"]:
        return False
    model = inputs / "abc" / "model"
    same = (model / "weights").read_bytes() == (source / "model" / "weights").read_bytes()
    names = {path.name for path in model.iterdir()} == {"weights", "run", "link"}
    modes = (root / host / "mine").stat().st_mode & 0o777 == 0o700 and os.access(model / "run", os.X_OK)
    return same and names and modes and not (model / "link").is_symlink()


def test_every_host_but_the_first_sends_to_at_most_two_others() -> None:
    for hosts in range(1, 100):
        children = [count_children(index, hosts) for index in range(hosts)]
        assert sum(children) == hosts - 1
        assert [(index - 1) // 2 for index in range(1, hosts)] == [i for i, n in enumerate(children) for _ in range(n)]


def test_the_sender_sends_one_copy_and_all_hosts_have_the_files(
    order: RelayOrder, tmp_path: Path, fed: list[str]
) -> None:
    hosts = tuple(place_host(tmp_path, f"h{number}") for number in range(6))
    assert send(replace_receivers(order, hosts)) == {}
    assert fed == ["h0"]
    assert [host.host for host in hosts if not has_files(order, tmp_path, host.host)] == []
    # What a host has already is no reason to fail.
    assert send(replace_receivers(order, hosts[:2])) == {}
    assert has_files(order, tmp_path, "h1")


def replace_receivers(order: RelayOrder, receivers: Sequence[Receiver]) -> RelayOrder:
    return RelayOrder(**(vars(order) | {"receivers": tuple(receivers)}))


def test_hosts_that_the_tree_does_not_serve_get_a_copy_of_their_own(
    order: RelayOrder, tmp_path: Path, fed: list[str]
) -> None:
    """h1 is lost on the way, h2 has a full disk, h3 cannot start and h4 has no address. All others get the files."""
    special = {"h1": ENDS_EARLY, "h2": SMALL_DISK, "h3": ("sh", "-c", "echo no Python here >&2; exit 7")}
    hosts = [
        place_host(tmp_path, f"h{number}", special.get(f"h{number}", RECEIVE), "" if number == 4 else "127.0.0.1")
        for number in range(9)
    ]
    failures = send(replace_receivers(order, hosts))
    assert {host: code for host, (code, _) in failures.items()} == {"h1": 9, "h2": 1, "h3": 7}
    assert failures["h3"][1] == "no Python here"
    assert "File too large" in failures["h2"][1]
    # The tree is h0; h1 and h2; h5 and h6 below h1, and h7 and h8 below h2.
    assert sorted(fed) == ["h0", "h1", "h2", "h4", "h5", "h6"]
    assert [name for name in ("h0", "h4", "h5", "h6", "h7", "h8") if not has_files(order, tmp_path, name)] == []
    # The host itself was not lost, so that it removed the part that it had.
    assert list((tmp_path / "h2" / "mine" / "inputs").iterdir()) == []


def test_files_that_cannot_be_read_end_the_transfer(order: RelayOrder, tmp_path: Path) -> None:
    hosts = [place_host(tmp_path, f"h{number}") for number in range(3)]
    missing = RelayOrder(order.folder, ("missing",), order.place, tuple(hosts))
    with pytest.raises(CpuftError, match=r"No such file or directory: .*missing"):
        send(missing)
    assert [path for host in hosts for path in (tmp_path / host.host).rglob("abc")] == []


def test_the_program_names_every_host_that_failed(order: RelayOrder, tmp_path: Path) -> None:
    """It ends with ssh's exit code only if no other command failed, because such failures may pass.

    The command for the host that is gone closes its output before it ends, as commands do on a busy machine.
    """
    command = "echo no route to host >&2; exec >&- 2>&-; sleep 0.3; exit 255"
    gone = Receiver("gone", "127.0.0.1", ("sh", "-c", command))
    bad = Receiver("bad", "127.0.0.1", ("false",))
    for hosts, code in (((gone,), 255), ((gone, place_host(tmp_path, "h0")), 255), ((gone, bad), 1)):
        text = json.dumps(asdict(replace_receivers(order, hosts)))
        done = subprocess.run([*RECEIVE[:-1]], input=text, capture_output=True, text=True)
        assert (done.returncode, "gone: no route to host" in done.stderr) == (code, True), done.stderr
    assert has_files(order, tmp_path, "h0")


def asdict(order: RelayOrder) -> dict[str, object]:
    return vars(order) | {"receivers": [vars(receiver) for receiver in order.receivers]}


def passed_on(data: bytes, children: list[ssl.SSLSocket]) -> bytes:
    """What a host reads, and its children get."""
    source = io.BufferedReader(io.BytesIO(data))
    return io.BufferedReader(relay._PassedOn(cast(io.BufferedReader, source), children)).read(len(data))


def test_only_who_has_the_certificate_of_the_transfer_is_served() -> None:
    """Another certificate, and none at all, get no byte; nor does a host accept files from a stranger."""
    own, foreign = relay._make_certificate(), relay._make_certificate()
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        port, children = server.getsockname()[1], list[ssl.SSLSocket]()
        thread = threading.Thread(target=lambda: children.extend(relay._accept(server, 1, own)))
        thread.start()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(1000)
        unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection(("127.0.0.1", port), timeout=5)
        with pytest.raises((ssl.SSLError, ConnectionError)), unknown.wrap_socket(plain) as connection:
            connection.recv(1)
        with pytest.raises(ssl.SSLCertVerificationError):
            stack.enter_context(relay._connect(RelayPlace("127.0.0.1", port, 0), foreign))
        assert not children
        stream = stack.enter_context(relay._connect(RelayPlace("127.0.0.1", port, 0), own))
        thread.join(10)
        assert passed_on(b"block", children) == stream.read(5) == b"block"


def test_a_silent_stranger_does_not_keep_hosts_from_being_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_HANDSHAKE_SECONDS", 0.5)
    own = relay._make_certificate()
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        port, children = server.getsockname()[1], list[ssl.SSLSocket]()
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))  # says nothing
        thread = threading.Thread(target=lambda: children.extend(relay._accept(server, 1, own)))
        thread.start()
        stream = stack.enter_context(relay._connect(RelayPlace("127.0.0.1", port, 0), own))
        thread.join(10)
        assert passed_on(b"block", children) == stream.read(5) == b"block"


def test_a_host_that_does_not_start_is_given_up(
    order: RelayOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_READY_SECONDS", 3.0)
    hosts = [place_host(tmp_path, "h0"), place_host(tmp_path, "h1"), place_host(tmp_path, "h2", ("sleep", "100"))]
    began = time.monotonic()
    assert send(replace_receivers(order, hosts)) == {"h2": (1, "the host did not start to receive within 3 s")}
    assert time.monotonic() - began < 40
    assert [host for host in ("h0", "h1") if not has_files(order, tmp_path, host)] == []


def test_a_receiver_listens_on_its_address_only_and_stores_nothing_that_was_cut_off(
    order: RelayOrder, tmp_path: Path
) -> None:
    command = place_host(tmp_path, "h0").command
    told = ReceiverOrder(order.place, "127.0.0.2", relay._make_certificate())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        text = json.dumps(vars(told))
        process.stdin.write(text.encode() + b"\n")
        process.stdin.flush()
        port = int(process.stdout.readline().removeprefix(relay._READY))
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        written = io.BytesIO()
        send_files(Stream(cast(Any, io.BytesIO()), cast(Any, written)), walk_names(order.folder, ["model"]), False)
        place = json.dumps(vars(RelayPlace("", 0, 0))).encode()
        _, errors = process.communicate(place + b"\n" + written.getvalue()[:10_240])
    assert process.returncode == 1
    assert errors.decode() == "cpuft: error: the connection ended before the last file\n"
    # What has come stays for the next try.
    assert [path.name for path in (tmp_path / "h0" / "mine" / "inputs").iterdir()] == ["abc.partial"]
