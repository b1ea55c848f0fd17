"""What a user is told before a launch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from cpuft.doctor import before
from cpuft.doctor.probe import watch_cpu
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Assignment, gather_cluster
from cpuft.options.fields import LaunchConfig
from tests.doctor.planted import healthy, plant


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
