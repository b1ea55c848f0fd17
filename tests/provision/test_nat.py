"""Hosts that this machine reaches through ports of one address, and that reach each other by their names."""

from __future__ import annotations

import json
import sys

import pytest

from tests.provision.simulated import needs_root, own_root, simulate
from tests.provision.test_bastion import SCRIPT, cut_off

RELAY = """
import asyncio, sys

async def copy(source, target):
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()

async def serve(port, address):
    async def connect(source, target):
        other_source, other = await asyncio.open_connection(address, 22)
        await asyncio.gather(copy(source, other), copy(other_source, target))
    await asyncio.start_server(connect, "0.0.0.0", port)

async def main():
    for number, address in enumerate(sys.argv[1:], start=2201):
        await serve(number, address)
    await asyncio.sleep(600)

asyncio.run(main())
"""
LISTENS = "timeout 60 sh -c 'until grep -q :089A /proc/net/tcp; do sleep 0.1; done'"  # port 2202


@needs_root
def test_a_launch_reaches_hosts_through_ports_of_one_address(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        own_root(tmp_path_factory.mktemp("nat")) as image,
        simulate(image.parent, "--nodes", "3", "--image", str(image)) as cluster,
    ):
        *hosts, gate = cluster.hosts
        names, addresses = [f"{cluster.name}-{number}" for number in (1, 2)], [host.name for host in hosts]
        (image / "relay.py").write_text(RELAY)
        cluster.on(3, f"setsid {sys.executable} /relay.py {' '.join(addresses)} </dev/null >/dev/null 2>&1 & {LISTENS}")
        state = cluster.folder / "state" / cluster.name
        own = json.loads((state / "cluster.json").read_text())["ssh_config_there"]
        # The head host has a file of the same path, with the ways among the hosts.
        config = cluster.folder / "config"
        cluster.on(1, f"mkdir -p {cluster.folder} && echo 'Include {own}' >{config}")
        config.write_text(
            "".join(
                f"Host {name}\n  HostName {gate.name}\n  HostKeyAlias {address}\n  User root\n"
                f"  IdentityFile {state}/id_ed25519\n  UserKnownHostsFile {state}/known_hosts\n"
                for name, address in zip(names, addresses)
            )
        )
        (cluster.folder / "hosts").write_text("".join(f"{name} port={2201 + i}\n" for i, name in enumerate(names)))
        (cluster.folder / "script.py").write_text(SCRIPT)
        words = ("--hostfile", "hosts", "--ssh-config", str(config), "--np", "2", "--independent", "--run-dir", "run")
        with cut_off(addresses):
            done = cluster.cpuft("launch", *words, "--", "script.py", "a 0")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0] == f"{names[0]} 0 a 0"
        assert (cluster.folder / "run" / "result").read_text() == names[0]
        assert (cluster.folder / "run" / "logs" / "rank-1.out").read_text() == f"{names[1]} 1 a 0\n"
