"""A real local cluster for tests, and what it may not leave behind."""

from __future__ import annotations

import ensurepip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpuft.hosts.hostfile import Host, read_hostfile
from cpuft.hosts.transport import SshTransport

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass(frozen=True)
class Simulated:
    """A cluster that was made for a test."""

    name: str
    folder: Path
    """Working directory of its commands; its hostfile is below it."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        return read_hostfile(str(self.folder / "hostfiles" / self.name))

    @property
    def ssh_config(self) -> str:
        return str(self.folder / "state" / self.name / "ssh_config")

    def cpuft(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a cpuft command as a user would."""
        environ = dict(os.environ) | {"CPUFT_STATE": str(self.folder / "state")} | settings
        environ.pop("TEST_OF", None)  # hosts outlive a test; take_snapshot looks for what outlives them
        command = [sys.executable, "-m", "cpuft", *words]
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=200)

    def on(self, index: int, command: str) -> str:
        """Run a shell command on a host (1 is the master); what it said."""
        answer = SshTransport(self.ssh_config).run(self.hosts[index - 1], ("sh", "-c", command))
        assert answer.exit_code == 0, answer.errors
        return answer.output.strip()

    def accept_own_keys(self, index: int, files: str = ".ssh/authorized_keys") -> None:
        """Let a host's sshd read these files of keys beside the cluster's own; by default that of a real server."""
        edit = f"sed -i 's#^AuthorizedKeysFile.*#AuthorizedKeysFile /run/cpuft/authorized_keys {files}#'"
        self.on(index, f"{edit} /run/cpuft/sshd_config; kill -HUP 1; sleep 2")


@contextmanager
def simulate(folder: Path, *options: str) -> Iterator[Simulated]:
    """A cluster of a name that no other test run has, taken down at the end."""
    cluster = Simulated(_own_name(), folder)
    made = cluster.cpuft("provision", "local", "--name", cluster.name, *options)
    try:
        assert made.returncode == 0, made.stderr
        yield cluster
    finally:
        gone = cluster.cpuft("provision", "down", cluster.name)
        assert gone.returncode == 0, gone.stderr


@contextmanager
def simulate_servers(folder: Path) -> Iterator[Simulated]:
    """Two hosts, each with a home folder and a place for an environment that nobody else sees; and wheels for them."""
    write_wheels(folder / "wheels")
    with simulate(folder, "--nodes", "2") as made:
        for index in (1, 2):
            made.on(index, 'mount -t tmpfs tmpfs /mnt; mount -t tmpfs -o mode=700 tmpfs "$HOME"')
            made.accept_own_keys(index)
        yield made


def take_snapshot(folder: Path) -> dict[str, list[str]]:
    """All that a local cluster could leave on this machine: links, routes, mounts, groups, processes, files.

    Clusters of other names are left out: a developer may have one. So are the notes about runs that may be resumed.
    """
    own = f"cpuft-{_own_name()}"
    processes = [_command(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    return {
        "links": [name for name in sorted(os.listdir("/sys/class/net")) if name.startswith(own)],
        "routes": [line for line in Path("/proc/net/route").read_text(encoding="utf-8").splitlines() if own in line],
        "mounts": [line for line in mounts if own in line or str(folder) in line or "netns" in line],
        "groups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("**/cpuft-*") if path.name == own),
        "processes": sorted(text for text in processes if str(folder) in text),
        "files": sorted(
            str(path)
            for part in ("state", "hostfiles")
            for path in (folder / part).rglob("*")
            if ".named" not in path.parts
        ),
    }


def list_states(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """All that a file or folder has: mode, time of its last change, size, and what a link leads to; by path.

    Where simulated hosts' sshd notes every login is left out: whoever looks logs in.
    """
    found = {}
    for path in {folder, *folder.rglob("*")} - {*folder.glob("state/*/nodes/*/log")}:
        state = path.lstat()
        where = os.readlink(path) if path.is_symlink() else ""
        found[str(path)] = (state.st_mode, state.st_mtime_ns, state.st_size, where)
    return found


def write_wheels(folder: Path) -> None:
    """Wheels for hosts without a network: pip, and what cpuft needs, as packages with a name and nothing else."""
    folder.mkdir()
    for path in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        shutil.copy(path, folder)
    for name in ("click", "paramiko", "PyYAML", "rich", "tqdm"):
        write_wheel(folder, name, {})


def write_wheel(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """A package of these files, texts by path; whoever has it may run them."""
    info = f"{name}-99.0.dist-info"
    more = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{path},,\n" for path in files),
    }
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as archive:
        for path, text in (*files.items(), *more.items()):
            one = zipfile.ZipInfo(path)
            one.external_attr = 0o100755 << 16
            archive.writestr(one, text)


def _own_name() -> str:
    return f"t{os.getpid() % 1_000_000}"


def _command(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""


@contextmanager
def own_root(folder: Path) -> Iterator[Path]:
    """This machine's root filesystem as a golden image: hosts booted from it have disks of their own, at no cost.

    It and the cluster's state lie on a disk of their own, `folder`/disk, because an overlay's layers may not hold
    each other.
    """
    disk = folder / "disk"
    image = disk / "image"
    disk.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", str(disk))
    try:
        for path in (disk / "upper", disk / "work", image):
            path.mkdir()
        layers = f"lowerdir=/,upperdir={disk}/upper,workdir={disk}/work"
        _run("mount", "-t", "overlay", "-o", layers, "overlay", str(image))
        try:
            stamp = {"python": sys.executable, "contents": "this machine's own"}
            (image / "etc" / "cpuft-image.json").write_text(json.dumps(stamp), encoding="utf-8")
            yield image
        finally:
            _run("umount", str(image))
    finally:
        _run("umount", str(disk))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)
