"""The doctor on a simulated cluster, in which each fault is real."""

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.provision.simulated import Simulated, needs_root, simulate, take_snapshot

pytestmark = needs_root
SECONDS_OF_SHORT_FORM = 5.0
SLOW_MACHINE = {"CPUFT-026", "CPUFT-027"}
"""Load and stolen time depend on what else the test machine does."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    folder = tmp_path_factory.mktemp("doctor")
    before = take_snapshot(folder)
    with simulate(folder, "--nodes", "4") as made:
        for index in range(1, 5):
            hide_other_runs(made, index)
        yield made
    assert take_snapshot(folder) == before


def hide_other_runs(cluster: Simulated, index: int) -> None:
    """Give a host a /var/tmp of its own: hosts share that of this machine, where a killed test may have left a run."""
    cluster.on(index, "mount -t tmpfs -o mode=1777 tmpfs /var/tmp")


def examine(cluster: Simulated, *options: str) -> dict[str, set[str]]:
    """Return the hosts of the findings, by code."""
    done = cluster.cpuft("doctor", "--cluster", cluster.name, "--json", *options)
    assert done.returncode in (0, 1), done.stderr
    codes: dict[str, set[str]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        if finding["code"] not in SLOW_MACHINE:
            codes.setdefault(finding["code"], set()).add(finding["host"].split(" ")[0])
    assert done.returncode == 1 or not any(f["severe"] for f in json.loads(done.stdout)["findings"])
    return codes


@pytest.fixture(scope="module")
def usual(cluster: Simulated) -> dict[str, set[str]]:
    """Findings about this test machine itself, such as a CPU without bf16."""
    return examine(cluster)


def new(found: dict[str, set[str]], usual: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the findings that are not among the usual ones, without hosts that have fewer findings than usual."""
    return {code: more for code, hosts in found.items() if (more := hosts - usual.get(code, set()))}


@pytest.mark.alone
def test_an_examination_is_quick(cluster: Simulated, usual: dict[str, set[str]]) -> None:
    start = time.monotonic()
    assert not new(examine(cluster), usual)
    assert time.monotonic() - start < SECONDS_OF_SHORT_FORM


@pytest.mark.parametrize(
    "code, plant, undo",
    [
        (
            "CPUFT-006",
            "(echo 127.0.1.1 NAME; cat /etc/hosts) >/run/spoiled; mount --bind /run/spoiled /etc/hosts",
            "umount /etc/hosts",
        ),
        ("CPUFT-010", "ip link set dev eth0 mtu 1400", "ip link set dev eth0 mtu 1500"),
        ("CPUFT-022", "mount -o remount,size=1m /dev/shm", "mount -o remount,size=1g /dev/shm"),
        ("CPUFT-023", "mount -t tmpfs -o size=1m tmpfs /var/tmp", "umount /var/tmp"),
    ],
)
def test_a_real_fault_of_a_host_is_found(
    cluster: Simulated, usual: dict[str, set[str]], code: str, plant: str, undo: str
) -> None:
    cluster.on(3, plant.replace("NAME", f"{cluster.name}-3"))
    try:
        assert new(examine(cluster), usual) == {code: {cluster.hosts[2].name}}
    finally:
        cluster.on(3, undo)


def test_a_disconnected_host_is_found(cluster: Simulated, usual: dict[str, set[str]]) -> None:
    cluster.cpuft("provision", "local", "--name", cluster.name, "cut", "4")
    found = new(examine(cluster), usual)
    cluster.cpuft("provision", "local", "--name", cluster.name, "join", "4")
    assert found == {"CPUFT-002": {cluster.hosts[3].name}}


@pytest.mark.parametrize("code", ["CPUFT-003", "CPUFT-004"])
def test_a_wrong_key_is_found(cluster: Simulated, usual: dict[str, set[str]], code: str) -> None:
    folder = cluster.folder / "state" / cluster.name
    known, address = folder / "known_hosts", cluster.hosts[1].name
    text = known.read_text()
    if code == "CPUFT-003":
        other = next(line.split(" ", 1)[1] for line in text.splitlines() if not line.startswith(address + " "))
        lines = [f"{address} {other}" if line.startswith(address + " ") else line for line in text.splitlines()]
        known.write_text("\n".join(lines) + "\n")
        try:
            assert new(examine(cluster), usual)[code] == {address}
        finally:
            known.write_text(text)
    else:
        cluster.on(2, "mv /run/cpuft/authorized_keys /run/cpuft/away")
        found = new(examine(cluster), usual)
        cluster.cpuft("provision", "local", "--name", cluster.name, "kill", "2")
        cluster.cpuft("provision", "local", "--name", cluster.name, "--nodes", "4")
        hide_other_runs(cluster, 2)
        assert found[code] == {address}


def test_closed_ports_between_hosts_are_found(cluster: Simulated, usual: dict[str, set[str]]) -> None:
    # A route that leads nowhere for everything but the master: no packet filter is needed for it.
    cluster.on(2, f"ip route add blackhole {cluster.hosts[2].name}/32")
    found = new(examine(cluster), usual)
    cluster.on(2, f"ip route delete blackhole {cluster.hosts[2].name}/32")
    assert found["CPUFT-007"] >= {cluster.hosts[1].name}


def test_a_rank_left_over_is_found_and_fixed(cluster: Simulated, usual: dict[str, set[str]]) -> None:
    script = "exec -a python sh -c 'sleep 300; :' cpuft.rank"
    runs = "grep -lsz '^cpuft.rank$' /proc/[0-9]*/cmdline"
    wait = f"for i in $(seq 100); do {runs} && exit; sleep 0.1; done; exit 1"
    cluster.on(2, f"setsid bash -c {shlex.quote(script)} >/dev/null 2>&1 </dev/null & {wait}")
    assert new(examine(cluster), usual) == {"CPUFT-032": {cluster.hosts[1].name}}
    assert not new(examine(cluster, "--fix"), usual)
    assert "sleep 300; :" not in cluster.on(2, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def test_a_finding_stops_a_launch_with_its_code(cluster: Simulated) -> None:
    cluster.on(2, "mount -t tmpfs -o size=1m tmpfs /var/tmp")
    try:
        done = cluster.cpuft("launch", "--np", "2", "--cluster", cluster.name, "--run-dir", "never")
    finally:
        cluster.on(2, "umount /var/tmp")
    assert done.returncode == 2
    assert f"cpuft: error: CPUFT-023 on {cluster.hosts[1].name}" in done.stderr
    assert not Path(cluster.folder, "never").exists()
