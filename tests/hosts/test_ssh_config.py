"""Reading ssh's client configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.ssh_config import parse_jumps, read_login


def test_the_hostfile_wins_over_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("Host a\n  Port 2222\n  User u\n  HostName 10.0.0.1\n")
    login = read_login(Host("a", port=22), str(path))
    assert (login.address, login.port, login.user) == ("10.0.0.1", 22, "u")


def test_a_configuration_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "config"
    for user in ("u", "v"):
        path.write_text(f"Host a\n  User {user}\n")
        assert [read_login(Host(name), str(path)).user for name in ("a", "b", "a")] == [user, "", user]


@pytest.mark.parametrize(
    "text, message",
    [
        (b"User\n", "cannot be read (Unparsable line User): correct it"),
        (b"Host \xff\n", "cannot be read ('utf-8' codec can't decode"),
        (b"Port ssh\n", "port 'ssh' of a is not a port number: correct it"),
        (b"Port 99999\n", "port '99999' of a is not a port number: correct it"),
        (b"ProxyJump b:" + b"9" * 5000, "names no host: write [user@]name[:port], separated by commas"),
    ],
)
def test_an_invalid_configuration_is_answered_in_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(text)
    with pytest.raises(CpuftError) as error:
        read_login(Host("a"), str(path))
    assert message in str(error.value)


def test_bastions_are_read() -> None:
    assert parse_jumps("u@a:22, b", "h") == (Host("a", port=22, user="u"), Host("b"))


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ('"FOLDER/my keys/known"', ("FOLDER/my keys/known",)),
        ("/a /b", ("/a", "/b")),
        ('"/a b" "/c d"', ("/a b", "/c d")),
        ('/a "/b c"', ("/a", "/b c")),
        ('"/a b" /c', ("/a b", "/c")),
        ('/a "/b c" /d', ("/a", "/b c", "/d")),
        ('"/a b" /c "/d e"', ("/a b", "/c", "/d e")),
    ],
)
def test_paths_of_known_hosts_may_have_spaces(value: str, paths: tuple[str, ...], tmp_path: Path) -> None:
    known = tmp_path / "my keys" / "known"
    known.parent.mkdir()
    known.touch()
    (tmp_path / "my config").write_text(f"Host a\n  UserKnownHostsFile {value}\n".replace("FOLDER", str(tmp_path)))
    login = read_login(Host("a"), str(tmp_path / "my config"))
    assert login.known_hosts == tuple(path.replace("FOLDER", str(tmp_path)) for path in paths)


def test_included_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative names are below ~/.ssh; files that include themselves end; the block goes on after an Include."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh" / "more" / "folder").mkdir(parents=True)
    (tmp_path / ".ssh" / "config").write_text(
        'Include more/* "~/.ssh/none"\nHost b\n  include=more/1\n  User me\nHost *\n  Port 7\n'
    )
    (tmp_path / ".ssh" / "more" / "1").write_text("Host a\n  HostName 10.0.0.1\n")
    (tmp_path / ".ssh" / "more" / "2").write_text("Host b\n  HostName 10.0.0.2\nInclude more/2\n")
    logins = [read_login(Host(name)) for name in ("a", "b")]
    assert [(one.address, one.port, one.user) for one in logins] == [("10.0.0.1", 7, ""), ("10.0.0.2", 7, "me")]
