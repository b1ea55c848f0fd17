"""The golden image: its recipe, the plan that builds a root filesystem from it, and the stamp of a finished image.

`python -m cpuft.provision.image IMAGE JSON` is the last step of a build: it stamps IMAGE.new and renames it to IMAGE.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import CpuftError, describe_error
from cpuft.files import REMOVE, hash_text, remove_command
from cpuft.plans import Plan, Step, format_comment
from cpuft.provision.base import Say, reconcile
from cpuft.provision.cluster_files import check_prefix, plan_file
from cpuft.provision.options import RECIPE
from cpuft.provision.wheels import INSTALL, Supply, gather_supply, list_pins, make_stamp, plan_own_wheel
from cpuft.serialization import find_control, load, parse_json, parse_yaml

STAMP = "etc/cpuft-image.json"
"""The file in an image that says how it was built and what it contains."""
CHECK = "check the environment in the image: imports, mpirun, two ranks over every backend"
"""Reason of the step that runs `PROVE`."""
_HERE = Path(__file__)
PROVE = _HERE.with_name("image_prove.sh").read_text(encoding="utf-8")
"""Shell script that checks an environment by training with it; its argument is the path of the environment's Python."""
_CLEAN = f"set -eu\n{REMOVE}" + _HERE.with_name("image_clean.sh").read_text(encoding="utf-8")
_OWN_RECIPE = _HERE.with_name("recipe.yaml")
"""It lies in the package so that wheels contain it; `ami/recipe.yaml` links to it."""
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


@dataclass(frozen=True)
class Package:
    """A Debian package, and why the image has it."""

    name: str
    reason: str


@dataclass(frozen=True)
class File:
    """A configuration file, and why the image has it."""

    path: str
    """Absolute, in the image."""
    text: str
    reason: str


@dataclass(frozen=True)
class Environment:
    """Where the Python environment for training is installed, and for which Python."""

    prefix: str
    """Such as "/opt/cpuft"."""
    python: str
    """Version in the Debian suite, such as "3.11"."""
    reason: str


@dataclass(frozen=True)
class Base:
    """What debootstrap unpacks."""

    suite: str
    """Name of the Debian release: "bookworm"."""
    mirror: str = ""
    """Address of a package mirror; empty for debootstrap's default, deb.debian.org."""


@dataclass(frozen=True)
class Recipe:
    """Everything that distinguishes the image from its Debian base."""

    base: Base
    packages: tuple[Package, ...]
    environment: Environment
    files: tuple[File, ...]

    @property
    def digest(self) -> str:
        """Hash (16 hexadecimal digits) of all that decides on the contents, and of all reasons; not of the mirror."""
        text = "\n".join([format_install(self), self.base.suite, self.environment.prefix, self.environment.python])
        return hash_text(text, 16)


def read_recipe(path: str) -> Recipe:
    """Read a YAML recipe, cpuft's own if `path` is "ami/recipe.yaml" and missing. CpuftError: missing or bad file."""
    use_own = path == RECIPE and not Path(path).exists()
    try:
        text = (_OWN_RECIPE if use_own else Path(path)).read_text(encoding="utf-8")
        recipe = load(Recipe, parse_yaml(text))
        check_prefix(recipe.environment.prefix)
        _refuse_control_characters(recipe)
        return recipe
    except (OSError, ValueError, CpuftError) as error:
        reason = describe_error(error)
        raise CpuftError(f"recipe {path} cannot be used ({reason}): compare it with ami/recipe.yaml") from None


def _refuse_control_characters(recipe: Recipe) -> None:
    """Raise ValueError if a value has a control character, which would break a line of the generated scripts."""
    for part in (recipe.base, recipe.environment, *recipe.packages, *recipe.files):
        for name, value in vars(part).items():
            if character := find_control(value, "\n\t" if isinstance(part, File) and name == "text" else ""):
                raise ValueError(f"{name} {value[:60]!r} contains the control character {character!r}")


def format_install(recipe: Recipe) -> str:
    """Return a shell script for root on Debian that applies a recipe; with PREFIX STAMP PIN..., it installs cpuft."""
    parts = [
        "#!/bin/sh",
        "# Generated from recipe.yaml by `cpuft provision recipe`: edit recipe.yaml instead. Run this script as root.",
        "#   install.sh [PREFIX STAMP PIN...]      Without arguments, it installs no training environment.",
        "set -eu",
        "missing=",
        'need() { dpkg -s "$1" >/dev/null 2>&1 || missing="$missing $1"; }',
    ]
    parts += [f"{format_comment(package.reason)}\nneed {shlex.quote(package.name)}" for package in recipe.packages]
    parts.append(
        '[ -z "$missing" ] || { apt-get update && '
        "DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing; }"
    )
    for file in recipe.files:
        folder = file.path.rpartition("/")[0]
        parts.append(f"{format_comment(file.reason)}\nmkdir -p {shlex.quote(folder)}")
        parts.append(f"printf %s {shlex.quote(file.text)} >{shlex.quote(file.path)}")
    parts += ["[ $# -gt 0 ] || exit 0", format_comment(recipe.environment.reason), INSTALL.rstrip("\n")]
    return "\n".join(parts) + "\n"


def environment_python(recipe: Recipe) -> str:
    """Return PREFIX/env/bin/python, the path of the environment's Python in the image."""
    return f"{recipe.environment.prefix}/env/bin/python"


def check_image(image: str) -> None:
    """Raise CpuftError if `image` is given and has no `usr/sbin/sshd`, so that it is no root filesystem for hosts."""
    if image and not os.path.exists(f"{image}/usr/sbin/sshd"):
        raise CpuftError(f"--image {image} has no sshd: name the directory that cpuft provision image made")


def read_stamp(root: Path) -> dict[str, Any]:
    """Return the stamp of an image; {} if `root` is not a finished image, or its stamp is damaged.

    Its keys are `format` (1), `recipe` (digest), `environment` (stamp), `python` (path of the environment's Python),
    `wheels` (list of name==version) and `contents` (a random text, by which this build differs from others).
    """
    with suppress(OSError, ValueError):
        return load(dict[str, Any], parse_json((root / STAMP).read_text(encoding="utf-8")))
    return {}


def write_stamp(path: Path, values: dict[str, object]) -> None:
    """Write `values` and a new value of `contents` as stamp of PATH.new; rename that to `path`."""
    built = Path(f"{path}.new")
    values = values | {"contents": secrets.token_hex(8)}
    (built / STAMP).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    built.rename(path)


@dataclass(frozen=True)
class ImageFacts:
    """What planning an image needs to know of this machine."""

    debootstrap: str
    """Path of the program, or its name if it is not installed."""
    supply: Supply
    stamp: dict[str, object] | None = None
    """None if nothing is at the target path; {} if something there is no finished image."""


def gather_image(recipe: Recipe, target: str, wheels: str, environ: Mapping[str, str]) -> ImageFacts:
    """Return what exists of the image and its wheels. CpuftError: TARGET.new is not cpuft's, or wheels are unusable."""
    built = Path(f"{target}.new")
    if built.exists() and not (built / STAMP).is_file():
        raise CpuftError(f"{built} is not cpuft's: move it away, or give another --output")
    own = Path(f"{built}{recipe.environment.prefix}/wheels")
    supply = gather_supply(own, wheels, recipe.environment.python, environ)
    stamp = read_stamp(Path(target)) if os.path.exists(target) else None
    return ImageFacts(execute.find_program("debootstrap") or "debootstrap", supply, stamp)


def plan_image(recipe: Recipe, target: str, facts: ImageFacts) -> Plan:
    """Plan the image at `target`, built as TARGET.new: an empty plan if it exists; at first only the wheels' download.

    Raises CpuftError: `target` exists, and was not made from this recipe and these wheels.
    """
    pins = list_pins(facts.supply.wheels)
    values: dict[str, object] = {"format": 1, "recipe": recipe.digest}
    values |= {"environment": make_stamp(pins, facts.supply.wheels)} if facts.supply.complete else {}
    if facts.stamp is not None and not values.items() <= facts.stamp.items():
        raise CpuftError(
            f"{target} was not made from this recipe by this version of cpuft: remove it, or give a new directory"
        )
    if not facts.supply.complete:
        note = "The image is built from these wheels. The other steps can be shown when the wheels are downloaded."
        return Plan((facts.supply.missing[-1:],), (note,))
    values |= {"python": environment_python(recipe), "wheels": sorted(pins)}
    steps = _plan_build(recipe, target, facts, values) if facts.stamp is None else ()
    return Plan(tuple((step,) for step in steps))


def _plan_build(recipe: Recipe, target: str, facts: ImageFacts, values: dict[str, object]) -> tuple[Step, ...]:
    root, prefix, python = f"{target}.new", recipe.environment.prefix, environment_python(recipe)
    include = ",".join(package.name for package in recipe.packages)
    mirror = (recipe.base.mirror,) if recipe.base.mirror else ()
    debootstrap = (facts.debootstrap, "--variant=minbase", f"--include={include}", recipe.base.suite, root, *mirror)
    wheels = [wheel.path for wheel in facts.supply.wheels if not wheel.path.startswith(root)]
    copy = ("install", "-D", "--mode=644", f"--target-directory={root}{prefix}/wheels", *wheels)
    pins = list_pins(facts.supply.wheels)
    install = ("chroot", root, "sh", "-s", prefix, make_stamp(pins, facts.supply.wheels), *pins)
    namespaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
    check = ("unshare", *namespaces, "sh", str(_HERE.with_name("image_check.sh")), root, python, PROVE)
    stamp = (*module_command(sys.executable, "cpuft.provision.image"), target, json.dumps(values))
    return (
        Step("remove what an earlier build has left", remove_command(os.path.dirname(root), root)),
        plan_file(f"{root}/{STAMP}", "{}\n", "create the folder of the image, and mark it as cpuft's"),
        Step(f"install Debian {recipe.base.suite} and the packages of the recipe", debootstrap),
        plan_own_wheel(Path(f"{root}{prefix}/wheels"), platform.machine()),
        Step(f"copy {len(wheels)} wheels into the image", copy),
        Step("apply the recipe, and install the training environment", install, stdin=format_install(recipe)),
        plan_file(f"{root}/etc/hosts", _HOSTS, "write /etc/hosts with the loopback addresses"),
        Step(CHECK, check),
        Step("remove wheels, caches, host keys and machine identity", ("sh", "-c", _CLEAN, "clean", root, prefix)),
        Step("write the stamp of the image, and rename it to its final path", stamp),
    )


def make_image(recipe: Recipe, target: str, wheels: str, environ: Mapping[str, str], as_root: bool, say: Say) -> str:
    """Build the image at `target` unless it exists, and download its wheels; return a sentence for the user. Raises
    CpuftError: not `as_root`, debootstrap is missing, something else is at `target`, or a step fails.
    """
    if not as_root or not execute.find_program("debootstrap"):
        raise CpuftError("building an image needs root and debootstrap: install debootstrap with apt-get, and use sudo")
    before = read_stamp(Path(target))
    reconcile(partial(gather_image, recipe, target, wheels, environ), partial(plan_image, recipe, target), say)
    stamp = read_stamp(Path(target))
    if stamp == before:
        return f"image {target} exists already and matches the recipe"
    return f"built image {target} (contents {stamp.get('contents')}); next: cpuft provision local --image {target}"


if __name__ == "__main__":
    write_stamp(Path(sys.argv[1]), json.loads(sys.argv[2]))
