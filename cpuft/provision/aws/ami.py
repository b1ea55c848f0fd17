"""AMIs: made on an instance that is rented for this and terminated afterwards, listed and deleted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cpuft.errors import CpuftError, suggest_names
from cpuft.files import REMOVE
from cpuft.hosts.cluster import WORK_ROOT
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import SshTransport
from cpuft.plans import Plan, Step
from cpuft.provision.aws.client import CallStep, Tag, plan_call, read_tags, specify_tags
from cpuft.provision.aws.facts import PENDING, READY, Image, find_disk_size, find_images, find_machine
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws, Services
from cpuft.provision.base import Ask, Say, lock, reconcile, run_plan
from cpuft.provision.cluster_files import is_ours
from cpuft.provision.image import CHECK, PROVE, Recipe, environment_python, format_install, read_recipe
from cpuft.provision.options import ImageConfig
from cpuft.provision.wheels import Supply, gather_supply, list_pins, make_stamp

_SUITE = "bookworm"
"""Suite of the Debian 12 image that AWS offers, from which AMIs are made."""
_LEASE = "2h"
_DISK_GB = 16
_IMAGE_SECONDS = 3600.0
"""Time limit for AWS to make an AMI of the instance's disk."""
_POLL_SECONDS = 5.0
_HERE = Path(__file__)
_APT_PROXY = "set -eu\n" + _HERE.with_name("apt_proxy.sh").read_text(encoding="utf-8")
_CLEAN = f"set -eu\n{REMOVE}" + _HERE.with_name("ami_clean.sh").read_text(encoding="utf-8")
_PORT = "3128"


def name_image(recipe: str, environment: str) -> str:
    """Return an AMI's name, cpuft-DIGEST-STAMP, of the recipe's digest and 12 digits of the environment's stamp."""
    return f"cpuft-{recipe}-{environment[:12]}"


def is_ready(image: Image | None, name: str) -> bool:
    """Whether an AMI was found under `name` and can be used now; CpuftError if it never can, or is not cpuft's."""
    if not image:
        return False
    if Tag.IMAGE not in read_tags(image):
        raise CpuftError(f"AMI {image['ImageId']} has the name {name}, but cpuft did not make it: deregister it")
    if image["State"] not in (READY, PENDING):
        raise CpuftError(
            f"AMI {name} could not be made ({image['State']}): delete it with `cpuft provision image --delete {name}`"
        )
    return bool(image["State"] == READY)


def _plan_ami(instance: str, name: str, recipe: str, environment: str, owner: str, region: str) -> CallStep:
    """Return the call that makes a tagged AMI of an instance, which AWS shuts down first."""
    tags = {Tag.IMAGE: recipe, Tag.ENVIRONMENT: environment, Tag.OWNER: owner, "Name": name}
    parameters = {
        "InstanceId": instance,
        "Name": name,
        "Description": "Made by cpuft provision image",
        "TagSpecifications": specify_tags(tags, "image", "snapshot"),
    }
    return plan_call("create_image", f"make AMI {name}", region, parameters)


def plan_deletion(images: Sequence[Image], wanted: str, region: str) -> Plan:
    """Return the step that deletes the AMI with this name or id and its snapshots; CpuftError: there is none."""
    found = {str(one["ImageId"]): str(one["Name"]) for one in images if wanted in (one["ImageId"], one["Name"])}
    if not found:
        names = [str(one["Name"]) for one in images]
        known = suggest_names(wanted, names) if names else "there is nothing to delete"
        raise CpuftError(f"cpuft has made no AMI {wanted!r:.80} in {region}: {known}")
    calls = [
        plan_call(
            "deregister_image",
            f"delete AMI {name} and its snapshots",
            region,
            {"ImageId": image, "DeleteAssociatedSnapshots": True},
        )
        for image, name in found.items()
    ]
    return Plan((tuple(calls),))


def describe_images(images: Sequence[Image], region: str) -> str:
    """Return lines `NAME  ID  STATE, 16 GB, made 2027-01-15 10:00 UTC`, or one that says that there is no AMI; each
    line ends with a newline.
    """
    lines = [
        f"{one['Name']}  {one['ImageId']}  {one['State']}, {find_disk_size(one)} GB, "
        f"made {one['CreationDate'][:16].replace('T', ' ')} UTC"
        for one in images
    ]
    return "".join(f"{line}\n" for line in lines or [f"cpuft has made no AMI in {region}"])


class AmiBuilder:
    """Makes an AMI from a recipe for Debian bookworm (else CpuftError) on one instance, which is always terminated."""

    def __init__(self, config: ImageConfig, environ: Mapping[str, str], services: Services | None = None) -> None:
        self.recipe, self.environ, self.services = read_recipe(config.recipe), environ, services or Services()
        if self.recipe.base.suite != _SUITE:
            raise CpuftError(f"AMIs are made from Debian {_SUITE} only: set the suite in {config.recipe} to {_SUITE}")
        cluster = AwsConfig(
            nodes=1,
            name=f"image{self.recipe.digest[:8]}",
            type=config.type,
            lease=_LEASE,
            lease_limit=_LEASE,
            image="",
            region=config.region,
            zone=config.zone,
            disk=_DISK_GB,
            placement_group=False,
            ssh_from=config.ssh_from,
            prefix=self.recipe.environment.prefix,
            wheels=config.wheels,
            yes=config.yes,
        )
        self.cluster = Aws(cluster, environ, services=self.services)

    def make(self, say: Say, ask: Ask) -> str:
        """Make the AMI unless it exists, and wait up to an hour for AWS to finish it; return a sentence for the user.

        Wheels are downloaded to this machine first, because the AMI's name depends on them. Raises CpuftError: another
        machine is making the AMI, the user refuses, a step fails, or the hour is over.
        """
        stamp = _make_stamp(reconcile(self._gather_supply, _plan_supply, say))
        name = name_image(self.recipe.digest, stamp)
        hint = f"next: cpuft provision aws --region {self.cluster.config.region}"
        with lock(self.cluster.root / f"{self.cluster.name}.image"):
            found = self._find_image(name)
            ready = is_ready(found, name)
            self._remove_instance(say, ready)
            if ready:
                return f"AMI {name} exists already; {hint}"
            try:
                if not found:
                    self._build(name, stamp, say, ask)
                self._wait_until_ready(name)
            finally:
                self._remove_instance(say)
        return f"AMI {name} was made; {hint}"

    def show(self) -> Plan:
        """Return the first plan of `make`, whose notes say what follows; it is empty if the AMI exists."""
        supply = self._gather_supply()
        if not supply.complete:
            note = "The AMI's name depends on its wheels, so the other steps are planned when the wheels are downloaded"
            return replace(_plan_supply(supply), notes=(note,))
        name = name_image(self.recipe.digest, _make_stamp(supply))
        if is_ready(self._find_image(name), name):
            return Plan()
        later = [step.why for stage in plan_finish(self.recipe, "", ("",)).stages for step in stage]
        later += [f"make AMI {name}", "terminate the instance, even after an error"]
        plan = self.cluster.show()
        return replace(plan, notes=(*plan.notes, *(f"then: {why}" for why in later)))

    def _find_image(self, name: str) -> Image | None:
        return next(iter(find_images(self.cluster.client, "name", name)), None)

    def _gather_supply(self) -> Supply:
        folder, wheels = self.cluster.directory / "wheels", self.cluster.config.wheels
        machine = find_machine(self.cluster.config.type)
        return gather_supply(folder, wheels, self.recipe.environment.python, self.environ, machine)

    def _remove_instance(self, say: Say, ready: bool = False) -> None:
        """Remove the cluster if this machine made it; CpuftError if another one did, and its AMI is not `ready` yet."""
        facts = self.cluster.gather_remains()
        if is_ours(facts.files, facts.directory):
            say(self.cluster.down(say))
        elif (facts.resources.group or facts.resources.live) and not ready:
            raise CpuftError(
                "another machine is making this AMI: wait until it is done, or stop it with `cpuft provision down "
                f"{self.cluster.name} --region {facts.region}`"
            )

    def _build(self, name: str, stamp: str, say: Say, ask: Ask) -> None:
        self.cluster.make(say, ask)
        resources = self.cluster.gather_remains().resources
        instance, region = resources.live[0], self.cluster.config.region
        if self.services.uses_ssh:
            transport = SshTransport(str(self.cluster.directory / "ssh_config"), here="")
            prefix = transport.command_prefix(Host(instance.private))
            run_plan(plan_finish(self.recipe, instance.private, prefix), say)
        step = _plan_ami(instance.id, name, self.recipe.digest, stamp, resources.caller, region)
        self.cluster.run(Plan(((step,),)), say)

    def _wait_until_ready(self, name: str) -> None:
        end = self.services.now() + _IMAGE_SECONDS
        while not is_ready(self._find_image(name), name):
            if self.services.now() > end:
                raise CpuftError(f"AMI {name} is not ready after an hour: run the command again to continue waiting")
            self.services.sleep(_POLL_SECONDS)


def _plan_supply(supply: Supply) -> Plan:
    return Plan() if supply.complete else Plan((supply.missing[-1:],))


def _make_stamp(supply: Supply) -> str:
    return make_stamp(list_pins(supply.wheels), supply.wheels)


def plan_finish(recipe: Recipe, host: str, ssh_command: tuple[str, ...]) -> Plan:
    """Return the steps that turn a host with an installed environment into the source of an image, one step per stage.

    The security group lets the host reach nobody: apt downloads through the connection of `ssh_command`,
    which ends with the host and must not be empty (AssertionError).
    """
    assert ssh_command, "these steps must not run on this machine: they remove its keys"
    line = shlex.join(("sh", "-c", _APT_PROXY, "apt_proxy", _PORT, format_install(recipe)))
    forward = ("-o", "ExitOnForwardFailure=yes", "-R", f"127.0.0.1:{_PORT}")
    clean = ("sh", "-c", _CLEAN, "clean", "/", recipe.environment.prefix, WORK_ROOT)
    install = (*ssh_command[:-1], *forward, *ssh_command[-1:], line)
    steps = (
        Step("install the recipe, with packages downloaded through this machine", install),
        Step(CHECK, ("sh", "-c", PROVE, "prove", environment_python(recipe)), host=host),
        Step("remove keys, names and logs of the host", clean, host=host),
    )
    return Plan(tuple((step,) for step in steps), command_prefixes={host: ssh_command})


def list_images(region: str, services: Services | None = None) -> str:
    """Return the lines of `describe_images` for this account; `region` "" is the one of the AWS configuration."""
    client = (services or Services()).open_client(region)
    return describe_images(find_images(client, "tag-key", Tag.IMAGE), client.region)


def delete_image(wanted: str, region: str, dry_run: bool, say: Say, services: Services | None = None) -> Plan:
    """Delete an AMI that cpuft has made, by name or id, with its snapshots, unless `dry_run`; return the plan.
    CpuftError: cpuft has made none such in this account and region, or AWS refuses.
    """
    client = (services or Services()).open_client(region)
    plan = plan_deletion(find_images(client, "tag-key", Tag.IMAGE), wanted, client.region)
    for step in () if dry_run else (step for stage in plan.stages for step in stage):
        assert isinstance(step, CallStep)
        say(step.why)
        client.execute(step)
    return plan
