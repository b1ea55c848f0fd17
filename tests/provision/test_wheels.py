"""This cpuft as a wheel, and what an environment is made from."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cpuft
from cpuft.errors import CpuftError
from cpuft.files import hash_file
from cpuft.provision.own_wheel import write_own_wheel
from cpuft.provision.wheels import EXTRAS, Wheel, gather_supply, list_pins, make_stamp

TORCH = Wheel("/w/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "1")
PIP = Wheel("/w/pip-26.3-py3-none-any.whl", "pip-26.3-py3-none-any.whl", "2")


def test_the_same_contents_are_the_same_file(tmp_path: Path) -> None:
    first, second = write_own_wheel(tmp_path / "a"), write_own_wheel(tmp_path / "b")
    assert first.name == second.name
    assert hash_file(first) == hash_file(second)


def test_it_holds_the_package_and_knows_its_requirements(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_own_wheel(tmp_path)) as archive:
        names = archive.namelist()
        metadata = archive.read(f"cpuft-{cpuft.__version__}.dist-info/METADATA").decode()
    assert {"cpuft/cli.py", "cpuft/constraints.txt", "cpuft/provision/local/node.sh"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    for extra in EXTRAS:
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "Requires-Dist: paramiko" in metadata


def test_pip_installs_it(tmp_path: Path) -> None:
    wheel = write_own_wheel(tmp_path)
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


def test_a_folder_without_wheels_is_said(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="holds no wheels: leave it out"):
        gather_supply(tmp_path / "own", str(tmp_path), "", {})
    supply = gather_supply(tmp_path / "own", "", "", {})
    assert [wheel.name.split("-")[0] for wheel in supply.wheels] == ["cpuft"]
