"""The golden image's recipe: read from YAML, turned into the script that every kind of host runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import hash_text
from cpuft.plan import format_comment
from cpuft.provision.options import RECIPE
from cpuft.provision.ownership import check_prefix
from cpuft.provision.wheels import EXTRAS, INSTALL
from cpuft.serialization import find_control, load, parse_yaml

_OWN = Path(__file__).with_name("recipe.yaml")
"""The recipe of the golden image. `ami/recipe.yaml` of the checkout is a link to it: only so a wheel contains it."""
_CONTAINER = Path(__file__).with_name("Containerfile.in").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Package:
    """A Debian package, and why it is there."""

    name: str
    reason: str


@dataclass(frozen=True)
class File:
    """A file of settings, and why."""

    path: str
    text: str
    reason: str


@dataclass(frozen=True)
class Environment:
    """Where training's Python packages go, and for which Python."""

    prefix: str
    python: str
    """Of the suite: "3.11"."""
    reason: str


@dataclass(frozen=True)
class Base:
    """What debootstrap unpacks."""

    suite: str
    mirror: str = ""
    """Where it is fetched from; empty for where the builder's own apt fetches from."""


@dataclass(frozen=True)
class Recipe:
    """All that distinguishes the image from its base."""

    base: Base
    packages: tuple[Package, ...]
    environment: Environment
    files: tuple[File, ...]

    @property
    def digest(self) -> str:
        """A fingerprint of the recipe."""
        text = "\n".join([format_install(self), self.base.suite, self.environment.prefix, self.environment.python])
        return hash_text(text, 16)


def read_recipe(path: str) -> Recipe:
    """The recipe in a YAML file; without a checkout around, the default path means the recipe that cpuft contains.

    Raises CpuftError for a file that cannot be read or is no recipe.
    """
    own = path == RECIPE and not Path(path).exists()
    try:
        text = (_OWN if own else Path(path)).read_text(encoding="utf-8")
        recipe = load(Recipe, parse_yaml(text))
        check_prefix(recipe.environment.prefix)
        _refuse_control(recipe)
        return recipe
    except (OSError, ValueError, CpuftError) as error:
        raise CpuftError(
            f"recipe {path} cannot be used ({' '.join(str(error).split())}): compare it with ami/recipe.yaml"
        ) from None


def _refuse_control(recipe: Recipe) -> None:
    """Raises ValueError when a value has a control character: it would break a line of what is made of the recipe.

    The text of a file may have tabs and several lines.
    """
    parts = (recipe.base, recipe.environment, *recipe.packages, *recipe.files)
    for part in parts:
        for name, value in vars(part).items():
            if odd := find_control(value, "\n\t" if isinstance(part, File) and name == "text" else ""):
                raise ValueError(f"{name} {value[:60]!r} contains the control character {odd!r}")


def format_install(recipe: Recipe) -> str:
    """A shell script that makes a Debian host, container or image what the recipe says. Running it again is safe."""
    parts = [
        "#!/bin/sh",
        "# Made from recipe.yaml by `cpuft provision recipe`: change that, not this. Run it as root.",
        "#   install.sh [PREFIX STAMP PIN...]      without arguments it installs no training environment",
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


def format_container(recipe: Recipe) -> str:
    """A container file that makes the same of Debian's own image, for root, with sshd and without any host's key."""
    suite, environment = recipe.base.suite, recipe.environment
    told = {"prefix": environment.prefix, "reason": environment.reason, "extras": ",".join(EXTRAS)}
    return _CONTAINER.format(suite=suite, **told)
