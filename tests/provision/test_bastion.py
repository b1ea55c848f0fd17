"""Hosts behind a bastion: cpuft provisions and examines them, trains on them, and fetches the results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cpuft.hosts import transport as transport_module
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import find_mpi
from cpuft.hosts.transport import HostError, SshTransport
from tests.provision.simulated import Simulated, needs_root, own_root, simulate, write_wheel, write_wheels

pytestmark = needs_root
NAME = "inner"
SCRIPT = """
import os, pathlib, socket, sys
print(socket.gethostname(), os.environ["RANK"], *sys.argv[1:])
if os.environ["RANK"] == "0":
    pathlib.Path(os.environ["CPUFT_RUN_DIR"], "result").write_text(socket.gethostname())
"""


@contextmanager
def cut_off(addresses: list[str]) -> Iterator[None]:
    """Remove this machine's route to these hosts; they still reach each other."""
    for address in addresses:
        subprocess.run(["ip", "route", "add", "unreachable", f"{address}/32"], check=True, timeout=20)
    try:
        yield
    finally:
        for address in addresses:
            subprocess.run(["ip", "route", "del", "unreachable", f"{address}/32"], check=True, timeout=20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Three hosts with disks of their own. The first is the bastion, called gate in the user's ssh configuration."""
    with (
        own_root(tmp_path_factory.mktemp("bastion")) as image,
        simulate(image.parent, "--nodes", "3", "--image", str(image)) as made,
    ):
        write_wheels(made.folder / "wheels")
        # torch, MPI and all else are this machine's: they would be gigabytes on every disk.
        there = next(path for path in sys.path if path.endswith("site-packages"))
        mpirun = find_mpi(Host("localhost"), "", sys.executable, SshTransport()).path
        files = {"there.pth": f"{there}\n", "there-99.0.data/scripts/mpirun": f'#!/bin/sh\nexec {mpirun} "$@"\n'}
        write_wheel(made.folder / "wheels", "there", files)
        state = made.folder / "state" / made.name
        (made.folder / ".ssh").mkdir()
        (made.folder / ".ssh" / "config").write_text(
            f"Host gate\n  HostName {made.hosts[0].name}\n  User root\n  IdentityFile {state}/id_ed25519\n"
            f"  UserKnownHostsFile {state}/known_hosts\n"
        )
        with cut_off([host.name for host in made.hosts[1:]]):
            yield made


def ok(cluster: Simulated, *words: str) -> str:
    """Run a command that must succeed; return its output. The user's ssh configuration is in the cluster folder."""
    done = cluster.cpuft(*words, HOME=str(cluster.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_provision_doctor_launch_and_fetch_through_a_bastion(cluster: Simulated) -> None:
    hosts = [host.name for host in cluster.hosts[1:]]
    with pytest.raises(HostError) as error:
        SshTransport(cluster.ssh_config).run(Host(hosts[0]), ("true",))
    assert error.value.kind == transport_module.UNREACHABLE

    key = str(cluster.folder / "state" / cluster.name / "id_ed25519")
    where = ("--hosts", ",".join(hosts), "--jump", "gate", "--user", "root", "--key", key, "--name", NAME)
    what = ("--prefix", "/opt/inner", "--wheels", str(cluster.folder / "wheels"), "--accept-host-keys")
    assert "2 hosts" in ok(cluster, "provision", "hosts", *where, *what)
    assert ok(cluster, "provision", "diff", NAME) == f"cluster {NAME} is as it was asked for\n"
    assert ok(cluster, "provision", "status", NAME).count("  up, ") == 2
    ok(cluster, "doctor", "--cluster", NAME)

    (cluster.folder / "script.py").write_text(SCRIPT)
    said = ok(
        cluster, "launch", "--cluster", NAME, "--np", "2", "--independent", "--run-dir", "run", "--", "script.py", "a 0"
    )
    names = [f"{cluster.name}-{index}" for index in (2, 3)]
    assert said.splitlines()[0] == f"{names[0]} 0 a 0"
    assert (cluster.folder / "run" / "result").read_text() == names[0]
    assert (cluster.folder / "run" / "logs" / "rank-1.out").read_text() == f"{names[1]} 1 a 0\n"

    ok(cluster, "provision", "down", NAME)
    assert not (cluster.folder / "state" / NAME).exists()
