"""Looks at AWS: what there is of a cluster, and what there is to rent. Changes nothing."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from cpuft.errors import CpuftError
from cpuft.provision.aws.calls import IMAGE, SPOT_ROLE, TAG
from cpuft.provision.aws.client import Cloud, Refusal
from cpuft.provision.aws.facts import (
    Found,
    Group,
    Image,
    Instance,
    Offer,
    Zone,
    count_vcpus,
    keep_own,
    owner_of,
    parse_group,
    parse_instances,
)
from cpuft.provision.aws.images import Golden, Images, choose_image, parse_images, parse_snapshots
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.preflight import DEBIAN, QUOTAS, name_unknown
from cpuft.provision.aws.price import Price, find_price
from cpuft.provision.image import read_recipe
from cpuft.report.estimate import TABLE
from cpuft.report.estimate import Instance as Kind
from cpuft.report.estimate import parse_instances as parse_table

_MIRROR = "https://checkip.amazonaws.com"
_LIVE_FILTER = {"Name": "instance-state-name", "Values": ["pending", "running"]}


def read_table() -> dict[str, Kind]:
    """Our table of prices, by types."""
    return parse_table(TABLE.read_text(encoding="utf-8"), str(TABLE))


def find_own_address() -> str:
    """This machine's address as the internet sees it. Raises CpuftError."""
    try:
        with urllib.request.urlopen(_MIRROR, timeout=10) as answer:
            return str(answer.read(100).decode(errors="replace")).strip()
    except (OSError, urllib.error.URLError) as error:
        raise CpuftError(f"{_MIRROR} does not tell your address ({error}): say it with --ssh-from") from None


def _tagged(name: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{TAG}", "Values": [name]}] if name else [{"Name": "tag-key", "Values": [TAG]}]


def find_tagged(cloud: Cloud, name: str, now: float) -> Found:
    """Everything that carries a cluster's tag."""
    filters = _tagged(name)
    groups = cloud.ask("describe_security_groups", Filters=filters).get("SecurityGroups", ())
    places = cloud.ask("describe_placement_groups", Filters=filters).get("PlacementGroups", ())
    keys = cloud.ask("describe_key_pairs", Filters=filters).get("KeyPairs", ())
    free = [*filters, {"Name": "status", "Values": ["available"]}]
    volumes = cloud.ask("describe_volumes", Filters=free).get("Volumes", ())
    group = parse_group(groups[0]) if groups else None
    return Found(
        now=now,
        owner=owner_of(cloud.caller),
        group=group,
        instances=keep_own(parse_instances(cloud.ask("describe_instances", Filters=filters)), group),
        placement_group=next((one["GroupName"] for one in places if one.get("State") != "deleted"), ""),
        key_pair=keys[0]["KeyName"] if keys else "",
        volumes=tuple(one["VolumeId"] for one in volumes),
    )


def find_clusters(cloud: Cloud) -> dict[str, tuple[Group | None, tuple[Instance, ...]]]:
    """All clusters of the account in this region, whoever made them."""
    filters = _tagged("")
    groups = [parse_group(one) for one in cloud.ask("describe_security_groups", Filters=filters)["SecurityGroups"]]
    instances = parse_instances(cloud.ask("describe_instances", Filters=filters))
    by_name = {group.cluster: group for group in groups}
    return {
        name: (by_name.get(name), keep_own([one for one in instances if one.cluster == name], by_name.get(name)))
        for name in sorted({*by_name, *(one.cluster for one in instances)})
    }


def find_offer(cloud: Cloud, config: AwsConfig) -> Offer:
    """What AWS has to rent of what is asked for. Raises CpuftError: no such type or image, no default network."""
    kind = _find_type(cloud, config.type)
    cpus = kind["VCpuInfo"]
    subnets = cloud.ask("describe_subnets", Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
    if not subnets:
        raise CpuftError(f"region {cloud.region} has no default network: make one with aws ec2 create-default-vpc")
    filters = [{"Name": "instance-type", "Values": [config.type]}]
    there = cloud.ask("describe_instance_type_offerings", LocationType="availability-zone", Filters=filters)
    has = {one["Location"] for one in there["InstanceTypeOfferings"]}
    prices = find_spot_prices(cloud, config.type) if config.spot else {}
    zones = [
        Zone(name, one["SubnetId"], one["VpcId"], one["AvailableIpAddressCount"], prices.get(name, 0.0))
        for one in subnets
        if (name := one["AvailabilityZone"]) in has
    ]
    return Offer(
        type=config.type,
        vcpus=cpus["DefaultVCpus"],
        cores=cpus.get("DefaultCores", 0),
        threads=tuple(cpus.get("ValidThreadsPerCore") or [cpus.get("DefaultThreadsPerCore", 2)]),
        efa=bool(kind.get("NetworkInfo", {}).get("EfaSupported")),
        spot_role=not config.spot or _has_spot_role(cloud),
        architectures=tuple(kind["ProcessorInfo"]["SupportedArchitectures"]),
        clusters="cluster" in kind.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
        markets=tuple(kind.get("SupportedUsageClasses", ())),
        zones=tuple(sorted(zones, key=lambda zone: zone.name)),
        all_zones=tuple(sorted(one["AvailabilityZone"] for one in subnets)),
        image=_find_image(cloud, config.image or _find_recipes(cloud, config.recipe)),
        quota=_find_quota(cloud, config.spot),
        used=count_vcpus(cloud.ask("describe_instances", Filters=[_LIVE_FILTER]), config.spot),
    )


def _find_type(cloud: Cloud, kind: str) -> dict[str, Any]:
    try:
        return dict(cloud.ask("describe_instance_types", InstanceTypes=[kind])["InstanceTypes"][0])
    except Refusal as refusal:
        if refusal.code == "InvalidInstanceType":
            raise CpuftError(name_unknown(kind, read_table())) from None
        raise


def find_spot_prices(cloud: Cloud, kind: str) -> dict[str, float]:
    """Dollars an hour of a spot instance now, by zones: those that AWS tells."""
    products = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
    found = cloud.ask("describe_spot_price_history", InstanceTypes=[kind], ProductDescriptions=products, MaxResults=100)
    # The newest comes first.
    history: Sequence[dict[str, Any]] = found["SpotPriceHistory"]
    return {one["AvailabilityZone"]: float(one["SpotPrice"]) for one in reversed(history)}


def find_costs(cloud: Cloud, instances: Sequence[Instance]) -> Price:
    """What an hour of a cluster's instances costs."""
    kind = instances[0].type if instances else ""
    prices = find_spot_prices(cloud, kind) if any(one.spot for one in instances) else {}
    return find_price(kind, cloud.region, read_table(), prices)


def _find_image(cloud: Cloud, name: str) -> Image:
    try:
        wanted = name or str(cloud.ask("get_parameter", Name=DEBIAN)["Parameter"]["Value"])
        found = cloud.ask("describe_images", ImageIds=[wanted])["Images"]
    except Refusal as refusal:
        if refusal.code == "ParameterNotFound":
            raise CpuftError(f"region {cloud.region} tells of no image of Debian 12: name one with --image") from None
        if not refusal.code.startswith("InvalidAMIID"):
            raise
        found = []
    if not found:
        raise CpuftError(f"region {cloud.region} has no image {name!r:.60} for you: images belong to one region, and "
                         "name themselves ami-...")  # fmt: skip
    root = str(found[0]["RootDeviceName"])
    disks = {one["DeviceName"]: one.get("Ebs", {}) for one in found[0].get("BlockDeviceMappings", ())}
    size = int(disks.get(root, {}).get("VolumeSize", 0))
    one = found[0]
    return Image(one["ImageId"], root, size, str(one.get("Architecture", "")), str(one.get("Name", "")))


def find_images(cloud: Cloud) -> Images:
    """All images of this account that are cpuft's, and their snapshots."""
    filters = [{"Name": "tag-key", "Values": [IMAGE]}]
    return Images(
        parse_images(cloud.ask("describe_images", Owners=["self"], Filters=filters)),
        parse_snapshots(cloud.ask("describe_snapshots", OwnerIds=["self"], Filters=filters)),
    )


def find_named(cloud: Cloud, name: str) -> Golden | None:
    """This account's image of a name, whoever has made it."""
    filters = [{"Name": "name", "Values": [name]}]
    return next(iter(parse_images(cloud.ask("describe_images", Owners=["self"], Filters=filters))), None)


def _find_recipes(cloud: Cloud, path: str) -> str:
    """The newest image of a recipe; empty where there is none, or no recipe was named."""
    if not path:
        return ""
    filters = [{"Name": f"tag:{IMAGE}", "Values": [read_recipe(path).digest]}]
    found = choose_image(parse_images(cloud.ask("describe_images", Owners=["self"], Filters=filters)))
    return found.id if found else ""


def _has_spot_role(cloud: Cloud) -> bool:
    try:
        return bool(cloud.ask("get_role", RoleName=SPOT_ROLE))
    except Refusal as refusal:
        if refusal.code == "NoSuchEntity":
            return False
        raise


def _find_quota(cloud: Cloud, spot: bool) -> float | None:
    """vCPUs that may run at a time; None where AWS does not tell."""
    try:
        found = cloud.ask("get_service_quota", ServiceCode="ec2", QuotaCode=QUOTAS[spot])
        return float(found["Quota"]["Value"])
    except Refusal:
        return None
