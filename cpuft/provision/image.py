"""Builds the golden root filesystem with debootstrap and the recipe's script, and stamps it with what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.plan import Plan, Step
from cpuft.provision.converge import run_here, run_stages
from cpuft.provision.machine import find_program
from cpuft.provision.recipe import Recipe, format_install

STAMP = "etc/cpuft-image.json"
_BUILD_SECONDS = 1800.0
_VOLATILE = (
    "var/log",
    "var/cache",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/lib/systemd",
    "tmp",
    "run",
    "proc",
    "sys",
    "dev",
)
"""Written anew by every build, with times in it."""


def plan_image(recipe: Recipe, target: str, debootstrap: str) -> Plan:
    """Steps that build the image beside `target` and rename it."""
    root = f"{target}.new"
    include = ",".join(package.name for package in recipe.packages)
    strap = (debootstrap, "--variant=minbase", f"--include={include}", recipe.suite, root, recipe.mirror)
    # Every host makes keys of its own: those of an image would be the same on all of them, and known to its readers.
    clean = 'rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/machine-id; : >"$1/etc/machine-id"; rm -rf "$1"/var/cache/apt/*'
    return Plan(
        (
            (Step("start from nothing", ("rm", "-rf", "--one-file-system", root)),),
            (Step(f"unpack Debian {recipe.suite} and its packages", strap),),
            (Step("apply the recipe", ("chroot", root, "sh", "-s"), stdin=format_install(recipe)),),
            (Step("forget what must differ from host to host", ("sh", "-c", clean, "clean", root)),),
        )
    )


def build(recipe: Recipe, target: str, as_root: bool, say: Callable[[str], None]) -> str:
    """Build the image in folder `target`; a sentence for the user.

    Raises
    ------
    CpuftError: not root, no debootstrap, a step failed, or there is another image at `target`.
    """
    debootstrap = find_program("debootstrap")
    if not as_root or not debootstrap:
        raise CpuftError("an image needs root and debootstrap: run it with sudo, after apt-get install debootstrap")
    path = Path(target).absolute()
    if path.exists():
        if read_stamp(path).get("recipe") == recipe.digest:
            return f"image {target} is as the recipe says"
        raise CpuftError(f"{target} exists and is of another recipe: remove it, or name a new directory")
    run_stages(plan_image(recipe, str(path), debootstrap), lambda step: run_here(step, _BUILD_SECONDS), say)
    built = Path(f"{path}.new")
    stamp = {"format": 1, "recipe": recipe.digest, "packages": list_packages(built), "contents": hash_contents(built)}
    (built / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    built.rename(path)
    return f"image {target}: contents {stamp['contents']}; next: cpuft provision local --image {target}"


def read_stamp(root: Path) -> dict[str, object]:
    """What an image says of itself; empty for a folder that is none."""
    try:
        values = json.loads((root / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def list_packages(root: Path) -> list[str]:
    """name=version of every Debian package in it."""
    command = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f=${Package}=${Version}\\n")
    answer = execute.run_quietly(command, seconds=60)
    if answer.exit_code:
        raise CpuftError(f"{root} lists no packages ({answer.output.strip()[-200:]}): build it anew")
    return sorted(answer.output.split())


def hash_contents(root: Path) -> str:
    """A fingerprint of all files: names, modes, owners and contents, without what every build writes anew."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        names[:] = sorted(n for n in names if os.path.normpath(f"{inside}/{n}") not in _VOLATILE and n != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            digest.update(f"{inside}/{name} {state.st_mode:o} {state.st_uid} {state.st_gid}\0".encode())
            digest.update(_content(path, state.st_mode))
    return digest.hexdigest()[:16]


def _content(path: str, mode: int) -> bytes:
    if stat.S_ISLNK(mode):
        return os.readlink(path).encode()
    if not stat.S_ISREG(mode):
        return b""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).digest()
