"""This very cpuft as a wheel, so that hosts get the version that provisions them, published or not.

`python -m cpuft.provision.own_wheel FOLDER` writes it there.
"""

from __future__ import annotations

import importlib.metadata
import io
import platform
import sys
import zipfile
from functools import cache
from pathlib import Path

import cpuft
from cpuft.errors import CpuftError
from cpuft.files import written_beside

_TIME = (1980, 1, 1, 0, 0, 0)
"""The same contents give the same file, and so the same checksum."""
_FIELDS = ("Requires-Python", "Provides-Extra", "Requires-Dist")


@cache
def make_own_wheel() -> tuple[str, bytes]:
    """The wheel's name and contents. Nothing of it depends on when or where it is made.

    Raises CpuftError: this cpuft is a bare checkout, whose requirements nothing tells.
    """
    root = Path(cpuft.__file__).parent
    info = f"cpuft-{cpuft.__version__}.dist-info"
    paths = sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {f"cpuft/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}
    # oneCCL's shim is the only compiled file, and called by its C names: any Python 3 of this machine's kind loads it.
    compiled = any(name.endswith(".so") for name in files)
    tag = f"py3-none-{'linux_' + platform.machine() if compiled else 'any'}"
    files[f"{info}/METADATA"] = _format_metadata().encode()
    purity = "false" if compiled else "true"
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: cpuft\nRoot-Is-Purelib: {purity}\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\ncpuft = cpuft.cli:main\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), content)
    return f"cpuft-{cpuft.__version__}-{tag}.whl", written.getvalue()


def write_own_wheel(folder: Path) -> Path:
    """Write the wheel into `folder`; its path."""
    name, content = make_own_wheel()
    with written_beside(folder / name) as beside:
        beside.write_bytes(content)
    return folder / name


def _format_metadata() -> str:
    """What the installed cpuft says of its requirements, extras among them: setup.cfg is their only source."""
    try:
        known = importlib.metadata.metadata("cpuft")
    except importlib.metadata.PackageNotFoundError:
        raise CpuftError("this cpuft is not installed, so its requirements are unknown: run scripts/install") from None
    fields = [f"{name}: {value}\n" for name in _FIELDS for value in known.get_all(name) or []]
    return f"Metadata-Version: 2.1\nName: cpuft\nVersion: {cpuft.__version__}\n" + "".join(fields)


if __name__ == "__main__":
    write_own_wheel(Path(sys.argv[1]))
