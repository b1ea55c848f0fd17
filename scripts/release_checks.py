"""What scripts/release checks: `files SDIST WHEEL...`, `report FILE WHEEL` on what pip would install, and `publish
FOLDER` before an upload.

Each prints what it found, and ends with exit code 1 if it is not as it should be. `bill FILE ARCHIVE...` completes the
list of packages that cyclonedx-py has made.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import cpuft
from cpuft.compiler import IN_PACKAGE, MACHINES, name_library
from cpuft.files import hash_file

ROOT = Path(__file__).parents[1]
MAX_BYTES = 10_000_000
"""Size that no file of a release may reach."""
GLIBC = 28
"""A wheel must run with glibc 2.28, which torch's own wheels need."""
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""Architecture -> its number in the header of a compiled file (e_machine, in elf.h)."""
SUMS, BILL = "SHA256SUMS", f"cpuft-{cpuft.__version__}.cdx.json"

_COMMIT = ("--always", "--exclude=*", "--abbrev=40", "--dirty")
"""Arguments of git describe for the hash of the commit, with "-dirty" behind it if files have changed."""


def list_compiled(machine: str) -> list[str]:
    """Return the compiled files of a wheel: the kernels for each class of CPUs, and on x86-64 oneCCL's shim."""
    kernels = [(IN_PACKAGE / name_library(target)).relative_to(ROOT).as_posix() for target in MACHINES[machine]]
    return kernels + ["cpuft/comm/backends/_ccl_shim.so"] * (machine == "x86_64")


def list_sources() -> list[str]:
    """Return the paths of the package's files that git knows, relative to the checkout."""
    return _git(ROOT, "ls-files", "cpuft").splitlines()


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


def check_wheel(wheel: Path) -> list[str]:
    """Return a line for each fault of a wheel: missing, foreign or wrongly compiled files, or a wrong name."""
    machine = "aarch64" if wheel.stem.endswith("_aarch64") else "x86_64"
    compiled = list_compiled(machine)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        faults = find_faults(names, list_sources(), compiled)
        for name in compiled:
            if name in names and int.from_bytes(archive.read(name)[18:20], "little") != ELF_MACHINES[machine]:
                faults.append(f"{name} is not compiled for {machine}")
    systems = [int(number) for number in re.findall(rf"manylinux_2_(\d+)_{machine}", wheel.name)]
    if "-py3-none-" not in wheel.name or min(systems, default=GLIBC + 1) > GLIBC:
        faults.append(f"the name is not that of a wheel for every Python 3 and for glibc 2.{GLIBC}")
    return [f"{wheel.name}: {fault}" for fault in faults]


def check_files(sdist: Path, *wheels: Path) -> list[str]:
    """Return a line for each fault of a release: of its wheels and of its sources, or too many bytes."""
    faults = [fault for wheel in wheels for fault in check_wheel(wheel)]
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    build = ("setup.py", "setup.cfg", "README.md", "LICENSE")
    faults += [f"{sdist.name}: {fault}" for fault in find_faults(names, [*list_sources(), *build], ())]
    for path in (*wheels, sdist):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
        if path.stat().st_size >= MAX_BYTES:
            faults.append(f"{path.name} has {path.stat().st_size} bytes, which are too many")
    return faults


def check_report(report: Path, wheel: Path) -> list[str]:
    """Return a line for each fault of what pip would install (--report): another cpuft than `wheel`, or CUDA."""
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    chosen = {one["metadata"]["name"]: one["download_info"] for one in found}
    faults = [f"CUDA would be installed: {name}" for name in chosen if name.startswith(("nvidia", "cuda"))]
    if chosen["cpuft"]["archive_info"]["hashes"]["sha256"] != hash_file(wheel):
        faults.append(f"pip chose {chosen['cpuft']['url']} instead of {wheel.name}")
    return faults


def complete_bill(bill: Path, *archives: Path, root: Path = ROOT) -> None:
    """Make cpuft the subject of a list of installed packages (CycloneDX), with its archives' hashes and its commit."""
    content = json.loads(bill.read_text(encoding="utf-8"))
    (own,) = (one for one in content["components"] if one["name"] == "cpuft")
    content["components"].remove(own)
    own["externalReferences"] = [
        {"type": "distribution", "url": path.name, "hashes": [{"alg": "SHA-256", "content": hash_file(path)}]}
        for path in archives
    ]
    own["pedigree"] = {"commits": [{"uid": _git(root, "describe", *_COMMIT)}]}
    content["metadata"]["component"] = own
    bill.write_text(json.dumps(content, indent=1), encoding="utf-8")


def find_obstacles(folder: Path, root: Path = ROOT) -> list[str]:
    """Return a line for each reason why the files in `folder` must not be published from the checkout `root`."""
    version, obstacles = cpuft.__version__, []
    if _git(root, "status", "--porcelain"):
        obstacles.append("the checkout has changes: commit them, and run scripts/release again")
    if _git(root, "tag", "--list", f"v{version}"):
        obstacles.append(f"there is a tag v{version} already: raise cpuft.__version__")
    if not re.search(
        rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text("utf-8"), re.M
    ):
        obstacles.append(f"CHANGELOG.md has no heading with the date of version {version}: write it")
    if not (folder / SUMS).exists():
        return [*obstacles, f"{folder} was not checked to the end: run scripts/release"]
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    for machine in MACHINES:
        if not any(name.endswith(f"_{machine}.whl") for name in sums):
            package = f"g++-{machine.replace('_', '-')}-linux-gnu"
            obstacles.append(f"no wheel for {machine}: apt-get install {package}, and run scripts/release again")
    for name in sorted({*sums, *(path.name for path in folder.iterdir())} - {SUMS}):
        if not name.startswith(f"cpuft-{version}") or not (folder / name).exists():
            obstacles.append(f"{name} is not of version {version}, or missing: run scripts/release again")
        elif sums.get(name) != hash_file(folder / name):
            obstacles.append(f"{name} is not what scripts/release has checked: run it again")
    commit = json.loads((folder / BILL).read_text(encoding="utf-8"))["metadata"]["component"]["pedigree"]["commits"][0]
    if commit["uid"] != _git(root, "describe", *_COMMIT):
        obstacles.append(f"the files are of commit {commit['uid'][:8]}: run scripts/release again")
    return obstacles


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    checks: dict[str, Callable[..., list[str] | None]] = {
        "files": check_files,
        "bill": complete_bill,
        "report": check_report,
        "publish": find_obstacles,
    }
    sys.exit("\n".join(checks[kind](*map(Path, paths)) or ()) or 0)
