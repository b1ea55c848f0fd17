"""An outsider on the bridge makes noise at every port of a run: the run ends with its metric."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpuft.record import read_record
from tests.provision.simulated import Simulated, needs_root, simulate

pytestmark = needs_root
RUN = ("--task", "demo", "--max-steps", "60", "--batch-size", "4", "--max-train-samples", "480", "--no-save-model")
LISTENS = "0A"  # include/net/tcp_states.h
IDLE = 8
"""Connections that stay open and say nothing, at each port. From ten strangers on, sshd turns friends away, too."""
REPEATED = 2
BACKENDS = ("ccl", "gloo", "mpi")
ROUNDS = [(BACKENDS[at % 3], at) for at in range(int(os.environ.get("ATTACK_ROUNDS", "1")))]
KEY = """
import glob, hashlib, os
def read(path):
    try:
        return open(path, "rb").read()
    except OSError:  # ended meanwhile
        return b""
key = os.environ["CPUFT_RUN_KEY"].encode()
mpiruns = [path for path in glob.glob("/proc/[0-9]*") if b"hydra" in read(path + "/cmdline")]
print(hashlib.sha256(key).hexdigest(), mpiruns != [], [path for path in mpiruns if key in read(path + "/environ")])
"""


def make_noise(numbers: random.Random) -> list[bytes]:
    """What a confused or a curious stranger sends."""
    lengths = (1, 7, 8, 64, 4096, 1 << 20)
    words = (b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000, b"\x00" * 65536, b"\xff" * 65536, b"\n" * 1000)
    return [*words, *(numbers.randbytes(length) for length in lengths)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with simulate(tmp_path_factory.mktemp("attack"), "--nodes", "2") as made:
        yield made


@pytest.fixture
def outsider(cluster: Simulated) -> Iterator[str]:
    """An address on the cluster's network that is none of its hosts'."""
    address = cluster.hosts[0].name.rpartition(".")[0] + ".200"
    words = [f"{address}/24", "dev", f"cpuft-{cluster.name}"]
    subprocess.run(["ip", "address", "add", *words], check=True)
    yield address
    subprocess.run(["ip", "address", "delete", *words], check=True)


def list_ports(cluster: Simulated, index: int) -> dict[int, str]:
    """Ports of a host at which somebody listens for more than the host itself, and on which address."""
    text = cluster.on(index, "tail -qn +2 /proc/net/tcp /proc/net/tcp6")
    found = {}
    for _, local, _, state, *_ in map(str.split, text.splitlines()):
        address, port = local.split(":")
        if state == LISTENS and address != "0100007F":
            found[int(port, 16)] = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
    return found


def knock(outsider: str, host: str, port: int, noise: bytes) -> None:
    """Say it, and listen for a moment."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 2, (outsider, 0)) as connection:
        connection.sendall(noise)
        connection.settimeout(0.05)
        connection.recv(1 << 16)


def knock_at(outsider: str, transport: tuple[str, int], noise: list[bytes]) -> None:
    """All of it, a connection each."""
    for words in noise:
        knock(outsider, *transport, words)


def stand_around(outsider: str, host: str, port: int) -> list[socket.socket]:
    """Connections that say nothing."""
    found = []
    for _ in range(IDLE):
        with contextlib.suppress(OSError):
            found.append(socket.create_connection((host, port), 2, (outsider, 0)))
    return found


@contextlib.contextmanager
def launch(cluster: Simulated, backend: str, run_dir: str) -> Iterator[subprocess.Popen[str]]:
    """A training on both hosts."""
    words = ["--np", "2", "--cluster", cluster.name, "--backend", backend, "--run-dir", run_dir, *RUN]
    environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
    command = [sys.executable, "-m", "cpuft", "launch", *words]
    with subprocess.Popen(
        command, cwd=cluster.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_to_first_step(process: subprocess.Popen[str]) -> str:
    """What a run said up to the first step that it tells of."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step "):
            break
    return said


@pytest.mark.proof
@pytest.mark.parametrize(("backend", "seed"), ROUNDS)
def test_noise_at_every_port_ends_no_run(cluster: Simulated, outsider: str, backend: str, seed: int) -> None:
    noise, run_dir = make_noise(random.Random(seed)) * REPEATED, f"run-{seed}"
    hosts = [host.name for host in cluster.hosts]
    with launch(cluster, backend, run_dir) as process:
        said = read_to_first_step(process)
        found = {host: list_ports(cluster, index) for index, host in enumerate(hosts, start=1)}
        transports = [(host, port) for host, ports in found.items() for port in ports]
        crowd = [connection for host, port in transports for connection in stand_around(outsider, host, port)]
        # At all ports at once: one after another takes as long as a short run does.
        with ThreadPoolExecutor(len(transports)) as strangers:
            list(strangers.map(lambda transport: knock_at(outsider, transport, noise), transports))
        was_running = process.poll() is None
        said += process.communicate(timeout=200)[0]
    for connection in crowd:
        connection.close()
    assert process.returncode == 0, said
    assert was_running
    assert read_record(str(cluster.folder / run_dir)).metrics.keys() == {"accuracy", "f1"}
    # Hydra's proxy on the master listens on all interfaces.
    assert [address for host, ports in found.items() for address in ports.values() if address != host] == ["0.0.0.0"]


def test_ranks_share_a_key_that_mpirun_does_not_have(cluster: Simulated) -> None:
    # Whoever is quick to call himself the other host's proxy gets all that mpirun has.
    (cluster.folder / "key.py").write_text(KEY)
    done = cluster.cpuft(
        "launch", "--np", "2", "--independent", "--cluster", cluster.name, "--run-dir", "key", "--", "key.py"
    )
    told = [path.read_text() for path in sorted((cluster.folder / "key" / "logs").glob("rank-*.out"))]
    assert len(told) == 2, done.stderr
    assert told[0] == told[1]
    assert told[0].endswith(" True []\n")
