"""Which active runs are found, and which messages other folders get."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.rank_counts import Assignment
from cpuft.launch.run_locks import find_active_run, lock_run, register_run
from tests.conftest import run_cpuft

HERE, NOWHERE = Host("localhost"), Host("127.0.0.9", port=9)
CLUSTER = Cluster((Assignment(HERE, 2), Assignment(NOWHERE, 1)), (), MpiImplementation("mpirun", "intel"))


def note_of(cache: Path) -> Path:
    (path,) = (cache / "cpuft" / "going").iterdir()
    return path


@pytest.mark.usefixtures("own_cache")
def test_an_active_run_is_found_until_it_ends() -> None:
    with register_run(f"{Path.cwd()}/run", CLUSTER):
        place = find_active_run("run", os.environ)
        assert place.work == f"{Path.cwd()}/run"
        assert place.hosts == (HERE, HERE, NOWHERE)
        Path("link").symlink_to(".")
        assert find_active_run("link/run/../run", os.environ) == place
    with pytest.raises(CpuftError, match="there is no folder"):
        find_active_run("run", os.environ)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("changes", [{}, {"work": 1}])
@pytest.mark.parametrize("words", ["there is no folder", "no run is active in the folder run: the run has ended"])
def test_a_note_of_an_ended_run_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    if "active" in words:
        (tmp_path / "run").mkdir()
    with register_run(f"{tmp_path}/run", CLUSTER):
        path = note_of(tmp_path)
        text = json.dumps(json.loads(path.read_text()) | changes)
    path.write_text(text + " " * 9)
    with pytest.raises(CpuftError, match=words):
        find_active_run("run", os.environ)
    with register_run(f"{tmp_path}/run", CLUSTER):
        assert find_active_run("run", os.environ).hosts == (HERE, HERE, NOWHERE)


@pytest.mark.usefixtures("own_cache")
def test_machines_that_share_a_cache_may_have_runs_of_the_same_path() -> None:
    other = replace(CLUSTER, assignments=CLUSTER.assignments[:1])
    with register_run(f"{Path.cwd()}/run", CLUSTER):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "elsewhere")
            with register_run(f"{Path.cwd()}/run", other):
                assert find_active_run("run", os.environ).hosts == (HERE, HERE)
        assert find_active_run("run", os.environ).hosts == (HERE, HERE, NOWHERE)


def test_a_run_without_a_cache_folder_is_not_registered(tmp_path: Path) -> None:
    with register_run(f"{tmp_path}/run", CLUSTER, {"XDG_CACHE_HOME": "/dev/null/none"}):
        assert list(tmp_path.iterdir()) == []


def test_ranks_on_other_hosts_are_shown_if_one_host_does_not_answer(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    with register_run(f"{tmp_path}/run", CLUSTER, cache):
        done = run_cpuft("stacks", "run", settings=cache)
    assert done.returncode == 2
    assert done.stderr.startswith("cpuft: error: host 127.0.0.9 cannot be used over ssh")
    assert done.stderr.count("\n") == 1
    states = [line.partition("localhost")[2].strip() for line in done.stdout.splitlines() if "localhost  " in line]
    assert states == ["no such process"] * 2
    assert "rank 2 on 127.0.0.9: its host does not answer" in done.stdout
    assert Path("run/logs/rank-2.stack").read_text().splitlines()[1] == "state: its host does not answer"


def test_the_second_of_two_launches_in_one_folder_is_refused(tmp_path: Path) -> None:
    """Otherwise both would continue the run in the same record, logs and checkpoints."""
    environ = {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    (tmp_path / "link").symlink_to(tmp_path)
    said = "another cpuft launch is working in the run folder link/run"
    with lock_run("run", environ), pytest.raises(CpuftError, match=said), lock_run("link/run", environ):
        pass
    with lock_run("run", environ), lock_run("other", environ):
        pass
    assert list((tmp_path / "cache" / "cpuft" / "going").iterdir()) == []


@pytest.mark.parametrize("words", [("--resume", "run"), ("--run-dir", "run")])
def test_a_launch_in_a_folder_that_another_launch_uses_ends_at_once(words: tuple[str, str], tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    with lock_run("run", environ):
        done = run_cpuft("launch", *words, settings=environ)
        assert done.returncode == 2
        folder = "run" if words[0] == "--resume" else Path.cwd() / "run"
        said = f"cpuft: error: another cpuft launch is working in the run folder {folder}: wait until it has ended, "
        assert done.stderr.splitlines()[-1] == f"{said}or stop it, and try again"
    assert not Path("run").exists()


def test_without_a_cache_folder_nothing_is_locked() -> None:
    for _ in range(2):
        with lock_run("run", {"XDG_CACHE_HOME": "/dev/null/none"}):
            pass
