"""The Containerfile: its layers, and an image that is built and run without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpuft.hosts.mpijob import PORT
from cpuft.provision.image import read_recipe
from cpuft.provision.wheels import EXTRAS
from tests.provision.simulated import needs_root

ROOT = Path(__file__).parents[2]
RECIPE = read_recipe(str(ROOT / "ami" / "recipe.yaml"))
PREFIX = RECIPE.environment.prefix
TEXT = (ROOT / "ami" / "Containerfile").read_text()
DEPENDENCIES = (ROOT / "ami" / "dependencies.sh").read_text()
BASE = f"debian:{RECIPE.base.suite}-slim"
_ONLY_COMPILES = {"g++", "python3-venv"}
_ONLY_SERVERS = {"iproute2"}


def read_stages() -> list[list[list[str]]]:
    """The words of each instruction, by stage."""
    lines = re.sub(r"\\\n\s*", "", re.sub("(?m)^#.*\n", "", TEXT)).splitlines()
    stages: list[list[list[str]]] = []
    for words in (line.split() for line in lines if line):
        stages += [[]] if words[0] == "FROM" else []
        stages[-1].append(words)
    return stages


BUILD, IMAGE = read_stages()


def test_it_agrees_with_the_recipe() -> None:
    assert [stage[0][1] for stage in (BUILD, IMAGE)] == [BASE, BASE]
    (install,) = [words for words in IMAGE if "install" in words and "apt-get" in words]
    packages = install[install.index("--no-install-recommends") + 1 : install.index("&&", 5)]
    needed = {package.name for package in RECIPE.packages} - _ONLY_COMPILES - _ONLY_SERVERS
    assert set(packages) == needed | {"libnss-extrausers"}
    assert f"scripts/install {','.join(EXTRAS)}\n" in DEPENDENCIES
    assert set(re.findall(r"/opt/\w+", TEXT)) == {PREFIX}


def test_it_copies_existing_files_and_checks_the_result() -> None:
    copied = [words[1:] for words in BUILD if words[0] == "COPY"]
    assert [name for *names, _ in copied for name in names if not (ROOT / name).exists()] == []
    steps = [" ".join(words) for words in IMAGE if words[0] == "RUN"]
    assert f"cpuft/provision/image_prove.sh {PREFIX}/env/bin/python" in steps[-1]
    assert "/etc/ssh/ssh_host_*" in steps[0]


def test_cpuft_alone_is_the_last_large_layer() -> None:
    """The layer before it, with all packages, does not depend on any file of cpuft but those that name packages."""
    step = next(number for number, words in enumerate(BUILD) if "ami/dependencies.sh" in words and words[0] == "RUN")
    before = {name for words in BUILD[:step] if words[0] == "COPY" for name in words[1:-1]}
    names = {"setup.cfg", "setup.py", "cpuft/constraints.txt", "cpuft/comm/backends/ccl_shim.cpp"}
    assert before == names | {"scripts/install", "ami/dependencies.sh"}
    copied = [words for words in IMAGE if words[0] == "COPY"]
    assert copied == [["COPY", "--from=build", f"{PREFIX}/{name}", f"{PREFIX}/env"] for name in ("env", "own")]


def test_no_step_is_for_one_architecture() -> None:
    assert not re.search(r"x86|amd64|aarch64|arm64|uname|--platform", TEXT + DEPENDENCIES)
    subprocess.run(["sh", "-n", str(ROOT / "ami" / "dependencies.sh")], check=True)


USER = "12345:0"
KEYS = "/etc/mpi-ssh"
TRAIN = "cpuft launch --np 2 --task demo --max-steps 3 --batch-size 4 --no-save-model --run-dir {}"


@dataclass(frozen=True)
class Builder:
    """buildah with a storage of its own."""

    folder: Path
    architecture: str
    """In Debian's words. That of another machine runs in emulation."""

    def __call__(self, *words: str) -> str:
        given = [f"--root={self.folder}/storage", f"--runroot={self.folder}/run", "--storage-driver=overlay"]
        done = subprocess.run(["buildah", *given, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return str(done.stdout)

    def make_base(self) -> None:
        """What Debian's image has, under its name."""
        (self.folder / "base").mkdir()
        command = ("debootstrap", f"--arch={self.architecture}", "--variant=minbase", RECIPE.base.suite, "root")
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        unneeded = (
            "root/var/cache/apt/archives",
            "root/var/lib/apt/lists",
            "root/usr/share/doc",
            "root/usr/share/locale",
        )
        subprocess.run(["rm", "-rf", *unneeded], cwd=self.folder, check=True)
        subprocess.run(["tar", "-C", "root", "-cf", "base/base.tar", "."], cwd=self.folder, check=True)
        # qemu has no process_vm_readv, which MPICH uses otherwise, and waiting threads would take most of its time.
        variables = "ENV MPIR_CVAR_CH4_CMA_ENABLE=0 OMP_WAIT_POLICY=passive\n" if self.is_emulated else ""
        (self.folder / "base" / "Containerfile").write_text(f"FROM scratch\nADD base.tar /\n{variables}")
        tag = f"--tag=docker.io/library/{BASE}"
        self("bud", "--isolation=chroot", f"--arch={self.architecture}", tag, str(self.folder / "base"))

    def build(self, source: Path, tag: str) -> list[tuple[str, int]]:
        """Build the image from a checkout; its layers, each with its bytes as they travel."""
        mounts = [f"--volume={path}:{place}:ro" for path, place in find_pip_files(self.folder).items()]
        file = ("--file", str(source / "ami" / "Containerfile"), "--ignorefile", str(source / ".containerignore"))
        how = ("--isolation=chroot", f"--arch={self.architecture}", "--layers", "--pull-never")
        self("bud", *how, *mounts, *file, f"--tag={tag}", str(source))
        self("push", f"localhost/{tag}", f"oci:{self.folder}/{tag}")
        blobs = self.folder / tag / "blobs" / "sha256"
        index = json.loads((self.folder / tag / "index.json").read_text())
        manifest = json.loads((blobs / index["manifests"][0]["digest"].partition(":")[2]).read_text())
        return [(layer["digest"], int(layer["size"])) for layer in manifest["layers"]]

    @contextmanager
    def container(self, tag: str) -> Iterator[str]:
        name = self("from", f"--arch={self.architecture}", "--pull-never", f"localhost/{tag}").strip()
        try:
            yield name
        finally:
            self("rm", name)

    @property
    def is_emulated(self) -> bool:
        return self.architecture != "amd64"

    def measure(self, container: str) -> int:
        """Bytes of its files."""
        place = self("mount", container).strip()
        size = int(subprocess.run(["du", "-sxb", place], capture_output=True, text=True, check=True).stdout.split()[0])
        self("umount", container)
        return size

    def inside(self, container: str, *mounts: Path, user: str = USER) -> list[str]:
        """Words before a shell line in a container."""
        given = ["buildah", f"--root={self.folder}/storage", f"--runroot={self.folder}/run", "--storage-driver=overlay"]
        volumes = [f"--volume={path}:{place}" for path, place in zip(mounts[::2], mounts[1::2])]
        return [*given, "run", "--isolation=chroot", f"--user={user}", *volumes, container, "sh", "-c"]


def find_pip_files(folder: Path) -> dict[str, str]:
    """Files of this machine that pip needs to find packages, and their places in a container."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"(?m)^(?::env:|global)\.([\w-]+)='(.*)'$", listed.stdout))
    found: dict[str, str] = {}
    for name, value in settings.items():
        for path in re.findall(r"(?:^|file://|\s)(/[^\s']+)", value):
            root = path.removesuffix("/simple")  # an index and its files are side by side
            found[root] = f"/run/pip{root}"
            settings[name] = settings[name].replace(path, f"/run/pip{path}")
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    return found | {f"{folder}/pip.conf": "/etc/pip.conf"}


@contextmanager
def serve_worker(words: list[str], work: Path) -> Iterator[None]:
    """What a worker of an MPIJob runs: inside, it is ready."""
    with subprocess.Popen([*words, "echo $$ >/work/pid; exec python -m cpuft.hosts.mpijob"]) as process:
        try:
            end = time.monotonic() + 600
            while True:
                try:
                    socket.create_connection(("127.0.0.1", PORT), 1.0).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.2)
            yield
        finally:
            os.kill(int((work / "pid").read_text()), signal.SIGTERM)
            process.wait(200)


@pytest.fixture(params=["amd64", "arm64"])
def builder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Builder]:
    try:
        yield Builder(tmp_path, request.param)
    finally:  # buildah leaves its storage mounted
        subprocess.run(["umount", "--recursive", "--lazy", str(tmp_path / "storage" / "overlay")], check=False)


@pytest.mark.proof
@pytest.mark.clusters
@needs_root
@pytest.mark.timeout(4 * 3600)
def test_an_image_trains_as_any_user(builder: Builder, tmp_path: Path) -> None:
    """Needs buildah, and qemu for the other architecture. Two ranks train as a user without a name or a home, also from
    a launcher over a worker's sshd; another version of cpuft is one small layer.
    """
    source = tmp_path / "source"
    names = ("ami", "cpuft", "scripts/install", "setup.cfg", "setup.py", "README.md", ".containerignore")
    for name in names:
        copy: Any = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    builder.make_base()
    layers = builder.build(source, "first")
    with builder.container("first") as container:
        size = builder.measure(container)
        work, keys, mpi = tmp_path / "work", tmp_path / "keys", tmp_path / "mpi"
        for folder in (work, keys, mpi):
            folder.mkdir()
        work.chmod(0o2775)
        train = TRAIN
        if builder.is_emulated:  # evaluating MiniLM, or measuring the speed of bf16, would take a quarter of an hour
            train += " --from-config tiny.json --precision fp32"
            sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
            (work / "tiny.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 1000, **sizes}))

        def run(line: str, *mounts: Path) -> str:
            words = builder.inside(container, work, Path("/work"), *mounts)
            done = subprocess.run(
                [*words, f"cd /work; unset HOME; {line}"], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
            return done.stdout

        assert run("id -u; getent passwd 12345 || echo nobody; cpuft --version").split()[:2] == ["12345", "nobody"]
        assert "accuracy" in run(train.format("alone"))
        key = ("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(keys / "id_rsa"))
        subprocess.run(key, check=True)
        (keys / "id_rsa").chmod(0o640)  # as the Trainer does
        (mpi / "hostfile").write_text("127.0.0.1 slots=2\n")
        mounts = (keys, Path(KEYS), mpi, Path("/etc/mpi"))
        with serve_worker(builder.inside(container, work, Path("/work"), *mounts), work):
            assert "accuracy" in run(f"K_MPI_JOB_ROLE=launcher {train.format('job')}", *mounts)
        assert run("cat /var/lib/extrausers/passwd").startswith("cpuft:x:12345:")
    more = source / "cpuft" / "errors.py"
    more.write_text(more.read_text() + "\nMORE = 1\n")
    moved = [one for one in builder.build(source, "second") if one not in layers]
    print(f"{size / 1e9:.2f} GB of files, {sum(one for _, one in layers) / 1e9:.2f} GB travel, of which an upgrade")
    print("moves", *(f"{one / 1e6:.1f} MB" for _, one in moved), "of", *(f"{one / 1e6:.1f}" for _, one in layers))
    assert size < 1.5e9
    assert sum(one for _, one in moved) < 5e6
