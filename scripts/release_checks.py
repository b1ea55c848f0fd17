"""What scripts/release checks: `files WHEEL SDIST`, and `speed FOLDER` of the runs that it has made.

Both print what they found, and end with exit code 1 if it is not as it should be.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path

from cpuft.compiler import IN_PACKAGE, TARGETS, name_library

ROOT = Path(__file__).parents[1]
MAX_BYTES = 10_000_000
"""Size that neither of the two files may reach."""
MIN_SPEED = 0.95
"""Least speed without a compiler, as a share of the speed with kernels that the host has compiled for itself. Both are
the same code; two runs on a shared machine differ by some per cent."""
COMPILED = (
    "cpuft/comm/backends/_ccl_shim.so",
    *((IN_PACKAGE / name_library(target)).relative_to(ROOT).as_posix() for target in TARGETS),
)
"""Compiled files in a wheel: oneCCL's shim, and the kernels for each class of CPUs."""


def list_sources() -> list[str]:
    """Return the paths of the package's files that git knows, relative to the checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "cpuft"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def find_faults(names: Collection[str], wanted: Iterable[str], compiled: Collection[str]) -> list[str]:
    """Compare the names of an archive's files with those it should have; return a line for each fault.

    Parameters
    ----------
    names: the files in the archive.
    wanted: files that must be among them, such as the package's sources.
    compiled: the compiled files (*.so) that must be among them. There may be no others.
    """
    missing = sorted({*wanted, *compiled} - {*names})
    unexpected = sorted(name for name in names if name.endswith(".so") and name not in compiled)
    return [f"{name} is missing" for name in missing] + [f"{name} does not belong there" for name in unexpected]


def check_files(wheel: Path, sdist: Path) -> list[str]:
    """Return a line for each fault of a release: missing or foreign files, too many bytes, or a wrong name."""
    sources = list_sources()
    with zipfile.ZipFile(wheel) as archive:
        faults = [f"{wheel.name}: {fault}" for fault in find_faults(archive.namelist(), sources, COMPILED)]
    with tarfile.open(sdist) as archive_of_sources:
        names = [name.partition("/")[2] for name in archive_of_sources.getnames()]
    build = ("setup.py", "setup.cfg", "README.md", "LICENSE")
    faults += [f"{sdist.name}: {fault}" for fault in find_faults(names, [*sources, *build], ())]
    if "-py3-none-manylinux" not in wheel.name:
        faults.append(f"{wheel.name} is not for every Python 3 and for manylinux")
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
        if path.stat().st_size >= MAX_BYTES:
            faults.append(f"{path.name} has {path.stat().st_size} bytes, which are too many")
    return faults


def check_speed(folder: Path) -> list[str]:
    """Compare the runs `without-*` and `with-*` (a compiler) in `folder`; return a line for each fault.

    All runs must have used the kernels, and the median speed without a compiler must be at least `MIN_SPEED` of that
    with one.
    """
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    faults = []
    for path in sorted(folder.glob("with*-*/record.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if lines[0]["kernels"] != "compiled":
            faults.append(f"{path.parent.name} has used no kernels")
        speeds[path.parent.name.partition("-")[0]].append(lines[-1]["steady_samples_per_second"])
    if not all(speeds.values()):
        return [*faults, f"{folder} does not have runs of both kinds"]
    without, compiled = statistics.median(speeds["without"]), statistics.median(speeds["with"])
    share = without / compiled
    print(f"samples/s: {without:.1f} without a compiler, {compiled:.1f} with kernels compiled here: {share:.3f} of it")
    print(f"  without: {speeds['without']}\n  with:    {speeds['with']}")
    return faults + [f"without a compiler, the speed is {share:.3f} of that with one"] * (share < MIN_SPEED)


if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    found = check_files(*map(Path, paths)) if kind == "files" else check_speed(*map(Path, paths))
    sys.exit("\n".join(found) or 0)
