"""Control groups of a host, v1 and v2: which are used, and what node.sh writes into them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.provision.local.facts import _read_quota, find_groups
from cpuft.provision.local.planning import SCRIPT
from tests.provision.simulated import needs_root

V2 = {"cpu.max": "max 100000\n", "cgroup.freeze": "0\n"}
V1 = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n", "freezer.state": "THAWED\n"}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def run_node(verb: str, group: Path, folder: Path, quota: str = "") -> None:
    """One call of node.sh for a host that has a control group and nothing else."""
    settings = {"NODE": "a", "NODE_DIR": str(folder), "NODE_LINK": "no-such-link", "NODE_CGROUPS": str(group)}
    environ = dict(os.environ) | settings | {"NODE_QUOTA": quota, "NODE_RATE": ""}
    subprocess.run(["sh", SCRIPT, verb], env=environ, check=True, capture_output=True, timeout=30)


@pytest.mark.parametrize(
    "files, groups",
    [
        ({"cgroup.controllers": "cpuset cpu io memory\n", "cgroup.procs": ""}, [""]),
        ({"cpu/cgroup.procs": "", "freezer/cgroup.procs": ""}, ["/cpu", "/freezer"]),
        ({"unified/cgroup.controllers": "hugetlb\n", "cpu/cgroup.procs": ""}, ["/cpu"]),
        ({"cgroup.controllers": "memory\n", "cpu/other": ""}, []),
        ({}, []),
    ],
    ids=["v2", "v1", "hybrid", "no cpu", "none"],
)
def test_which_groups_are_used(tmp_path: Path, files: dict[str, str], groups: list[str]) -> None:
    for name, text in files.items():
        write_files((tmp_path / name).parent, {Path(name).name: text})
    assert find_groups(str(tmp_path)) == tuple(f"{tmp_path}{group}" for group in groups)


@pytest.mark.parametrize(
    "files, name, limited, free",
    [(V2, "cpu.max", "5000 10000\n", "max 100000\n"), (V1, "cpu.cfs_quota_us", "5000\n", "-1\n")],
    ids=["v2", "v1"],
)
def test_a_limit_is_written_and_read_back(
    tmp_path: Path, files: dict[str, str], name: str, limited: str, free: str
) -> None:
    group = write_files(tmp_path / "group", files)
    run_node("limit", group, tmp_path, "5000 10000")
    assert (group / name).read_text() == limited
    assert _read_quota([str(group)]) == "5000 10000"
    run_node("limit", group, tmp_path)
    assert (group / name).read_text() == free
    assert _read_quota([str(group)]) == ""


@pytest.mark.parametrize(
    "files, name, frozen, free",
    [(V2, "cgroup.freeze", "1\n", "0\n"), (V1, "freezer.state", "FROZEN\n", "THAWED\n")],
    ids=["v2", "v1"],
)
def test_a_pause_is_written(tmp_path: Path, files: dict[str, str], name: str, frozen: str, free: str) -> None:
    group = write_files(tmp_path / "group", files)
    run_node("pause", group, tmp_path)
    assert (group / name).read_text() == frozen
    run_node("resume", group, tmp_path)
    assert (group / name).read_text() == free


def find_v2() -> str:
    """Where this machine has a v2 hierarchy; it freezes whatever controllers v1 holds."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return next((words[1] for words in mounts if words[2] == "cgroup2" and os.access(words[1], os.W_OK)), "")


@pytest.fixture
def group() -> Iterator[Path]:
    path = Path(find_v2(), f"cpuft-t{os.getpid() % 1_000_000}")
    path.mkdir()
    yield path
    if path.exists():
        path.rmdir()


@needs_root
@pytest.mark.skipif(not find_v2(), reason="no cgroup v2 hierarchy is mounted here")
def test_a_real_v2_group_is_frozen_thawed_and_emptied(tmp_path: Path, group: Path) -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        run_node("pause", group, tmp_path)
        wait_for(group, "frozen 1")
        run_node("resume", group, tmp_path)
        wait_for(group, "frozen 0")
        run_node("pause", group, tmp_path)
        run_node("down", group, tmp_path)
        assert process.wait(5) == -9
    assert not group.exists()


def wait_for(group: Path, line: str) -> None:
    end = time.monotonic() + 5
    while line not in (group / "cgroup.events").read_text().splitlines():
        assert time.monotonic() < end
        time.sleep(0.01)
