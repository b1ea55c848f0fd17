"""What is remembered of clusters, and where it is looked for."""

import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpuft.cli import main
from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.registry import (
    FILE_NAME,
    Entry,
    find_by_hostfile,
    find_by_name,
    format_entry,
    list_names,
    make_state_root,
    read_entry,
    read_entry_if_exists,
    search_roots,
    state_root,
)
from cpuft.provision.cluster_files import plan_file
from tests.provision.simulated import needs_root

NO_NAMES = ("", ".", "..", "/", "a/b", "../../v", "/etc", "V", "0", "a-b", "a_b", "a b", "v\n", "-v", "ä", "a" * 300)
ENTRY = Entry("lab", "hosts", "/h/hostfiles/lab", "", "/opt/python", {"A": 'a"=0"'}, {"nodes": "2"}, "/t")


def remember(root: Path, entry: Entry, name: str = "lab") -> None:
    write_text(root / name / "cluster.json", format_entry(entry))


def test_an_entry_is_read_back(tmp_path: Path) -> None:
    entry = replace(ENTRY, ssh_config=f"{tmp_path}/lab/ssh_config")
    remember(tmp_path, entry)
    assert read_entry(tmp_path, "lab") == read_entry_if_exists(tmp_path, "lab") == entry
    remember(tmp_path, ENTRY, "Not a name")
    assert list_names(tmp_path) == ["lab"]
    assert read_entry_if_exists(tmp_path, "other") is None


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_is_refused_before_any_path_is_made_of_it(tmp_path: Path, name: str) -> None:
    remember(tmp_path, ENTRY, "v")
    for look in (
        partial(read_entry, tmp_path),
        partial(read_entry_if_exists, tmp_path),
        partial(find_by_name, (tmp_path,)),
    ):
        with pytest.raises(
            CpuftError, match=r"is not a valid cluster name: use small letters and digits, a letter first$"
        ):
            look(name)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"options": {"name": "../../home"}},
        {"kind": "of another kind"},
        {"hostfile": "/etc/passwd"},
        {"hostfile": "/h/hostfiles/other"},
        {"hostfile": "hostfiles/lab"},
        {"hostfile": "/h/../hostfiles/lab"},
        {"hostfile": ""},
        {"ssh_config": "/home/me/.ssh/config"},
        {"kind": "inside"},
        {"python": "/opt/python\n"},
        {"options": {"user": "root\n  ProxyCommand touch /tmp/x"}},
        {"settings": {"A\n": "0"}},
    ],
)
def test_an_entry_that_names_what_is_not_the_clusters_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    remember(tmp_path, replace(ENTRY, **change))
    for look in (read_entry, read_entry_if_exists):
        with pytest.raises(CpuftError, match=r"is damaged .*: provision lab again$"):
            look(tmp_path, "lab")


def test_a_host_s_own_entry_keeps_its_hostfile_beside_it(tmp_path: Path) -> None:
    entry = replace(ENTRY, kind="inside", hostfile=f"{tmp_path}/lab/hostfile")
    remember(tmp_path, entry)
    assert read_entry(tmp_path, "lab") == entry


def test_a_registry_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    assert state_root({"CPUFT_STATE": str(tmp_path)}) == tmp_path
    tmp_path.chmod(0o777)
    with pytest.raises(CpuftError, match=r"^others may write to .*: .* set CPUFT_STATE to a folder of your own$"):
        state_root({"CPUFT_STATE": str(tmp_path)})


@needs_root
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("place", ["lab/cluster.json", "lab/ssh_config", "lab", "", ".."])
def test_an_entry_that_others_may_write_to_is_refused(tmp_path: Path, place: str, mode: int) -> None:
    root = tmp_path / "cpuft" / "clusters"
    make_state_root(root)
    remember(root, ENTRY)
    write_text(root / "lab" / "ssh_config", "Host *\n")
    assert read_entry(root, "lab") == ENTRY
    (root / place).chmod(mode)
    if mode == 0o1777 and (root / place).is_dir():
        # As in /tmp, others can only add names there: what lies below belongs to this user.
        assert read_entry(root, "lab") == ENTRY
        return
    with pytest.raises(CpuftError, match=rf"^others may write to .* \(its mode is {mode:o}\), and so decide"):
        read_entry(state_root({"CPUFT_STATE": str(root)}), "lab")


@needs_root
@pytest.mark.parametrize("place", ["lab/cluster.json", "lab/ssh_config", "lab", "", ".."])
def test_an_entry_of_another_user_is_refused(tmp_path: Path, place: str) -> None:
    root = tmp_path / "cpuft" / "clusters"
    remember(root, ENTRY)
    write_text(root / "lab" / "ssh_config", "Host *\n")
    os.chown(root / place, 65534, 65534)
    with pytest.raises(CpuftError, match=r"^others may write to .* \(its owner is user 65534\), and so decide"):
        read_entry(root, "lab")


@needs_root
def test_a_link_of_another_user_does_not_lead_to_the_registry(tmp_path: Path) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    remember(own, ENTRY)
    theirs.symlink_to(own)
    os.chown(theirs, 65534, 65534, follow_symlinks=False)
    with pytest.raises(CpuftError, match=r"^others may write to .*/theirs \(its owner is user 65534\)"):
        state_root({"CPUFT_STATE": str(theirs)})


@needs_root
def test_nothing_is_made_of_a_cluster_in_a_folder_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remember(tmp_path / "state", ENTRY)
    os.chown(tmp_path / "state" / "lab", 65534, 65534)
    for words in (["hosts", "--hosts", "a", "--name", "lab"], ["status", "lab"], ["down", "lab"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CPUFT_STATE", str(tmp_path / "state"))
            with pytest.raises(SystemExit):
                main(["provision", *words])
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert "cpuft: error: others may write to" in said.err


def test_what_is_made_is_trusted_under_a_umask_of_groups(tmp_path: Path) -> None:
    root = tmp_path / "a" / "state"
    step = plan_file(f"{root}/lab/{FILE_NAME}", format_entry(ENTRY), "register the cluster")
    before = os.umask(0o002)
    try:
        make_state_root(root)
        subprocess.run(step.command, input=step.stdin, text=True, check=True, timeout=20)
    finally:
        os.umask(before)
    assert read_entry(root, "lab") == ENTRY


@needs_root
def test_a_registry_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(CpuftError, match=r"^others may write to"):
        state_root({"CPUFT_STATE": str(tmp_path)})


def test_an_unknown_name_is_answered_with_those_like_it(tmp_path: Path) -> None:
    with pytest.raises(
        CpuftError, match=r"there is no cluster named 'lob' \(no cluster exists yet\): make one with cpuft provision"
    ):
        read_entry(tmp_path, "lob")
    remember(tmp_path, ENTRY)
    with pytest.raises(
        CpuftError, match=r"there is no cluster named 'lob' \(the clusters that exist are lab\): .*--hostfile"
    ):
        find_by_name((tmp_path / "none", tmp_path), "lob")


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
    assert find_by_name(roots, "lab") == ENTRY
    assert find_by_hostfile(roots, "/h/hostfiles/lab") == ENTRY
    assert find_by_hostfile(roots, "/h/hostfiles/other") is None
