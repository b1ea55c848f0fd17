"""Files with a run's key on a host: gone soon, whatever becomes of the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.execute import Answer
from cpuft.hosts import cluster as clusters
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport
from cpuft.launch.inputs import secrets_there
from cpuft.launch.mpirun import KEY
from cpuft.plan import RunPlan
from tests.launch.test_inputs import AWAY


class HereDoor(Transport):
    """Every host is this machine."""

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=seconds)
        return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(clusters, "WORK_ROOT", str(tmp_path))
    assignments = AWAY.assignments[:1]
    return replace(AWAY, assignments=assignments, access=replace(AWAY.access, transport=HereDoor()), uid=os.geteuid())


@contextmanager
def sent(cluster: Cluster) -> Iterator[Path]:
    """What was sent, while a launch goes on."""
    with secrets_there(RunPlan(), cluster, "/work", {}):
        yield Path(cluster.sent_file("/work", 0) + "-0")


def wait_until_gone(path: Path, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return not path.exists()


def age(path: Path, minutes: float) -> None:
    os.utime(path, (time.time() - minutes * 60,) * 2)


def test_what_is_sent_is_there_for_the_run_and_nothing_is_left_after_it(cluster: Cluster) -> None:
    with sent(cluster) as path:
        assert len(json.loads(path.read_text())[KEY]) == 64
        assert path.stat().st_mode & 0o777 == 0o600
        pid = int((path.parent / ".watch").read_text())
        assert Path(f"/proc/{pid}").exists()
    assert list(Path(cluster.folder).iterdir()) == []
    assert wait_until_gone(Path(f"/proc/{pid}"))


def test_the_host_removes_what_nobody_took_in_ten_minutes(cluster: Cluster) -> None:
    with sent(cluster) as path:
        age(path, 9)
        time.sleep(2.5)
        assert path.exists()
        age(path, 11)
        assert wait_until_gone(path.parent)


def test_a_launcher_that_is_there_keeps_what_ranks_will_take(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may take longer than ten minutes to prepare, and ranks come after that."""
    monkeypatch.setattr(secrets, "_REFRESH_SECONDS", 0.1)
    with sent(cluster) as path:
        age(path, 9)
        end = time.monotonic() + 10
        while path.stat().st_mtime < time.time() - 60 and time.monotonic() < end:
            time.sleep(0.05)
        assert path.stat().st_mtime > time.time() - 60


def test_the_next_launch_removes_what_a_lost_host_still_had(cluster: Cluster) -> None:
    """A host that was off has no process that removes it."""
    folder = Path(cluster.folder)
    for name in ("old", "new"):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{name}.sent").mkdir(mode=0o700)
        (folder / f"{name}.sent" / "0-0").write_text("{}")
    (folder / "inputs").mkdir()
    age(folder / "old.sent" / "0-0", 11)
    with sent(cluster) as path:
        assert sorted(one.name for one in folder.iterdir()) == sorted(["inputs", "new.sent", path.parent.name])
