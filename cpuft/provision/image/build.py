"""Builds the golden root filesystem with debootstrap and the recipe's script, and stamps it with what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.files import REMOVE, hash_file
from cpuft.loader import load, parse_json
from cpuft.plan import Plan, Step
from cpuft.provision.image.recipe import Recipe, format_install
from cpuft.provision.image.sources import choose_mirror, gather_sources
from cpuft.provision.local.facts import find_program
from cpuft.provision.reconcile import make_runner, plan_file, run_stages
from cpuft.provision.wheels import Wheel, fetch_wheels, list_pins, make_stamp, own_folder, read_wheels

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
    "etc/ld.so.cache",
    "etc/shadow",
    "etc/shadow-",
    STAMP,
)
"""Written anew by every build, with times in it."""

_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"

# Every host makes keys of its own: those of an image would be the same on all of them, and known to its readers.
_CLEAN = f"""set -eu
{REMOVE}
remove "$1" "$1$2/wheels" "$1$2/install.lock" "$1"/var/cache/apt/* "$1"/root/.cache "$1"/etc/ssh/ssh_host_*
for file in machine-id hostname resolv.conf; do rm -f "$1/etc/$file"; : >"$1/etc/$file"; done
"""

# Written first, and whole at the end: what carries it is an image of ours, or was to be one.
_BEGIN = f"""set -eu
{REMOVE}
if [ -e "$1" ] && [ ! -f "$1/{STAMP}" ]; then
    echo "$1 is not cpuft's: move it away, or name another --output" >&2
    exit 1
fi
remove "$(dirname "$1")" "$1"
mkdir "$1" "$1/etc"
echo "{{}}" >"$1/{STAMP}"
"""


def plan_image(recipe: Recipe, target: str, debootstrap: str, mirror: str, wheels: tuple[Wheel, ...]) -> Plan:
    """Steps that build the image beside `target`, its Python environment included, and prove that it trains."""
    root, prefix = f"{target}.new", recipe.environment.prefix
    include = ",".join(package.name for package in recipe.packages)
    strap = (debootstrap, "--variant=minbase", f"--include={include}", recipe.base.suite, root, mirror)
    bring = ("install", "-D", "--mode=644", f"--target-directory={root}{prefix}/wheels", *(one.path for one in wheels))
    pins = list_pins(wheels)
    install = ("chroot", root, "sh", "-s", prefix, make_stamp(pins, wheels), *pins)
    return Plan(
        (
            (Step("start from nothing", ("sh", "-c", _BEGIN, "begin", root)),),
            (Step(f"unpack Debian {recipe.base.suite} and its packages", strap),),
            (Step(f"bring {len(wheels)} wheels", bring),),
            (Step("apply the recipe, and install the environment", install, stdin=format_install(recipe)),),
            (plan_file(f"{root}/etc/hosts", _HOSTS, "let it know its own loopback address"),),
            (Step("check it inside: imports, mpirun, two ranks that add up numbers", _plan_check(root, recipe)),),
            (
                Step(
                    "forget the builder, and what must differ from host to host",
                    ("sh", "-c", _CLEAN, "clean", root, prefix),
                ),
            ),
        )
    )


def _plan_check(root: str, recipe: Recipe) -> tuple[str, ...]:
    script = str(Path(__file__).with_name("check_image.sh"))
    spaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
    return ("unshare", *spaces, "sh", script, root, environment_python(recipe))


def environment_python(recipe: Recipe) -> str:
    """Path of the environment's Python in the image."""
    return f"{recipe.environment.prefix}/env/bin/python"


def build(
    recipe: Recipe, target: str, folder: str, as_root: bool, environ: Mapping[str, str], say: Callable[[str], None]
) -> str:
    """Build the image in folder `target` with the wheels of `folder` (empty: download them); a sentence for the user.

    Raises
    ------
    CpuftError: not root, no debootstrap, a step failed, or there is another image at `target`.
    """
    debootstrap = find_program("debootstrap")
    if not as_root or not debootstrap:
        raise CpuftError("an image needs root and debootstrap: run it with sudo, after apt-get install debootstrap")
    path = Path(target).absolute()
    mirror = find_mirror(recipe)
    wheels = find_wheels(recipe, folder, environ, say)
    stamp = {"format": 1, "recipe": recipe.digest, "environment": make_stamp(list_pins(wheels), wheels)}
    if path.exists():
        if stamp.items() <= read_stamp(path).items():
            return f"image {target} is as the recipe says"
        raise CpuftError(f"{target} exists and is of another recipe or version: remove it, or name a new directory")
    plan = plan_image(recipe, str(path), debootstrap, mirror, wheels)
    run_stages(plan, make_runner(seconds=_BUILD_SECONDS), say)
    built = Path(f"{path}.new")
    lists = {"packages": list_packages(built), "wheels": sorted(list_pins(wheels))}
    contents = hash_contents(built)
    told = stamp | {"python": environment_python(recipe), "contents": contents} | lists
    (built / STAMP).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    built.rename(path)
    return f"image {target}: contents {contents}; next: cpuft provision local --image {target}"


def find_mirror(recipe: Recipe) -> str:
    """Where the image's packages come from. Raises CpuftError where neither the recipe nor this machine's apt tells."""
    return recipe.base.mirror or choose_mirror(gather_sources(), recipe.base.suite)


def check_image(image: str) -> None:
    """Raises CpuftError when --image is given and is none."""
    if image and not os.path.exists(f"{image}/usr/sbin/sshd"):
        raise CpuftError(f"--image {image}: there is no root filesystem with an sshd: name its directory")


def find_wheels(
    recipe: Recipe, folder: str, environ: Mapping[str, str], say: Callable[[str], None]
) -> tuple[Wheel, ...]:
    """What the image's environment is installed from."""
    source = Path(folder) if folder else fetch_wheels(recipe.environment.python, environ, say)
    return read_wheels(own_folder(environ), source)


def read_stamp(root: Path) -> dict[str, Any]:
    """What an image says of itself; empty for a folder that is none."""
    with suppress(OSError, ValueError):
        return load(dict[str, Any], parse_json((root / STAMP).read_text(encoding="utf-8")))
    return {}


def list_packages(root: Path) -> list[str]:
    """name=version of every Debian package in it."""
    command = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f=${Package}=${Version}\\n")
    answer = execute.run_quietly(command, seconds=60)
    if answer.exit_code:
        raise CpuftError(f"{root} lists no packages ({answer.said.strip()[-200:]}): build it anew")
    return sorted(answer.output.split())


def hash_contents(root: Path) -> str:
    """A fingerprint of all files: names, modes, owners and contents, without what every build writes anew."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        names[:] = sorted(n for n in names if os.path.normpath(f"{inside}/{n}") not in _VOLATILE and n != "__pycache__")
        for name in sorted(files):
            if f"{inside}/{name}" in _VOLATILE:
                continue
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
    return hash_file(Path(path)).encode()
