"""An editable install, as scripts/install makes it, of a clone in a folder of its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
