"""What there is of a rented cluster, and what there is to rent: AWS's answers, read. Pure."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from cpuft.config import is_count
from cpuft.errors import CpuftError, near_names
from cpuft.provision.aws.client import (
    GENERATION,
    GROUP,
    IMAGE,
    LIMIT,
    OWNER,
    SPOT_ROLE,
    TAG,
    UNTIL,
    Cloud,
    Refusal,
    read_tags,
)
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.image import read_recipe
from cpuft.report.estimate import TABLE
from cpuft.report.estimate import Instance as Kind
from cpuft.report.estimate import parse_instances as parse_table

LIVE = ("pending", "running")
COSTS = (*LIVE, "stopping", "stopped")
"""States in which an instance, or its disk, goes on costing money until it is terminated."""
Rule = tuple[str, int, int, str]
"""Protocol, first and last port, and who is let through: a range of addresses, or a group's id."""


@dataclass(frozen=True)
class Instance:
    """One rented host."""

    id: str
    cluster: str
    state: str
    type: str
    zone: str
    private: str
    """Its address for the other instances."""
    public: str
    """Its address for everyone else."""
    spot: bool
    launched: float
    """Seconds of the epoch, as all times here."""
    ended: float
    """When it was terminated; 0 for one that was not, or of which that is unknown."""
    until: int
    generation: int
    index: int
    """Its number among those of one call."""
    group: str = ""
    """Id of the security group that it was started in: AWS forgets that of what has ended."""


@dataclass(frozen=True)
class Group:
    """The security group of a cluster: the first thing made, the last one gone, and what the cluster is to be."""

    id: str
    cluster: str
    vpc: str
    owner: str
    until: int
    generation: int
    ingress: tuple[Rule, ...]
    egress: tuple[Rule, ...]
    limit: int = 0
    """Until when running jobs may move the end of the lease."""


@dataclass(frozen=True)
class Found:
    """Everything that carries a cluster's tag."""

    now: float
    owner: str
    """Who asks."""
    group: Group | None = None
    instances: tuple[Instance, ...] = ()
    """The master first; terminated ones among them, as long as AWS tells of them."""
    placement_group: str = ""
    key_pair: str = ""
    volumes: tuple[str, ...] = ()
    """Disks that belong to no instance any more."""

    @property
    def live(self) -> tuple[Instance, ...]:
        """Instances that are there, or will be soon."""
        return tuple(one for one in self.instances if one.state in LIVE)

    @property
    def owners(self) -> set[str]:
        """Whose the cluster is."""
        return {self.group.owner} if self.group else set()


@dataclass(frozen=True)
class Zone:
    """Where instances of a type can be had."""

    name: str
    subnet: str
    vpc: str
    addresses: int
    """Free ones."""
    spot_price: float = 0.0
    """Dollars an hour now; 0 for unknown."""


@dataclass(frozen=True)
class Image:
    """What instances start from."""

    id: str
    root: str
    """Device of its disk."""
    gigabytes: int
    architecture: str
    name: str = ""


@dataclass(frozen=True)
class Offer:
    """What AWS has to rent, and how much of it to this account."""

    type: str
    vcpus: int
    architectures: tuple[str, ...]
    clusters: bool
    """Whether placement groups take it."""
    markets: tuple[str, ...]
    """"on-demand", "spot"."""
    zones: tuple[Zone, ...]
    """That have the type, and a default subnet."""
    all_zones: tuple[str, ...]
    """With a default subnet."""
    image: Image
    quota: float | None
    """vCPUs that may run at a time; None for unknown."""
    used: int
    """vCPUs that run now and count."""
    cores: int = 0
    threads: tuple[int, ...] = ()
    """How many hardware threads a core may have; empty for no choice."""
    efa: bool = False
    """Whether it has the adapter for fast fabrics."""
    spot_role: bool = True
    """Whether the account has the role without which no spot instance starts."""


def owner_of(arn: str) -> str:
    """Who calls: a role taken on for a session is the same one in the next session."""
    return arn.rpartition("/")[0] if ":assumed-role/" in arn else arn


def parse_group(found: Mapping[str, Any]) -> Group:
    """A group from DescribeSecurityGroups."""
    tags = read_tags(found)
    return Group(
        found["GroupId"],
        tags.get(TAG, ""),
        str(found.get("VpcId", "")),
        tags.get(OWNER, ""),
        _number(tags.get(UNTIL, "")),
        _number(tags.get(GENERATION, "")),
        parse_rules(found.get("IpPermissions", ())),
        parse_rules(found.get("IpPermissionsEgress", ())),
        _number(tags.get(LIMIT, "")),
    )


def parse_rules(permissions: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Rules of a group, one for each that is let through."""
    rules = []
    for one in permissions:
        peers = [peer["CidrIp"] for peer in one.get("IpRanges", ())]
        peers += [peer["CidrIpv6"] for peer in one.get("Ipv6Ranges", ())]
        peers += [peer["GroupId"] for peer in one.get("UserIdGroupPairs", ())]
        peers += [peer["PrefixListId"] for peer in one.get("PrefixListIds", ())]
        ports = int(one.get("FromPort", -1)), int(one.get("ToPort", -1))
        rules += [(str(one["IpProtocol"]), *ports, peer) for peer in peers]
    return tuple(sorted(rules))


def format_rules(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """IpPermissions of rules, as calls have them."""
    permissions = []
    for protocol, first, last, peer in rules:
        one: dict[str, Any] = {"IpProtocol": protocol}
        one |= {"FromPort": first, "ToPort": last} if protocol != "-1" else {}
        if peer.startswith("sg-"):
            one["UserIdGroupPairs"] = [{"GroupId": peer}]
        elif peer.startswith("pl-"):
            one["PrefixListIds"] = [{"PrefixListId": peer}]
        elif ":" in peer:
            one["Ipv6Ranges"] = [{"CidrIpv6": peer}]
        else:
            one["IpRanges"] = [{"CidrIp": peer}]
        permissions.append(one)
    return permissions


def parse_instances(answer: Mapping[str, Any]) -> tuple[Instance, ...]:
    """Instances from DescribeInstances, the first launched first."""
    found = [_parse_instance(one) for place in answer.get("Reservations", ()) for one in place["Instances"]]
    return tuple(sorted(found, key=lambda one: (one.launched, one.index, one.id)))


def _parse_instance(found: Mapping[str, Any]) -> Instance:
    tags = read_tags(found)
    return Instance(
        id=found["InstanceId"],
        cluster=tags.get(TAG, ""),
        state=found["State"]["Name"],
        type=str(found.get("InstanceType", "")),
        zone=str(found.get("Placement", {}).get("AvailabilityZone", "")),
        private=str(found.get("PrivateIpAddress") or ""),
        public=str(found.get("PublicIpAddress") or ""),
        spot=found.get("InstanceLifecycle") == "spot",
        launched=found["LaunchTime"].timestamp(),
        ended=_parse_end(str(found.get("StateTransitionReason") or "")),
        until=_number(tags.get(UNTIL, "")),
        generation=_number(tags.get(GENERATION, "")),
        index=int(found.get("AmiLaunchIndex", 0)),
        group=tags.get(GROUP, ""),
    )


def keep_own(instances: Iterable[Instance], group: Group | None) -> tuple[Instance, ...]:
    """Instances without those of an earlier cluster of the same name, of which AWS tells for an hour."""
    other = [one for one in instances if group and one.state == "terminated" and one.group not in ("", group.id)]
    return tuple(one for one in instances if one not in other)


def _parse_end(reason: str) -> float:
    """`User initiated (2026-01-31 12:00:00 GMT)` -> seconds of the epoch."""
    try:
        text = reason[reason.index("(") + 1 : reason.index(")")].removesuffix(" UTC").removesuffix(" GMT")
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0


def _number(text: str) -> int:
    return int(text) if is_count(text, least=0) else 0


def count_vcpus(answer: Mapping[str, Any], spot: bool) -> int:
    """vCPUs of all standard instances of an account's market, whoever started them, from DescribeInstances."""
    found = [one for place in answer.get("Reservations", ()) for one in place["Instances"]]
    return sum(
        one.get("CpuOptions", {}).get("CoreCount", 0) * one.get("CpuOptions", {}).get("ThreadsPerCore", 1)
        for one in found
        if one["State"]["Name"] in LIVE
        and (one.get("InstanceLifecycle") == "spot") == spot
        and is_standard(str(one.get("InstanceType", "")))
    )


def is_standard(kind: str) -> bool:
    """Whether a type counts against the quota of standard ones: families A, C, D, H, I, M, R, T and Z."""
    return kind[:1] in tuple("acdhimrtz") and not kind.startswith(("inf", "hpc", "mac", "trn"))


READY, COMING = "available", "pending"


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
    return next((one for one in reversed(tuple(images)) if one.state == READY), None)


QUOTAS = {False: "L-1216C47A", True: "L-34B43A08"}
"""Of service ec2: vCPUs of running standard instances, on demand and spot."""
DEBIAN = "/aws/service/debian/release/12/latest/amd64"
"""AWS's parameter that names Debian 12's newest image."""


def name_unknown(kind: str, known: Iterable[str]) -> str:
    """What to say of a type that a region does not have."""
    return f"AWS knows no type {kind!r:.60} here: {near_names(kind, known)}"


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
