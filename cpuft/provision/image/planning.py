"""The golden root filesystem, planned: debootstrap, the recipe's script, a proof, and a stamp with what is in it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import REMOVE
from cpuft.plan import Plan, Step
from cpuft.provision.image.recipe import Recipe, format_install
from cpuft.provision.image.stamp import STAMP
from cpuft.provision.reconcile import plan_file
from cpuft.provision.wheels import Supply, list_pins, make_stamp, plan_own_wheel
from cpuft.words import own_module

_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"

CHECK = "check it inside: imports, mpirun, two ranks that add up numbers"
_FOLDER = Path(__file__).parent
_BEGIN = f"set -eu\n{REMOVE}" + (_FOLDER / "begin.sh").read_text(encoding="utf-8")
PROVE = (_FOLDER / "prove.sh").read_text(encoding="utf-8")
"""A shell script, its argument an environment's Python."""
_CLEAN = f"set -eu\n{REMOVE}" + (_FOLDER / "clean.sh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class ImageFacts:
    """What planning an image needs to know of this machine."""

    debootstrap: str
    """Its path, or its name where it is missing."""
    mirror: str
    """Where Debian's packages come from."""
    supply: Supply
    stamp: dict[str, object] | None = None
    """What the image at its place says of itself; None where nothing is."""


def plan_image(recipe: Recipe, target: str, facts: ImageFacts) -> Plan:
    """What is missing of the image at `target`: steps that build it beside its place, environment and proof included.

    Raises CpuftError: there is another one, or something else.
    """
    pins = list_pins(facts.supply.wheels)
    told: dict[str, object] = {"format": 1, "recipe": recipe.digest}
    told |= {"environment": make_stamp(pins, facts.supply.wheels)} if facts.supply.complete else {}
    if facts.stamp is not None and not told.items() <= facts.stamp.items():
        raise CpuftError(f"{target} exists and is of another recipe or version: remove it, or name a new directory")
    if not facts.supply.complete:
        note = "the image is built from wheels: its steps are known when they are here"
        return Plan((facts.supply.missing[-1:],), (note,))
    told |= {"python": environment_python(recipe), "wheels": sorted(pins)}
    steps = _plan_build(recipe, target, facts, told) if facts.stamp is None else ()
    return Plan(tuple((step,) for step in steps))


def _plan_build(recipe: Recipe, target: str, facts: ImageFacts, told: dict[str, object]) -> tuple[Step, ...]:
    root, prefix = f"{target}.new", recipe.environment.prefix
    include = ",".join(package.name for package in recipe.packages)
    strap = (facts.debootstrap, "--variant=minbase", f"--include={include}", recipe.base.suite, root, facts.mirror)
    given = [wheel.path for wheel in facts.supply.wheels if not wheel.path.startswith(root)]
    bring = ("install", "-D", "--mode=644", f"--target-directory={root}{prefix}/wheels", *given)
    pins = list_pins(facts.supply.wheels)
    install = ("chroot", root, "sh", "-s", prefix, make_stamp(pins, facts.supply.wheels), *pins)
    stamp = (*own_module(sys.executable, "cpuft.provision.image.stamp"), target, json.dumps(told))
    return (
        Step("start from nothing", ("sh", "-c", _BEGIN, "begin", root, STAMP)),
        Step(f"unpack Debian {recipe.base.suite} and its packages", strap),
        plan_own_wheel(Path(f"{root}{prefix}/wheels")),
        Step(f"bring {len(given)} wheels", bring),
        Step("apply the recipe, and install the environment", install, stdin=format_install(recipe)),
        plan_file(f"{root}/etc/hosts", _HOSTS, "let it know its own loopback address"),
        Step(CHECK, _plan_check(root, recipe)),
        Step("forget the builder, and what differs from host to host", ("sh", "-c", _CLEAN, "clean", root, prefix)),
        Step("stamp it with what is in it, and put it in its place", stamp),
    )


def _plan_check(root: str, recipe: Recipe) -> tuple[str, ...]:
    script = str(_FOLDER / "check_image.sh")
    spaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
    return ("unshare", *spaces, "sh", script, root, environment_python(recipe), PROVE)


def environment_python(recipe: Recipe) -> str:
    """Path of the environment's Python in the image."""
    return f"{recipe.environment.prefix}/env/bin/python"
