"""Golden images at AWS: which there are, how they are named, found, told of and taken away. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpuft.errors import CpuftError, near_names
from cpuft.plan import Plan, Step
from cpuft.provision.aws.calls import ENVIRONMENT, IMAGE, OWNER, plan_call, read_tags, tag_all

_READY, _COMING = "available", "pending"


@dataclass(frozen=True)
class Golden:
    """One image of the account."""

    id: str
    name: str
    state: str
    """"available", "pending", or what has become of it instead."""
    made: str
    """When, as AWS tells it: texts of times, in their order."""
    recipe: str
    """The digest of its recipe; empty for an image that is not cpuft's."""
    gigabytes: int
    snapshots: tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """A disk of an image, or what is left of one."""

    id: str
    name: str
    """Of the image."""


@dataclass(frozen=True)
class Images:
    """All that is cpuft's."""

    images: tuple[Golden, ...]
    snapshots: tuple[Snapshot, ...]

    @property
    def strays(self) -> tuple[Snapshot, ...]:
        """Snapshots whose image is gone: somebody stopped halfway."""
        known = {snapshot for image in self.images for snapshot in image.snapshots}
        return tuple(one for one in self.snapshots if one.id not in known)


def name_image(recipe: str, environment: str) -> str:
    """What an image is called, by the recipe's digest and the environment's stamp: the same name is the same image."""
    return f"cpuft-{recipe}-{environment[:12]}"


def parse_images(answer: Mapping[str, Any]) -> tuple[Golden, ...]:
    """Images from DescribeImages, the oldest first."""
    return tuple(sorted((_parse_image(one) for one in answer.get("Images", ())), key=lambda one: (one.made, one.id)))


def _parse_image(found: Mapping[str, Any]) -> Golden:
    disks = [one["Ebs"] for one in found.get("BlockDeviceMappings", ()) if "Ebs" in one]
    return Golden(
        id=found["ImageId"],
        name=str(found.get("Name", "")),
        state=str(found.get("State", "")),
        made=str(found.get("CreationDate", "")),
        recipe=read_tags(found).get(IMAGE, ""),
        gigabytes=sum(int(disk.get("VolumeSize", 0)) for disk in disks),
        snapshots=tuple(disk["SnapshotId"] for disk in disks if "SnapshotId" in disk),
    )


def parse_snapshots(answer: Mapping[str, Any]) -> tuple[Snapshot, ...]:
    """Snapshots from DescribeSnapshots."""
    return tuple(Snapshot(one["SnapshotId"], read_tags(one).get("Name", "")) for one in answer.get("Snapshots", ()))


def choose_image(images: Iterable[Golden]) -> Golden | None:
    """The newest that instances can start from."""
    return next((one for one in reversed(tuple(images)) if one.state == _READY), None)


def is_ready(image: Golden | None, name: str) -> bool:
    """Whether an image that was found under a name is there; False while it is being made, or for none.

    Raises CpuftError: it is not cpuft's, or it came to nothing.
    """
    if image and not image.recipe:
        raise CpuftError(f"image {image.id} is called {name} and is not cpuft's: deregister it")
    if image and image.state not in (_READY, _COMING):
        raise CpuftError(f"image {name} is {image.state}: take it away with cpuft provision image --delete {name}")
    return bool(image and image.state == _READY)


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
