"""Only what we made is taken away: names, marks and planted entries, by every verb; in a state folder of the test's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.cli import main
from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.registry import Entry, format_entry
from cpuft.hosts.ssh_config import Member
from cpuft.provision.cluster_files import check_prefix, plan_removal
from cpuft.provision.options import HostsConfig
from cpuft.provision.servers import ClusterFacts, ServerFacts, plan_servers_down
from cpuft.provision.wheels import INSTALL
from tests.provision.simulated import needs_root

VERBS = (
    ("provision", "down"),
    ("provision", "down", "--dry-run"),
    ("provision", "status"),
    ("provision", "diff"),
    ("provision", "local", "kill", "1", "--name"),
    ("provision", "hosts", "--dry-run", "--hosts", "node1", "--name"),
    ("launch", "--dry-run", "--cluster"),
    ("compare", "--dry-run", "--cluster"),
    ("env", "--cluster"),
    ("doctor", "--cluster"),
)
SIMULATED = Entry("v", "local", "/h/hostfiles/v", options={"name": "v", "nodes": "2"})


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A state folder with a folder `v` in it that holds a file of the user's."""
    write_text(tmp_path / "state" / "v" / "file", "mine")
    write_text(tmp_path / "v" / "file", "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUFT_STATE", str(tmp_path / "state"))
        yield tmp_path / "state"


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line by which a command is refused."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize("name", ["PWD/v", "../v", "../../v", ".", "/", "v/", "V", "a" * 300])
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_verb_refuses_what_is_no_name(
    root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], name: str
) -> None:
    before = listing(root.parent)
    line = refused(capsys, *words, name.replace("PWD", os.getcwd()))
    assert line.endswith("is not a valid cluster name: use small letters and digits, a letter first")
    assert listing(root.parent) == before


@needs_root
@pytest.mark.parametrize("words", VERBS[:4], ids=" ".join)
def test_a_folder_that_is_no_cluster_is_not_taken_for_one(
    root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert refused(capsys, *words, "v").endswith(
        "there is no cluster named 'v' (no cluster exists yet): make one with cpuft provision"
    )
    assert (root / "v" / "file").exists()


PLANTED: list[dict[str, Any]] = [
    {"options": {"name": "../../v"}},
    {"hostfile": "HOME/file"},
    {"name": "../v"},
    {"kind": "hosts", "options": {"name": "v", "hosts": "127.0.0.1", "prefix": "/opt/../home"}},
    {"kind": "hosts", "options": {"name": "v", "hosts": "127.0.0.1", "prefix": "/"}},
    {"kind": "hosts", "options": {"name": "v", "hosts": "127.0.0.1", "prefix": "~"}},
    {"kind": "inside", "hostfile": "STATE/v/hostfile"},
    {"kind": 5},
    {"options": {"name": "v", "nodes": 3}},
    {"options": {"name": "v", "unknown": "3"}},
    {"settings": ["A"]},
]


@pytest.mark.parametrize("change", PLANTED, ids=json.dumps)
@pytest.mark.parametrize("words", VERBS[:2], ids=" ".join)
def test_down_does_nothing_by_an_entry_that_was_planted(
    root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], change: dict[str, Any]
) -> None:
    text = json.dumps(json.loads(format_entry(SIMULATED)) | change)
    text = text.replace("STATE", str(root)).replace("HOME", str(root.parent / "v"))
    write_text(root / "v" / "cluster.json", text)
    before = listing(root.parent)
    assert len(refused(capsys, *words, "v")) > 20
    assert listing(root.parent) == before


def test_one_that_asks_for_too_many_hosts_is_not_described(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = replace(SIMULATED, options={"name": "v", "nodes": "5000"})
    write_text(root / "v" / "cluster.json", format_entry(entry))
    assert "give a whole number from 1 to 99" in refused(capsys, "provision", "status", "v")


@needs_root
def test_down_takes_what_is_the_clusters_and_leaves_the_rest(root: Path) -> None:
    words = (sys.executable, "-m", "cpuft", "provision")
    entry = replace(SIMULATED, name="w", hostfile=str(Path("hostfiles/w").absolute()), options={"name": "w"})
    write_text(root / "w" / "cluster.json", format_entry(entry))
    write_text(Path("hostfiles/w"), "# Cluster w, made by cpuft provision.\n10.77.0.1\n")
    write_text(Path("hostfiles/mine"), "node1\n")
    subprocess.run((*words, "down", "w"), check=True, timeout=60)
    assert (listing(root), listing(Path("hostfiles"))) == (["v", "v/file"], ["mine"])


def test_a_folder_of_the_users_does_not_become_a_clusters(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(root.parent)
    line = refused(capsys, "provision", "hosts", "--hosts", "node1", "--name", "v")
    assert line.endswith(f"{root}/v was not made by cpuft provision: move it away, or choose another --name")
    assert listing(root.parent) == before


def test_a_hostfile_of_the_users_is_not_written_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hostfiles").mkdir()
    Path("hostfiles/w").write_bytes(b"node1\n\xff")
    line = refused(capsys, "provision", "hosts", "--hosts", "node1", "--name", "w")
    assert line.endswith("hostfiles/w was not made by cpuft provision: move it away, or choose another --name")
    assert Path("hostfiles/w").read_bytes() == b"node1\n\xff"
    assert listing(root) == ["v", "v/file"]


def test_a_directory_that_is_a_link_stays(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "v")
    (step,) = plan_removal({f"{root}/link/cluster.json": ""}, str(root / "link"), "/h/hostfiles/link")
    done = subprocess.run(step.command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, "it stays" in done.stderr, listing(root.parent / "v")) == (1, True, ["file"])


@pytest.mark.parametrize("prefix", ["", "/", "opt/cpuft", "~/cpuft", "/opt/", "/opt/../home", "/opt/a b", "/opt/$HOME"])
def test_a_prefix_is_a_plain_path(prefix: str) -> None:
    check_prefix("/opt/cpuft-1.0/a_b")
    with pytest.raises(CpuftError, match=r"give a new one, such as /opt/cpuft$"):
        check_prefix(prefix)


def test_an_environment_of_the_users_is_not_taken_for_ours(tmp_path: Path) -> None:
    write_text(tmp_path / "env" / "bin" / "python", "mine")
    words = ("sh", "-c", f"set -eu\n{INSTALL}", "install", str(tmp_path), "stamp")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        1,
        f"{tmp_path}/env is not cpuft's: move it away, or give another prefix\n",
    )
    assert listing(tmp_path) == ["env", "env/bin", "env/bin/python"]


def test_an_environment_is_made_with_nothing_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "venv.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    write_text(tmp_path / "prefix" / "wheels" / "pip-1.whl", "no wheel, so that it ends after the venv")
    words = ("sh", "-c", f"set -eu\n{INSTALL}", "install", str(tmp_path / "prefix"), "stamp")
    subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "prefix" / "env" / "bin" / "python").exists()
    assert not (tmp_path / "ran").exists()


OURS = ("opt/cpuft/env/bin/python", "opt/cpuft/wheels/a.whl", "opt/cpuft/clusters/lab/id_ed25519")
INPUTS = ("tmp/cpuft-inputs/0123/s.py", "tmp/cpuft-0/inputs/0123/s.py")
MINE = ("opt/cpuft/clusters/notes", "tmp/cpuft-1/0123456789ab/run", "tmp/other/inputs/a", "home/notes")


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """What there is on a server: what its cluster put there, and other things."""
    for name in (*OURS, *INPUTS, *MINE):
        write_text(tmp_path / name, "")
    write_text(tmp_path / "home/.ssh/authorized_keys", "ssh-ed25519 A me\nssh-ed25519 B cpuft-lab\n")
    return tmp_path


def take_down(server: Path) -> subprocess.CompletedProcess[str]:
    """The step of `provision down` that runs on a server, with this folder as its root."""
    config = HostsConfig(hosts="a", name="lab", prefix=f"{server}/opt/cpuft")
    entry = Entry("lab", "hosts", "/h/hostfiles/lab", "/state/lab/ssh_config")
    facts = ClusterFacts(((Member("a", "a"), ServerFacts(marked=True)),), {}, entry)
    ((step,),) = plan_servers_down(config, facts).stages
    words = [str(server / "tmp") if word == "/var/tmp" else word for word in step.command]
    environ = dict(os.environ) | {"HOME": str(server / "home")}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ)


def files_of(server: Path) -> set[str]:
    return {str(path.relative_to(server)) for path in server.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mark", ["install.lock", "env/stamp"])
def test_down_takes_from_a_server_what_was_put_there(server: Path, mark: str) -> None:
    write_text(server / "opt/cpuft" / mark, "")
    for _ in range(2):
        assert take_down(server).returncode == 0
        assert files_of(server) == {*MINE, "home/.ssh/authorized_keys"}
    assert (server / "home/.ssh/authorized_keys").read_text() == "ssh-ed25519 A me\n"


@pytest.mark.parametrize("sign", ["opt/cpuft/clusters/other/id_ed25519", ""])
def test_what_another_cluster_uses_stays_on_the_server(server: Path, sign: str) -> None:
    """A host has a folder of the cluster only if it is a head host, but the cluster's key may log in on all hosts."""
    write_text(server / "opt/cpuft/install.lock", "")
    line = "" if sign else "ssh-ed25519 C cpuft-other\n"
    with open(server / "home/.ssh/authorized_keys", "a") as file:
        file.write(line)
    if sign:
        write_text(server / sign, "")
    stay = {*OURS[:2], *INPUTS, *MINE, "opt/cpuft/install.lock", "home/.ssh/authorized_keys", *filter(None, [sign])}
    done = take_down(server)
    assert (done.returncode, files_of(server)) == (0, stay)
    assert "stay, because another cluster uses them" in done.stdout
    assert (server / "home/.ssh/authorized_keys").read_text() == f"ssh-ed25519 A me\n{line}"


def test_an_environment_without_our_mark_stays_on_the_server(server: Path) -> None:
    assert take_down(server).returncode == 0
    assert files_of(server) == {*OURS[:2], *MINE, "home/.ssh/authorized_keys"}


def test_a_link_on_a_server_is_not_followed(server: Path) -> None:
    write_text(server / "opt/cpuft/install.lock", "")
    (server / "opt/cpuft/wheels").rename(server / "wheels")
    (server / "opt/cpuft/wheels").symlink_to(server / "wheels")
    done = take_down(server)
    assert (done.returncode, "it stays" in done.stderr) == (1, True)
    assert (server / "wheels/a.whl").exists()


@needs_root
def test_what_another_user_keeps_on_a_server_stays(server: Path) -> None:
    for folder in ("tmp/cpuft-inputs", "tmp/cpuft-0"):
        os.chown(server / folder, 65534, 65534)
    assert take_down(server).returncode == 0
    assert files_of(server) == {*OURS[:2], *INPUTS, *MINE, "home/.ssh/authorized_keys"}
