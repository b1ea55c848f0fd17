"""This very cpuft as a wheel, so that hosts get the version that provisions them, published or not."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import cpuft

_NEEDS = ("click>=8.1", "paramiko>=3.4", "PyYAML>=6.0", "rich>=13.7")
_TIME = (1980, 1, 1, 0, 0, 0)
"""The same contents give the same file, and so the same checksum."""


def write_own_wheel(folder: Path) -> Path:
    """Write the wheel into `folder`; its path. Nothing of it depends on when or where it is made."""
    root = Path(cpuft.__file__).parent
    info = f"cpuft-{cpuft.__version__}.dist-info"
    files = {f"cpuft/{path.relative_to(root).as_posix()}": path.read_bytes() for path in _package_files(root)}
    needs = "".join(f"Requires-Dist: {need}\n" for need in _NEEDS)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: cpuft\nVersion: {cpuft.__version__}\n{needs}".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: cpuft\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\ncpuft = cpuft.cli:main\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cpuft-{cpuft.__version__}-py3-none-any.whl"
    beside = path.with_suffix(".new")
    with zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), content)
    beside.rename(path)
    return path


def _package_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
