"""What a user is told before a launch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.config import LaunchConfig
from cpuft.doctor import before
from cpuft.doctor.probe import watch_cpu
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Assignment, gather_cluster
from tests.conftest import run_shell
from tests.doctor.planted import healthy, plant
from tests.provision.simulated import needs_root


def check(monkeypatch: pytest.MonkeyPatch, hosts: int, **health: Any) -> list[str]:
    """What is said before a launch on that many hosts, when the first has this health."""
    state = plant(healthy(), 1, **health)
    state = replace(state, hosts=state.hosts[:hosts])
    monkeypatch.setattr(before, "examine_hosts", lambda *_: state)
    cluster = replace(gather_cluster(LaunchConfig(np=1)), assignments=tuple(Assignment(h.host, 1) for h in state.hosts))
    said: list[str] = []
    before.check_before_launch(cluster, said.append)
    return said


def test_a_busy_host_is_pointed_out_even_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = check(monkeypatch, 1, load=7.5)
    assert line == "CPUFT-026 on node1: 7.5 of 8 cores are at work before the run has started (cpuft doctor tells more)"


def test_one_host_may_run_where_several_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line[:9] for line in check(monkeypatch, 1, disk_free=0)] == ["CPUFT-023"]
    with pytest.raises(CpuftError, match="CPUFT-023"):
        check(monkeypatch, 2, disk_free=0)


@pytest.mark.parametrize("code, health", [("CPUFT-022", {"shm_free": 1 << 20}), ("CPUFT-034", {"open_files": 64})])
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_no_run_survives_stops_it_on_one_host_too(
    monkeypatch: pytest.MonkeyPatch, hosts: int, code: str, health: dict[str, int]
) -> None:
    with pytest.raises(CpuftError, match=rf"^{code} on node1: .*--no-check launches all the same\)$"):
        check(monkeypatch, hosts, **health)


SMALL = "mount -t tmpfs -o size=1m tmpfs /dev/shm"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("verb", ["launch", "bench comm"])
@pytest.mark.parametrize(
    "limit, said",
    [
        (
            "ulimit -n 64",
            "CPUFT-034 on localhost.*: a process may open 64 files, a rank of 2 needs 332: allow more: uli",
        ),
        pytest.param(SMALL, "CPUFT-022 on localhost.*: 1 MB are free in /dev/shm, ranks of one host", marks=needs_root),
    ],
)
def test_a_limit_is_named_before_ranks_start(limit: str, said: str, verb: str) -> None:
    start = time.monotonic()
    done = run_shell(f"{limit} && cpuft {verb} --np 2 --run-dir run")
    assert done.returncode == 2
    assert re.fullmatch(f"cpuft: error: {said}.*", done.stderr.splitlines()[-1]), done.stderr
    assert not Path("run").exists()
    assert time.monotonic() - start < 30


def test_what_one_host_always_is_it_need_not_hear_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, 1, huge_pages="always madvise [never]") == []


def test_cores_at_work_are_seen_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            working, stolen = watch_cpu()
        finally:
            spinning.kill()
    assert working > 0.5
    assert 0 <= stolen <= 1
