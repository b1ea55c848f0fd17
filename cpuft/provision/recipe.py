"""The golden image's recipe: read from YAML, turned into the script that every kind of host runs."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.plan import format_comment

_KEYS = {"base", "packages", "environment", "files"}
_ENVIRONMENT = Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")


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
class Recipe:
    """All that distinguishes the image from its base."""

    suite: str
    mirror: str
    packages: tuple[Package, ...]
    environment: Environment
    files: tuple[File, ...]

    @property
    def digest(self) -> str:
        """A fingerprint of the recipe."""
        text = "\n".join([format_install(self), self.suite, self.environment.prefix, self.environment.python])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_recipe(path: str) -> Recipe:
    """The recipe in a YAML file. Raises CpuftError for a file that cannot be read or is no recipe."""
    import yaml

    try:
        values: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if set(values) != _KEYS:
            raise ValueError(f"it has {', '.join(map(str, values))} instead of {', '.join(sorted(_KEYS))}")
        packages = tuple(Package(**package) for package in values["packages"])
        files = tuple(File(**file) for file in values["files"])
        environment = Environment(**values["environment"])
        return Recipe(values["base"]["suite"], values["base"]["mirror"], packages, environment, files)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise CpuftError(
            f"recipe {path} cannot be used ({' '.join(str(error).split())}): compare it with ami/recipe.yaml"
        ) from None


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
    parts += ["[ $# -gt 0 ] || exit 0", format_comment(recipe.environment.reason), _ENVIRONMENT.rstrip("\n")]
    return "\n".join(parts) + "\n"
