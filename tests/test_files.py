"""Folders that are one user's alone, and trees that are taken away."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.files import (
    PRIVATE,
    cache_folder,
    cache_path,
    make_private_folder,
    remove_command,
    write_atomically,
    write_folder_atomically,
    write_text,
)
from tests.provision.simulated import needs_root

NOBODY = 65534
PLANTED = {
    "a link": 'mkdir "$1.other" && ln -s "$1.other" "$1"',
    "a link to nowhere": 'ln -s nowhere "$1"',
    "a file": ': >"$1"',
    "open to others": 'mkdir "$1" && chmod 777 "$1"',
    "open to the group": 'mkdir "$1" && chmod 770 "$1"',
    "another user's": f'mkdir -m 700 "$1" && chown {NOBODY} "$1"',
}


def run(command: tuple[str, ...], **settings: str) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ) | settings
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env=environ)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def private(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(("sh", "-c", f'{PRIVATE}umask 0; private "$1"', "private", str(folder)))


def test_a_folder_is_made_for_one_user(tmp_path: Path) -> None:
    for attempt in ("made", "found"):
        assert private(tmp_path / "shell").returncode == 0, attempt
        assert make_private_folder(tmp_path / "a" / "python", "") == tmp_path / "a" / "python", attempt
    assert mode_of(tmp_path / "shell") == mode_of(tmp_path / "a" / "python") == mode_of(tmp_path / "a") == 0o700


def test_a_user_without_a_name_and_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/")
    assert cache_path({}) == Path(f"/var/tmp/cpuft-cache-{os.geteuid()}")


def test_a_cache_of_ours_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "cpuft").mkdir(mode=0o755)
    assert mode_of(cache_folder({"XDG_CACHE_HOME": str(tmp_path), "HOME": "/nowhere"})) == 0o700


@needs_root
@pytest.mark.parametrize("what", PLANTED)
def test_what_another_could_have_made_is_no_folder_of_ours(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cpuft"
    subprocess.run(("sh", "-c", PLANTED[what], "plant", str(folder)), check=True)
    done = private(folder)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"{folder} is no folder of mode 700 of user root (")
    assert line.endswith("): see what it is, remove it")
    with pytest.raises(CpuftError, match=rf"^folder {folder} .*, or set XDG_CACHE_HOME to a folder of your own$"):
        cache_folder({"XDG_CACHE_HOME": str(tmp_path)})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = private(tmp_path / "none" / "cpuft")
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
    for folder in (tmp_path / "file" / "cpuft", tmp_path / ("a" * 300)):
        with pytest.raises(CpuftError, match=r"cannot be made \(.*\): do so$"):
            make_private_folder(folder, "do so")


@pytest.fixture
def commons() -> Iterator[Path]:
    """A folder that all users may write to, as /var/tmp is."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@needs_root
def test_users_side_by_side_have_folders_of_their_own(commons: Path) -> None:
    script = f'{PRIVATE}private "$1/$(id -u)" && private "$1/0"'
    words = ("setpriv", f"--reuid={NOBODY}", "--clear-groups", "sh", "-c", script, "private", str(commons))
    assert private(commons / "0").returncode == 0
    done = run(words)
    assert (done.returncode, str(commons / "0") in done.stderr) == (1, True)
    assert {path.name: path.lstat().st_uid for path in commons.iterdir()} == {"0": 0, str(NOBODY): NOBODY}


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """A folder `root` with a tree that may go, and one beside it that may not."""
    for name in ("root/tree/below", "root/home/me", "beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "root/link").symlink_to(tmp_path / "beside")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    return tmp_path


@pytest.mark.parametrize("root, path", [("root", "root/tree"), ("link", "link/tree"), ("root", "root/./tree")])
def test_a_tree_below_the_root_goes(trees: Path, root: str, path: str) -> None:
    done = run(remove_command(f"{trees}/{root}", f"{trees}/{path}", f"{trees}/{path}/not-there"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not (trees / "root/tree").exists()


def test_a_path_that_could_not_be_removed_is_a_failure_though_a_later_one_was(trees: Path) -> None:
    rm = trees / "bin/rm"
    rm.parent.mkdir()
    rm.write_text('#!/bin/sh\ncase "$*" in *tree) exit 1 ;; esac\nexec /bin/rm "$@"\n')
    rm.chmod(0o755)
    (trees / "root/later").mkdir()
    words = remove_command(f"{trees}/root", f"{trees}/root/tree", f"{trees}/root/later")
    assert run(words, PATH=f"{rm.parent}:{os.environ['PATH']}").returncode == 1
    assert not (trees / "root/later").exists()


@pytest.mark.parametrize(
    "root, path",
    [
        ("root", "beside"),
        ("root", "root"),
        ("root", "root/"),
        ("root", "root/../beside"),
        ("root", "root/tree/../../beside"),
        ("root", "root/link"),
        ("root", "root/link/file"),
        ("root", "root/home"),
        ("root", "root/home/me"),
        ("none", "beside"),
        ("root/tree", "root/home"),
    ],
)
def test_all_else_stays(trees: Path, root: str, path: str) -> None:
    before = sorted(trees.rglob("*"))
    done = run(remove_command(f"{trees}/{root}", f"{trees}/{path}"), HOME=str(trees / "root/home/me"))
    assert (done.returncode, sorted(trees.rglob("*"))) == (1, before)
    assert "it stays" in done.stderr


@pytest.mark.parametrize("root", ["/", ""])
def test_a_root_that_is_none_takes_nothing(trees: Path, root: str) -> None:
    assert run(remove_command(root, str(trees / "beside"))).returncode == 1
    assert (trees / "beside/file").exists()


@needs_root
def test_another_disk_below_stays(trees: Path) -> None:
    words = remove_command(str(trees / "root"), str(trees / "root/tree"))
    mounted = f'mount -t tmpfs tmpfs {trees}/root/tree/below; : >{trees}/root/tree/below/kept; "$@"'
    done = run(("unshare", "--mount", "sh", "-c", f"{mounted}; ls {trees}/root/tree/below", "sh", *words))
    assert done.stdout == "kept\n", done.stderr


def test_a_link_planted_where_a_file_is_written_first_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "record"
    victim.write_text("mine")
    names = ("record.new", f"record.{os.getpid()}.new")
    for name in names:
        (tmp_path / name).symlink_to(victim)
    write_text(path, "text")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("mine", "text", False)
    with write_atomically(path) as beside:
        assert beside.name not in names
        assert beside.stat().st_size == 0
        beside.write_text("other")
    assert path.read_text() == "other"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["victim", "record", *names])


SPECIAL: dict[str, Callable[[Path], None]] = {
    "named pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/null"),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_never_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    SPECIAL[kind](path)
    with pytest.raises(
        CpuftError, match="x is a folder or no regular file, which cannot be written: give another file"
    ):
        write_text(path, "a")
    assert os.listdir(tmp_path) == ["x"]
    assert not path.is_file()


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x").symlink_to("precious")
    write_text(tmp_path / "x", "a")
    assert ((tmp_path / "x").read_text(), (tmp_path / "precious").read_text()) == ("a", "mine")
    assert not (tmp_path / "x").is_symlink()


def test_a_file_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "a")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "x") == 0o640
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    with write_folder_atomically(tmp_path / "new/one") as beside:
        (beside / "a").write_text("x")
        assert not (tmp_path / "new/one").exists()
    assert (tmp_path / "new/one/a").read_text() == "x"
    with suppress(ValueError), write_folder_atomically(tmp_path / "new/two") as beside:
        (beside / "a").write_text("x")
        raise ValueError
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, message in ((tmp_path / "new/one", "is not empty"), (tmp_path / "link", "is not a folder")):
        with pytest.raises(CpuftError, match=message), write_folder_atomically(path):
            pass
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one"]
