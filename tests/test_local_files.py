"""Steps of plans that change files of this machine, as processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cpuft.plans import local_step


def run(role: str, *arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
    step = local_step("why", role, *map(str, arguments), stdin=text)
    return subprocess.run(step.command, input=step.stdin, capture_output=True, text=True, timeout=20, check=False)


def test_a_file_is_replaced_and_not_written_through_a_link(tmp_path: Path) -> None:
    path, other = tmp_path / "new/file", tmp_path / "other"
    other.write_text("old")
    assert run("write", path, text="one\n").returncode == 0
    path.with_name("file.new").symlink_to(other)
    assert run("write", path, text="zwei ü\n").returncode == 0
    assert (path.read_text(), other.read_text(), path.parent.stat().st_mode & 0o022) == ("zwei ü\n", "old", 0)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_only_a_resumed_run_may_have_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs/a"
    assert run("claim", folder, folder / "state.json", "", text="{}").returncode == 0
    again = run("claim", folder, folder / "state.json", "", text="[]")
    assert (again.returncode, "File exists" in again.stderr, "Traceback" in again.stderr) == (1, True, False)
    assert run("claim", folder, folder / "state.json", "1", text="[1]").returncode == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"state.json": "[1]"}


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_moved_file_replaces_a_file_but_no_folder(tmp_path: Path, is_folder: bool) -> None:
    (tmp_path / "from").write_text("new")
    (tmp_path / "there").mkdir()
    target = tmp_path / "there/to"
    target.mkdir() if is_folder else target.write_text("old")
    assert run("move", tmp_path / "from", target).returncode == int(is_folder)
    assert [one.name for one in target.parent.iterdir()] == ["to"]
    assert (tmp_path / "from").exists() == is_folder
    assert is_folder or target.read_text() == "new"


def test_a_key_replaces_a_half_written_one(tmp_path: Path) -> None:
    path = tmp_path / "keys/id"
    path.parent.mkdir()
    path.write_text("half")
    assert run("make_key", path, "cpuft-lab").returncode == 0
    assert path.with_name("id.pub").read_text().endswith(" cpuft-lab\n")
    assert (path.stat().st_mode & 0o777, "PRIVATE KEY" in path.read_text()) == (0o600, True)


def test_a_cluster_goes_with_its_hostfile_and_empty_folders(tmp_path: Path) -> None:
    lab, hostfile = tmp_path / "state/cpuft/clusters/lab", tmp_path / "hostfiles/lab"
    (lab / "nodes").mkdir(parents=True)
    (lab / "nodes/key").touch()
    hostfile.parent.mkdir()
    hostfile.touch()
    assert run("remove_cluster", lab, hostfile).returncode == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["state"]
    assert run("remove_cluster", lab, hostfile).returncode == 0


def test_a_directory_that_holds_a_home_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "lab/home"))
    (tmp_path / "lab/home").mkdir(parents=True)
    done = run("remove_cluster", tmp_path / "lab")
    assert (done.returncode, "it stays" in done.stderr, (tmp_path / "lab/home").exists()) == (1, True, True)
