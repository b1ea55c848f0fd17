"""Golden images at AWS, made: an instance is rented, installed, proven, sealed and imaged; and it ends."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cpuft.errors import CpuftError, near_names
from cpuft.files import REMOVE
from cpuft.hosts.cluster import WORK_ROOT
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport
from cpuft.plan import Plan, Step
from cpuft.provision.aws.client import ENVIRONMENT, IMAGE, OWNER, parse_call, plan_call, tag_all
from cpuft.provision.aws.facts import COMING, READY, Golden, Images, find_images, find_named
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws, Edge
from cpuft.provision.base import Ask, Say, lock, reconcile, run_stages
from cpuft.provision.cluster_files import is_ours
from cpuft.provision.image import CHECK, PROVE, Recipe, environment_python, format_install, read_recipe
from cpuft.provision.options import ImageConfig
from cpuft.provision.wheels import Supply, gather_supply, list_pins, make_stamp


def name_image(recipe: str, environment: str) -> str:
    """What an image is called, by the recipe's digest and the environment's stamp: the same name is the same image."""
    return f"cpuft-{recipe}-{environment[:12]}"


def is_ready(image: Golden | None, name: str) -> bool:
    """Whether an image that was found under a name is there; False while it is being made, or for none.

    Raises CpuftError: it is not cpuft's, or it came to nothing.
    """
    if image and not image.recipe:
        raise CpuftError(f"image {image.id} is called {name} and is not cpuft's: deregister it")
    if image and image.state not in (READY, COMING):
        raise CpuftError(f"image {name} is {image.state}: take it away with cpuft provision image --delete {name}")
    return bool(image and image.state == READY)


def plan_imaging(instance: str, name: str, recipe: str, environment: str, owner: str, region: str) -> Step:
    """Make an image of an instance; AWS shuts it down for that, so that its disk is whole, and starts it again."""
    tags = {IMAGE: recipe, ENVIRONMENT: environment, OWNER: owner, "Name": name}
    parameters = {
        "InstanceId": instance,
        "Name": name,
        "Description": "Made by cpuft provision image",
        "TagSpecifications": tag_all(tags, "image", "snapshot"),
    }
    return plan_call("create_image", f"make image {name}", region, parameters)


def plan_deletion(found: Images, wanted: str, region: str) -> Plan:
    """Take away an image by its name or id, then its snapshots, strays of the same name among them.

    Raises CpuftError: cpuft has made none that is called so.
    """
    images = [one for one in found.images if wanted in (one.id, one.name)]
    names = {wanted, *(one.name for one in images)}
    disks = {snapshot for image in images for snapshot in image.snapshots}
    snapshots = sorted(one.id for one in found.snapshots if one.name in names or one.id in disks)
    if not images and not snapshots:
        known = {one.name for one in found.images} | {one.name for one in found.strays}
        raise CpuftError(
            f"cpuft has made no image {wanted!r:.80} in {region}: "
            f"{near_names(wanted, known) if known else 'there is nothing to take away'}"
        )
    gone = [plan_call("deregister_image", f"take away image {one.name}", region, {"ImageId": one.id}) for one in images]
    left = [plan_call("delete_snapshot", "take away its snapshot", region, {"SnapshotId": one}) for one in snapshots]
    return Plan(tuple(tuple(stage) for stage in (gone, left) if stage))


def describe_images(found: Images, region: str) -> str:
    """A line for each image, and for what is left of one."""
    lines = [
        f"{one.name}  {one.id}  {one.state}, {one.gigabytes} GB, made {one.made[:16].replace('T', ' ')} UTC"
        for one in found.images
    ]
    lines += [f"{one.name}  {one.id}  a snapshot whose image is gone" for one in found.strays]
    return "".join(f"{line}\n" for line in lines or [f"cpuft has made no image in {region}"])


_SUITE = "bookworm"
"""What AWS's own image of Debian 12 is."""
_LEASE = "2h"
_DISK_GB = 16
_IMAGE_SECONDS = 3600.0
_POLL_SECONDS = 5.0
_HERE = Path(__file__)
_THROUGH = "set -eu\n" + _HERE.with_name("through.sh").read_text(encoding="utf-8")
_SEAL = f"set -eu\n{REMOVE}" + _HERE.with_name("seal.sh").read_text(encoding="utf-8")
_PORT = "3128"


class Builder:
    """A rented cluster of one, and what becomes of it."""

    def __init__(self, config: ImageConfig, environ: Mapping[str, str], edge: Edge | None = None) -> None:
        self.recipe, self.environ, self.edge = read_recipe(config.recipe), environ, edge or Edge()
        if self.recipe.base.suite != _SUITE:
            raise CpuftError(f"an AMI is made of Debian {_SUITE}, and {config.recipe} wants {self.recipe.base.suite}")
        asked = AwsConfig(nodes=1, name=f"image{self.recipe.digest[:8]}", lease=_LEASE, lease_limit=_LEASE, recipe="")
        asked = replace(asked, type=config.type, region=config.region, zone=config.zone, ssh_from=config.ssh_from)
        asked = replace(asked, disk=_DISK_GB, placement_group=False, prefix=self.recipe.environment.prefix)
        self.lab = Aws(replace(asked, wheels=config.wheels, yes=config.yes), environ, edge=self.edge)

    def make(self, say: Say, ask: Ask) -> str:
        """The image, where there is none yet; a sentence for the user. Whatever happens, the instance ends."""
        stamp = _stamp(reconcile(self._gather_supply, _plan_supply, say))
        name = name_image(self.recipe.digest, stamp)
        with lock(self.lab.root / f"{self.lab.name}.image"):
            found = find_named(self.lab.cloud, name)
            ready = is_ready(found, name)
            self._clear(say, ready)
            if ready:
                return f"image {name} is there{_next(self.lab.config.region)}"
            try:
                if not found:
                    self._build(name, stamp, say, ask)
                self._await(name)
            finally:
                self._clear(say)
        return f"image {name} is made{_next(self.lab.config.region)}"

    def show(self) -> Plan:
        """What `make` would do first, and what then. Changes nothing."""
        supply = self._gather_supply()
        if not supply.complete:
            note = "the image is named by what is in it: its steps are known when the wheels are here"
            return replace(_plan_supply(supply), notes=(note,))
        name = name_image(self.recipe.digest, _stamp(supply))
        if is_ready(find_named(self.lab.cloud, name), name):
            return Plan()
        later = [step.why for stage in plan_finish(self.recipe, "", ("",)).stages for step in stage]
        plan = self.lab.show()
        then = [f"then: {why}" for why in (*later, f"make image {name}", "end the instance, whatever has happened")]
        return replace(plan, notes=(*plan.notes, *then))

    def _gather_supply(self) -> Supply:
        own, wheels = self.lab.directory / "wheels", self.lab.config.wheels
        return gather_supply(own, wheels, self.recipe.environment.python, self.environ)

    def _clear(self, say: Say, ready: bool = False) -> None:
        """Leave no instance. Raises CpuftError: another machine has one, at work unless the image is `ready`."""
        facts = self.lab.gather_remains().rental
        if is_ours(facts.files, facts.directory):
            say(self.lab.down(say))
        elif (facts.found.group or facts.found.live) and not ready:
            down = f"cpuft provision down {self.lab.name} --region {facts.region}"
            raise CpuftError(f"another machine makes this image: wait for it, or {down}")

    def _build(self, name: str, stamp: str, say: Say, ask: Ask) -> None:
        self.lab.make(say, ask)
        found = self.lab.gather_remains().rental.found
        one = found.live[0]
        if self.edge.logs_in:
            way = Transport(str(self.lab.directory / "ssh_config"), elsewhere=True).way(Host(one.private))
            run_stages(plan_finish(self.recipe, one.private, way), say)
        step = plan_imaging(one.id, name, self.recipe.digest, stamp, found.owner, self.lab.config.region)
        self.lab.run(Plan(((step,),)), say)

    def _await(self, name: str) -> None:
        """Until the image is there. Raises CpuftError when that takes too long, or it comes to nothing."""
        end = self.edge.now() + _IMAGE_SECONDS
        while not is_ready(find_named(self.lab.cloud, name), name):
            if self.edge.now() > end:
                raise CpuftError(f"image {name} is not there after {_IMAGE_SECONDS / 60:.0f} min: run it again")
            self.edge.sleep(_POLL_SECONDS)


def _plan_supply(supply: Supply) -> Plan:
    return Plan() if supply.complete else Plan((supply.missing[-1:],))


def _stamp(supply: Supply) -> str:
    return make_stamp(list_pins(supply.wheels), supply.wheels)


def _next(region: str) -> str:
    return f"; next: cpuft provision aws --region {region}"


def plan_finish(recipe: Recipe, host: str, way: tuple[str, ...]) -> Plan:
    """What makes a host that has its environment an image's: packages and files, the proof, and no identity.

    `way` is ssh's words to it. Packages come through this machine: the host itself reaches nobody else.
    """
    assert way, "this machine keeps its identity"
    line = shlex.join(("sh", "-c", _THROUGH, "through", _PORT, format_install(recipe)))
    through = (*way[:-1], "-o", "ExitOnForwardFailure=yes", "-R", f"127.0.0.1:{_PORT}", *way[-1:], line)
    prefix = recipe.environment.prefix
    steps = (
        Step("apply the recipe, its packages fetched through this machine", through),
        Step(CHECK, ("sh", "-c", PROVE, "prove", environment_python(recipe)), host=host),
        Step("forget every key, name and memory of it", ("sh", "-c", _SEAL, "seal", "/", prefix, WORK_ROOT), host=host),
    )
    return Plan(tuple((step,) for step in steps), ways={host: way})


def list_images(region: str, edge: Edge | None = None) -> str:
    """All images that cpuft has made for this account in a region."""
    cloud = (edge or Edge()).open_cloud(region)
    return describe_images(find_images(cloud), cloud.region)


def delete_image(wanted: str, region: str, dry_run: bool, say: Say, edge: Edge | None = None) -> Plan:
    """Take away an image and its snapshots; the plan of it. Raises CpuftError: cpuft has made none of that name."""
    cloud = (edge or Edge()).open_cloud(region)
    plan = plan_deletion(find_images(cloud), wanted, cloud.region)
    for step in () if dry_run else (step for stage in plan.stages for step in stage):
        call = parse_call(step)
        assert call, step
        say(step.why)
        cloud.do(call)
    return plan
