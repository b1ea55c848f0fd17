"""A release: what its wheel contains, and that a host which installs it needs neither the checkout nor a compiler."""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

import cpuft
from cpuft.compiler import MACHINES, choose_target, read_cpu_flags
from scripts.release_checks import (
    ELF_MACHINES,
    MAX_BYTES,
    ROOT,
    SUMS,
    check_report,
    check_wheel,
    complete_bill,
    find_faults,
    find_obstacles,
    list_compiled,
    list_sources,
)
from tests.conftest import COMPILE_ONCE

COMPILED = list_compiled(platform.machine())

PUSH = """
import platform, sys
from cpuft.provision.wheels import make_own_wheel
name, content = make_own_wheel(platform.machine())
open(sys.argv[1], "wb").write(content)
print(name)
"""
BUILD = """
import os
from cpuft.compiler import describe_build
from cpuft.kernels import kernel_status
print(kernel_status(), describe_build(os.environ), sep="\\n")
"""


def read_package(content: bytes) -> dict[str, bytes]:
    """Return the files of cpuft in a wheel."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("cpuft/")}


def read_requirements(content: bytes) -> set[str]:
    """Return the requirements in the metadata of a wheel."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        metadata = archive.read(f"cpuft-{cpuft.__version__}.dist-info/METADATA")
    return set(message_from_bytes(metadata).get_all("Requires-Dist") or [])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a release, as scripts/release builds it, before auditwheel names it for other systems."""
    folder = tmp_path_factory.mktemp("release")
    for name in (*list_sources(), "setup.py", "setup.cfg", "README.md", "LICENSE"):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    environ = os.environ | {"CPUFT_RELEASE": "1", "CXX": COMPILE_ONCE}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder / "source", env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.real
@pytest.mark.proof
def test_the_wheel_has_every_file_of_the_package_and_kernels_for_every_cpu(wheel: Path) -> None:
    assert wheel.name == f"cpuft-{cpuft.__version__}-py3-none-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert find_faults(archive.namelist(), list_sources(), COMPILED) == []
        assert all(archive.getinfo(name).file_size > 10_000 for name in COMPILED)
    assert wheel.stat().st_size < MAX_BYTES


@pytest.mark.real
def test_its_libraries_load_on_older_systems_and_need_no_openmp_library(wheel: Path, tmp_path: Path) -> None:
    """glibc 2.28 and libstdc++ of GCC 8 are on the oldest systems for which torch has wheels."""
    package = read_package(wheel.read_bytes())
    for name in COMPILED:
        found = set(re.findall(rb"\b(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+", package[name]))
        newest = {b"GLIBC": (2, 28), b"GLIBCXX": (3, 4, 25), b"CXXABI": (1, 3, 11)}
        versions = [(kind, tuple(map(int, number.split(b".")))) for kind, number in (one.split(b"_") for one in found)]
        assert versions, name
        assert [one for one in versions if one[1] > newest[one[0]]] == [], name
        assert b"libgomp" not in package[name]


def test_an_installed_wheel_runs_its_kernels_and_is_what_hosts_get(wheel: Path, tmp_path: Path) -> None:
    target = choose_target(read_cpu_flags({}))
    assert target, "tests of kernels need a CPU with AVX2"
    site, mine = tmp_path / "site", tmp_path / wheel.name.replace("-linux_", "-manylinux_2_28_")
    shutil.copy(wheel, mine)
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(mine)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    (tmp_path / "empty").mkdir()
    environ = {"PYTHONPATH": str(site), "PATH": str(tmp_path / "empty"), "HOME": str(tmp_path)}

    def run(code: str) -> list[str]:
        command = [sys.executable, "-c", code, str(tmp_path / "pushed")]
        done = subprocess.run(command, cwd=tmp_path / "empty", env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert run(BUILD) == ["on", f"from the wheel, for {target.name.upper()}"]
    words = [sys.executable, str(ROOT / "scripts/compare_builds.py"), "1"]
    settings = os.environ | {"PYTHONPATH": str(site)}
    compared = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert re.match(r"the installed kernels have \d\.\d+ \(.* of those compiled here, 1 rounds\n", compared.stdout), (
        compared
    )
    assert run(PUSH) == [wheel.name]
    pushed = (tmp_path / "pushed").read_bytes()
    assert read_package(pushed) == read_package(wheel.read_bytes())
    assert read_requirements(pushed) == read_requirements(wheel.read_bytes())


def test_the_commands_in_the_guide_install_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """pip only says what it would install."""
    guide = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^## Install the wheel\n.*?^```\n(.*?)^```", guide, re.DOTALL | re.M)
    shutil.copy(wheel, tmp_path)
    settings = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1"}
    environ = os.environ | settings | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-ec", commands]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"Would install cpuft-{cpuft.__version__}" in done.stdout


def test_missing_and_foreign_files_are_faults() -> None:
    assert find_faults(["a.py", "a.so"], ["a.py"], ["a.so"]) == []
    assert find_faults(["a.py", "b.so"], ["a.py", "b.py"], ["a.so"]) == [
        "a.so is missing",
        "b.py is missing",
        "b.so does not belong there",
    ]


def test_setup_cfg_names_the_oldest_and_the_newest_torch() -> None:
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    line = r"^# scripts/check-torch runs the quick tests with torch (\S+) and with torch (\S+)\.$"
    (versions,) = re.findall(line, text, re.M)
    setup = configparser.ConfigParser()
    setup.read_string(text)
    assert f"torch >={versions[0].removesuffix('.0')}" in setup["options.extras_require"]["train"].splitlines()
    assert (
        f"torch=={versions[1]} ; platform_machine != 'aarch64'"
        in (ROOT / "cpuft/constraints.txt").read_text(encoding="utf-8").splitlines()
    )


@pytest.mark.parametrize(
    "machine, compiled_for, system, fault",
    [
        ("x86_64", "x86_64", "manylinux_2_27_x86_64.manylinux_2_28", ""),
        ("aarch64", "aarch64", "manylinux_2_26", ""),
        (
            "aarch64",
            "x86_64",
            "manylinux_2_26",
            "\n".join(rf".*-{kind}\.so is not compiled for aarch64" for kind in ("bf16", "dotprod", "neon")),
        ),
        (
            "aarch64",
            "aarch64",
            "manylinux_2_34",
            "the name is not that of a wheel for every Python 3 and for glibc 2.28",
        ),
        ("aarch64", "aarch64", "linux", "the name is not that of a wheel for every Python 3 and for glibc 2.28"),
    ],
)
def test_a_wheel_is_for_its_architecture_and_older_systems(
    tmp_path: Path, machine: str, compiled_for: str, system: str, fault: str
) -> None:
    path = tmp_path / f"cpuft-1-py3-none-{system}_{machine}.whl"
    header = bytes(18) + ELF_MACHINES[compiled_for].to_bytes(2, "little")
    with zipfile.ZipFile(path, "w") as archive:
        for name in list_sources():
            archive.writestr(name, "")
        for name in list_compiled(machine):
            archive.writestr(name, header)
    found = "\n".join(check_wheel(path))
    assert re.fullmatch(f"{re.escape(path.name)}: {fault}" if fault else "", found)


def test_pip_must_choose_the_wheel_that_was_built_and_no_cuda(tmp_path: Path) -> None:
    wheel, report = tmp_path / "cpuft-1-py3-none-any.whl", tmp_path / "report.json"
    wheel.write_text("built")
    names = {"torch": "1", "cpuft": hashlib.sha256(b"built").hexdigest()}

    def check(hashes: dict[str, str]) -> list[str]:
        """The fields that pip's report has of each package."""
        packages = [
            {
                "metadata": {"name": name},
                "download_info": {"url": f"http://a/{name}.whl", "archive_info": {"hashes": {"sha256": sha256}}},
            }
            for name, sha256 in hashes.items()
        ]
        report.write_text(json.dumps({"install": packages}))
        return check_report(report, wheel)

    assert check(names) == []
    assert check(names | {"nvidia-nccl-cu13": "2", "cpuft": "3"}) == [
        "CUDA would be installed: nvidia-nccl-cu13",
        "pip chose http://a/cpuft.whl instead of cpuft-1-py3-none-any.whl",
    ]


def test_without_a_wheel_for_arm_the_trial_of_it_names_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "other").touch()  # no place in which the script may work
    environ = os.environ | {"WHEEL": str(tmp_path / "none.whl"), "PLACE": str(tmp_path)}
    command = [str(ROOT / "scripts/prove-arm"), "package"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no wheel for Arm: build it (TRAIN=0 scripts/release), or name its file: WHEEL=PATH" in done.stderr


def copy_checkout(folder: Path, *names: str) -> Path:
    """Return a repository with these files of this checkout in one commit; the change log has the version's date."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    changes = folder / "CHANGELOG.md"
    changes.write_text(changes.read_text(encoding="utf-8").replace(", not released", ", 2026-11-29", 1), "utf-8")
    commit = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=all")
    for words in (("init", "--quiet"), ("add", "--all"), commit):
        subprocess.run(["git", "-C", folder, *words], check=True)
    return folder


def write_release(folder: Path, root: Path) -> None:
    """Write what scripts/release leaves in its folder, without any content."""
    folder.mkdir()
    wheels = [f"-py3-none-manylinux_2_28_{machine}.whl" for machine in MACHINES]
    archives = [folder / f"cpuft-{cpuft.__version__}{end}" for end in (*wheels, ".tar.gz")]
    for archive in archives:
        archive.write_text("")
    bill = folder / f"cpuft-{cpuft.__version__}.cdx.json"
    bill.write_text('{"components": [{"name": "cpuft"}, {"name": "torch"}], "metadata": {}}')
    complete_bill(bill, *archives, root=root)
    names = [path.name for path in (*archives, bill)]
    sums = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True)
    (folder / SUMS).write_bytes(sums.stdout)


def test_only_what_was_checked_is_published(tmp_path: Path) -> None:
    root, dist, version = copy_checkout(tmp_path / "root", "CHANGELOG.md"), tmp_path / "dist", cpuft.__version__
    write_release(dist, root)
    assert find_obstacles(dist, root) == []
    subprocess.run(["git", "-C", root, "tag", f"v{version}"], check=True)
    assert find_obstacles(dist, root) == [f"there is a tag v{version} already: raise cpuft.__version__"]
    subprocess.run(["git", "-C", root, "tag", "--delete", f"v{version}"], check=True)

    (dist / f"cpuft-{version}.tar.gz").write_text("other")
    (dist / "cpuft-0.0.1.tar.gz").write_text("")
    (dist / f"cpuft-{version}-py3-none-any.whl").write_text("")
    again = "is not what scripts/release has checked: run it again"
    assert find_obstacles(dist, root) == [
        f"cpuft-0.0.1.tar.gz is not of version {version}, or missing: run scripts/release again",
        f"cpuft-{version}-py3-none-any.whl {again}",
        f"cpuft-{version}.tar.gz {again}",
    ]
    (dist / SUMS).unlink()
    (root / "CHANGELOG.md").write_text(f"## {version}, not released\n")
    assert find_obstacles(dist, root) == [
        "the checkout has changes: commit them, and run scripts/release again",
        f"CHANGELOG.md has no heading with the date of version {version}: write it",
        f"{dist} was not checked to the end: run scripts/release",
    ]


def test_nothing_is_published_without_a_wheel_for_each_architecture(tmp_path: Path) -> None:
    root, dist = copy_checkout(tmp_path / "root", "CHANGELOG.md"), tmp_path / "dist"
    write_release(dist, root)
    (wheel,) = dist.glob("*_aarch64.whl")
    wheel.unlink()
    sums = (dist / SUMS).read_text().splitlines(keepends=True)
    (dist / SUMS).write_text("".join(line for line in sums if wheel.name not in line))
    assert find_obstacles(dist, root) == [
        "no wheel for aarch64: apt-get install g++-aarch64-linux-gnu, and run scripts/release again"
    ]


def test_files_of_another_commit_or_of_changes_are_not_published(tmp_path: Path) -> None:
    root = copy_checkout(tmp_path / "root", "CHANGELOG.md", "README.md")
    (root / "README.md").write_text("changed")
    write_release(tmp_path / "dist", root)
    subprocess.run(["git", "-C", root, "checkout", "--quiet", "README.md"], check=True)
    (said,) = find_obstacles(tmp_path / "dist", root)
    assert re.fullmatch(r"the files are of commit [0-9a-f]{8}: run scripts/release again", said)


class Index(BaseHTTPRequestHandler):
    """A package index that keeps the names of the files it gets."""

    got: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.extend(name.decode() for name in re.findall(rb'filename="([^"]+)"', content))
        self.send_response(200)
        self.end_headers()


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_release_is_built_checked_used_elsewhere_and_published(tmp_path: Path) -> None:
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True).stdout.decode()
    root = copy_checkout(tmp_path / "root", *filter(None, names.split("\0")))
    tagger = {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    environ = os.environ | {"TMPDIR": str(tmp_path)} | tagger

    def release(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [root / "scripts/release", *words], env=environ, capture_output=True, text=True, timeout=3500
        )

    done = release()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    uploaded = sorted(path.name for path in (root / "dist").iterdir() if path.suffix in (".whl", ".gz"))
    assert len(uploaded) == len(MACHINES) + 1
    bill = json.loads((root / f"dist/cpuft-{cpuft.__version__}.cdx.json").read_text(encoding="utf-8"))
    assert {"torch", "transformers", "impi-rt"} <= {one["name"] for one in bill["components"]}
    assert str(tmp_path) not in str(bill)
    done = release("publish", "--dry-run")
    assert done.stdout.split()[:2] == ["twine", "upload"], done.stderr
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ("--repository-url", f"http://127.0.0.1:{server.server_port}/", "--username", "a", "--password", "b")
        done = release("publish", *words)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert sorted(Index.got) == uploaded
    done = release("publish", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"there is a tag v{cpuft.__version__} already: raise cpuft.__version__\n"
