"""What is remembered of clusters, and where it is looked for."""

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.registry import (
    Entry,
    find_by_hostfile,
    find_entry,
    format_entry,
    list_names,
    read_entry,
    search_roots,
    state_root,
)

ENTRY = Entry("lab", "hosts", "/h/lab", "/s/ssh_config", "/opt/python", {"A": 'a"=0"'}, {"nodes": "2"}, "/t")


def remember(root: Path, entry: Entry) -> None:
    (root / entry.name).mkdir(parents=True)
    (root / entry.name / "cluster.json").write_text(format_entry(entry))


def test_an_entry_is_read_back(tmp_path: Path) -> None:
    remember(tmp_path, ENTRY)
    assert read_entry(tmp_path, "lab") == ENTRY
    assert list_names(tmp_path) == ["lab"]


def test_an_unknown_name_is_answered_with_those_like_it(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="there is no cluster 'lob': make one with cpuft provision"):
        read_entry(tmp_path, "lob")
    remember(tmp_path, ENTRY)
    with pytest.raises(CpuftError, match=r"there is no cluster 'lob'.*lab"):
        find_entry((tmp_path / "none", tmp_path), "lob")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "lab"}', '{"unknown": 1}'])
def test_a_damaged_entry_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "cluster.json").write_text(text)
    with pytest.raises(CpuftError, match=r"is damaged .*: provision lab again"):
        read_entry(tmp_path, "lab")


@pytest.mark.parametrize(
    "environ, root",
    [
        ({"HOME": "/home/a"}, "/home/a/.local/state/cpuft/clusters"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "/s"}, "/s/cpuft/clusters"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "/s", "CPUFT_STATE": "/c"}, "/c"),
    ],
)
def test_where_clusters_are_remembered(environ: dict[str, str], root: str) -> None:
    assert state_root(environ) == Path(root)


def test_white_space_cannot_be_carried() -> None:
    with pytest.raises(CpuftError, match="white space"):
        state_root({"CPUFT_STATE": "/a 0"})


def test_a_host_finds_the_cluster_that_its_environment_belongs_to(tmp_path: Path) -> None:
    environ = {"CPUFT_STATE": str(tmp_path / "state")}
    assert search_roots(environ, "/home/a/.venv") == (tmp_path / "state",)
    roots = search_roots(environ, str(tmp_path / "opt" / "env"))
    remember(roots[1], ENTRY)
    assert find_entry(roots, "lab") == ENTRY
    assert find_by_hostfile(roots, "/h/lab") == ENTRY
    assert find_by_hostfile(roots, "/h/other") is None
