"""The golden image, made: facts of this machine, then what is missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.provision.image.planning import ImageFacts, plan_image
from cpuft.provision.image.recipe import Recipe
from cpuft.provision.image.sources import choose_mirror, gather_sources
from cpuft.provision.image.stamp import read_stamp
from cpuft.provision.local.facts import find_program
from cpuft.provision.reconcile import Say, reconcile
from cpuft.provision.wheels import gather_supply


def gather_image(recipe: Recipe, target: str, wheels: str, environ: Mapping[str, str]) -> ImageFacts:
    """What there is of the image already; `wheels` is a folder of them, empty for those that are downloaded.

    Raises CpuftError: neither the recipe nor this machine's apt names a mirror, or the folder holds no wheels.
    """
    own = Path(f"{target}.new{recipe.environment.prefix}/wheels")
    supply = gather_supply(own, wheels, recipe.environment.python, environ)
    mirror = recipe.base.mirror or choose_mirror(gather_sources(), recipe.base.suite)
    stamp = read_stamp(Path(target)) if os.path.exists(target) else None
    return ImageFacts(find_program("debootstrap") or "debootstrap", mirror, supply, stamp)


def make_image(recipe: Recipe, target: str, wheels: str, environ: Mapping[str, str], as_root: bool, say: Say) -> str:
    """Build the image in folder `target`; a sentence for the user.

    Raises CpuftError: not root, no debootstrap, a step failed, or there is another image at its place.
    """
    if not as_root or not find_program("debootstrap"):
        raise CpuftError("an image needs root and debootstrap: run it with sudo, after apt-get install debootstrap")
    before = read_stamp(Path(target))
    reconcile(partial(gather_image, recipe, target, wheels, environ), partial(plan_image, recipe, target), say)
    stamp = read_stamp(Path(target))
    if stamp == before:
        return f"image {target} is as the recipe says"
    return f"image {target}: contents {stamp.get('contents')}; next: cpuft provision local --image {target}"
