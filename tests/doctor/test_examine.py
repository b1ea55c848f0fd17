"""Examining hosts before a launch."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.doctor import examine
from cpuft.doctor.checks import ClusterState, HostState, find_all
from cpuft.doctor.examine import choose_peers, examine_hosts, run_fixes
from cpuft.doctor.finding import Finding
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.cluster import Access, gather_cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.rank_counts import Assignment
from cpuft.hosts.transport import SshTransport
from tests.conftest import run_shell
from tests.doctor.planted import healthy, plant
from tests.provision.simulated import needs_root


def check(monkeypatch: pytest.MonkeyPatch, hosts: int, **health: Any) -> list[str]:
    """Return the warnings before a launch on that many hosts, of which the first has this health."""
    state = plant(healthy(), 1, **health)
    state = replace(state, hosts=state.hosts[:hosts])
    monkeypatch.setattr(examine, "examine_hosts", lambda *_, **known: state)
    cluster = replace(gather_cluster(LaunchConfig(np=1)), assignments=tuple(Assignment(h.host, 1) for h in state.hosts))
    said: list[str] = []
    examine.check_before_launch(cluster, said.append)
    return said


def test_a_fix_that_cannot_be_run_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: SshTransport, host: Host, argv: Sequence[str]) -> Answer:
        if host.name == "b":
            raise CpuftError("b does not answer")
        return Answer(int(host.name == "c"), "")

    monkeypatch.setattr(SshTransport, "run", run)
    state = ClusterState(tuple(HostState(Host(name)) for name in "abc"))
    findings = [Finding(name, "", fix=("true",), code="CPUFT-028") for name in "abc"] + [Finding("a", "")]
    results = ("a: fixed", "b: the fix failed (b does not answer)", "c: the fix failed ()")
    assert run_fixes(findings, state, Access(SshTransport())) == [f"CPUFT-028 on {one}" for one in results]


def test_a_single_busy_host_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = check(monkeypatch, 1, load=7.5)
    assert line == "CPUFT-026 on node1: 7.5 of 8 cores are busy before the run starts. (details: cpuft doctor)"


def test_pages_of_another_size_are_told_on_a_single_host(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = check(monkeypatch, 1, page_size=65536)
    assert line == "CPUFT-040 on node1: A page of memory has 64 KB. (details: cpuft doctor)"


def test_a_full_disk_stops_a_run_on_several_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line[:9] for line in check(monkeypatch, 1, disk_free=0)] == ["CPUFT-023"]
    with pytest.raises(CpuftError, match="CPUFT-023"):
        check(monkeypatch, 2, disk_free=0)


@pytest.mark.parametrize("code, health", [("CPUFT-022", {"shm_free": 1 << 20}), ("CPUFT-034", {"open_files": 64})])
@pytest.mark.parametrize("hosts", [1, 2])
def test_problems_that_kill_ranks_stop_a_run_on_one_host_too(
    monkeypatch: pytest.MonkeyPatch, hosts: int, code: str, health: dict[str, int]
) -> None:
    with pytest.raises(CpuftError, match=rf"^{code} on node1: .*to launch nevertheless: --no-check\)$"):
        check(monkeypatch, hosts, **health)


SMALL = "mount -t tmpfs -o size=1m tmpfs /dev/shm"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("verb", ["launch", "bench comm"])
@pytest.mark.parametrize(
    "limit, said",
    [
        (
            "ulimit -n 64",
            "CPUFT-034 on localhost.*: A process may open 64 files; with 2 ranks, each rank needs 332. Raise the lim",
        ),
        pytest.param(
            SMALL, "CPUFT-022 on localhost.*: 1 MB are free in /dev/shm; the ranks of one host", marks=needs_root
        ),
    ],
)
def test_a_limit_that_is_too_low_is_reported_before_ranks_start(limit: str, said: str, verb: str) -> None:
    start = time.monotonic()
    done = run_shell(f"{limit} && cpuft {verb} --np 2 --run-dir run")
    assert done.returncode == 2
    assert re.fullmatch(f"cpuft: error: {said}.*", done.stderr.splitlines()[-1]), done.stderr
    assert not Path("run").exists()
    assert time.monotonic() - start < 30


def test_a_single_host_gets_no_warnings_about_permanent_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, 1, huge_pages="always madvise [never]") == []


def test_the_connections_that_the_check_tries_do_not_grow_with_the_square_of_the_hosts() -> None:
    """Up to 16 hosts, all pairs are tried. Beyond, a host that is cut off is still seen by several others."""
    for count in (1, 2, 3, 16, 17, 64, 99, 1000):
        hosts = [f"10.0.{number // 250}.{number % 250}" for number in range(count)]
        peers = {host: choose_peers(hosts, host, False) for host in hosts}
        for host, others in peers.items():
            assert host not in others
            assert sorted(set(others)) == sorted(others)
            assert all(host in peers[other] for other in others)
        most = count - 1 if count <= 16 else 2 * (count - 1).bit_length()
        assert {len(others) for others in peers.values()} <= {most, most - 1, most - 2}
        assert count < 17 or min(map(len, peers.values())) >= (count - 1).bit_length()
    assert choose_peers(hosts, hosts[3], True) == [host for host in hosts if host != hosts[3]]
    assert choose_peers(hosts, "", False) == []


class OtherTransport(SshTransport):
    """A transport to this machine that treats it as another machine."""

    def is_here(self, host: Host) -> bool:
        return False

    def address(self, host: Host) -> str:
        return "127.0.0.1"

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=seconds)
        return Answer(done.returncode, done.stdout, done.stderr)


class ManyTransport(OtherTransport):
    """Hosts with an address each, on which nothing runs; `limits` gets the time limit of each probe."""

    limits: ClassVar[dict[str, float]] = {}

    def address(self, host: Host) -> str:
        return f"10.0.0.{host.name.removeprefix('n')}"

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        if stdin:
            self.limits[host.name] = seconds
        return Answer(1, "", "no Python here")


def test_the_head_host_may_log_in_to_many_hosts_that_do_not_answer() -> None:
    """Each round of 16 logins may take 20 s, and must not make the head host look as if it did not answer."""
    hosts = tuple(Host(f"n{number}") for number in range(1, 65))
    state = examine_hosts(hosts, Access(ManyTransport()))
    assert all("no Python here" in one.failure for one in state.hosts)
    limits = dict(ManyTransport.limits)
    assert limits.pop("n1") == pytest.approx(40 + 6.4 + 4 * 20)
    assert list(limits.values()) == [pytest.approx(46.4)] * 63


def test_the_load_of_hosts_on_one_machine_is_not_told() -> None:
    state = plant(healthy(), 2, load=7.5)
    shared = [
        replace(one, facts=replace(one.facts, boot_id="one machine")) if one.facts else one for one in state.hosts
    ]
    assert {finding.code for finding in find_all(state)} == {"CPUFT-026"}
    assert find_all(replace(state, hosts=tuple(shared))) == []
