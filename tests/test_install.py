"""What scripts/install refuses, and an editable install, as it makes it, of a clone in a folder of its name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_an_editable_install_is_imported_beside_its_clone_and_warns_of_nothing(tmp_path: Path) -> None:
    """The clone's folder has the name of the package in it, and Python looks into the working folder first."""
    clone = tmp_path / "cpuft"
    (clone / "cpuft").mkdir(parents=True)
    for name in ("setup.cfg", "README.md", "cpuft/__init__.py"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    site = tmp_path / "site"
    site.mkdir()
    code = f"from setuptools.build_meta import build_editable; print(build_editable({str(site)!r}))"
    made = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert "Please be careful" not in made.stdout + made.stderr
    with zipfile.ZipFile(site / made.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import cpuft; print(cpuft.__version__)"
    for folder in (tmp_path, clone, Path("/")):
        command = [sys.executable, "-S", "-c", code]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "check, said",
    [
        (0, r"the C library here is musl, and torch needs glibc: use Debian, .*"),
        (1, r"cpuft needs Python 3\.10 or newer: install it, or name it: PYTHON=python3\.11 \S+"),
    ],
    ids=["musl", "python 3.9"],
)
def test_systems_without_glibc_and_old_versions_of_python_are_refused_in_a_line(
    check: int, said: str, tmp_path: Path
) -> None:
    """musl's ldd prints its version to standard error, and ends with an error."""
    programs = {
        "ldd": "printf 'musl libc (x86_64)\\nVersion 1.2.5\\n' >&2; exit 1",
        "python": f"[ $1 = -c ] && exit {check}; touch $0.started",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "VENV": f"{tmp_path}/v"}
    command = ["bash", str(ROOT / "scripts/install"), "train"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"{said}\n", done.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ldd", "python"]
