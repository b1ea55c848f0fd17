"""Facts from AWS: the resources of a cluster, what can be rented, and AMIs. The calls here change nothing."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from cpuft.errors import CpuftError, suggest_names
from cpuft.instance_types import read_instance_types
from cpuft.provision.aws.client import SPOT_ROLE, AwsClient, Tag, read_tags
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.image import read_recipe
from cpuft.serialization import is_count

LIVE = ("pending", "running")
"""States of instances that can be used, or will be soon."""
BILLED = (*LIVE, "stopping", "stopped")
"""States in which an instance or its disk costs money until it is terminated."""
READY, PENDING = "available", "pending"
"""States of AMIs that can be used, or will be soon."""
_DEBIAN_PARAMETERS = {
    "x86_64": "/aws/service/debian/release/12/latest/amd64",
    "arm64": "/aws/service/debian/release/12/latest/arm64",
}
"""Name of the parameter with the id of Debian 12's AMI, by AWS's name of an architecture on which cpuft trains."""
_GRAVITON = re.compile(r"a1\.|[a-z]+\d+g")
"""How names of types with Arm CPUs begin: with a g behind the generation, such as c8g or im4gn."""
_ADDRESS_SERVICE = "https://checkip.amazonaws.com"
_HOST_KEY = re.compile(
    r"-----BEGIN SSH HOST KEY KEYS-----.*?(ssh-ed25519 [A-Za-z0-9+/]{68})\s.*?-----END SSH HOST KEY KEYS-----",
    re.DOTALL,
)
"""What cloud-init writes to the console, when user data's commands have run."""
Image = Mapping[str, Any]
"""An AMI, as DescribeImages returns it."""
Rule = dict[str, Any]
"""Rule of a security group for one peer: an entry of IpPermissions, as calls return and take it."""
_PEERS = {
    "IpRanges": "CidrIp",
    "Ipv6Ranges": "CidrIpv6",
    "UserIdGroupPairs": "GroupId",
    "PrefixListIds": "PrefixListId",
}
"""Kinds of peers in IpPermissions, and the key that identifies a peer."""


@dataclass(frozen=True)
class Instance:
    """One rented instance. Times are in seconds since the epoch, here and in the other classes."""

    id: str
    cluster: str
    """From its tag; empty without one."""
    state: str
    """As AWS writes it: pending, running, shutting-down, terminated, stopping or stopped."""
    type: str
    zone: str
    private: str
    """Address that the other instances use; empty once it is terminated."""
    public: str
    """Address that everyone else uses; empty without one."""
    spot: bool
    launched: float
    ended: float
    """When it was terminated; 0 if it was not, or if AWS does not say."""
    until: int
    """When its lease ends, by its tag; 0 without one."""
    generation: int
    """`SecurityGroup.generation` when it was requested, by its tag; 0 without one."""
    index: int
    """Its number among the instances that were started by the same call."""
    group: str = ""
    """Id of the security group that it was started in, from its tag: AWS forgets the group of terminated instances."""
    reason: str = ""
    """Why it has its state, in AWS's words; empty while it starts or runs."""


@dataclass(frozen=True)
class SecurityGroup:
    """The security group of a cluster. It is created first and deleted last, and its tags describe the cluster."""

    id: str
    cluster: str
    owner: str
    """ARN of the user or role that made the cluster."""
    until: int
    generation: int
    """When missing instances were last requested."""
    ingress: tuple[Rule, ...]
    egress: tuple[Rule, ...]
    limit: int = 0
    """The time to which running jobs may extend the lease."""


@dataclass(frozen=True)
class Resources:
    """Everything in a region that carries a cluster's tag."""

    now: float
    caller: str = ""
    """ARN of the user or role that asked; empty if it does not matter."""
    group: SecurityGroup | None = None
    instances: tuple[Instance, ...] = ()
    """The head host comes first; terminated instances are included as long as AWS lists them."""
    placement_group: str = ""
    """Its name; empty if it does not exist."""
    volumes: tuple[str, ...] = ()
    """Ids of disks that are no longer attached to an instance."""

    @property
    def live(self) -> tuple[Instance, ...]:
        """Instances that are pending or running, the head host first."""
        return tuple(one for one in self.instances if one.state in LIVE)


@dataclass(frozen=True)
class Offer:
    """What AWS offers of an instance type."""

    type: Mapping[str, Any]
    """The type, as DescribeInstanceTypes returns it."""
    zones: Mapping[str, str]
    """Availability zones that offer the type: the id of the default subnet, by name."""
    image: Image
    spot_prices: Mapping[str, float] = field(default_factory=dict)
    """Present prices in dollars per hour, by zone; zones without a known price are left out."""
    has_spot_role: bool = True
    """Whether the account has the role without which no spot instance starts."""

    @property
    def architecture(self) -> str:
        """Which of the type's architectures cpuft trains on: "x86_64" or "arm64"; empty if it has neither."""
        has = self.type["ProcessorInfo"]["SupportedArchitectures"]
        return next((name for name in _DEBIAN_PARAMETERS if name in has), "")

    @property
    def in_placement_groups(self) -> bool:
        """Whether instances of the type can be placed close to each other."""
        return "cluster" in self.type.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())


def normalize_owner(arn: str) -> str:
    """Return an ARN without the session of an assumed role: ":assumed-role/ROLE" for ":assumed-role/ROLE/SESSION"."""
    return arn.rpartition("/")[0] if ":assumed-role/" in arn else arn


def _parse_group(found: Mapping[str, Any]) -> SecurityGroup:
    tags = read_tags(found)
    return SecurityGroup(
        found["GroupId"],
        tags.get(Tag.CLUSTER, ""),
        tags.get(Tag.OWNER, ""),
        _parse_time(tags.get(Tag.UNTIL, "")),
        _parse_time(tags.get(Tag.GENERATION, "")),
        parse_rules(found.get("IpPermissions", ())),
        parse_rules(found.get("IpPermissionsEgress", ())),
        _parse_time(tags.get(Tag.LIMIT, "")),
    )


def parse_rules(permissions: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Return IpPermissions of a security group in the same form, but one for each peer, which is its last value."""
    rules = []
    for one in permissions:
        # AWS names no ports for all protocols.
        names = ("IpProtocol",) if one["IpProtocol"] == "-1" else ("IpProtocol", "FromPort", "ToPort")
        ports = {name: one[name] for name in names if name in one}
        rules += [ports | {kind: [{key: peer[key]}]} for kind, key in _PEERS.items() for peer in one.get(kind, ())]
    return tuple(rules)


def parse_instances(response: Mapping[str, Any]) -> tuple[Instance, ...]:
    """Return the instances in a response to DescribeInstances, sorted by launch time, then by number in the call."""
    found = [_parse_instance(one) for place in response.get("Reservations", ()) for one in place["Instances"]]
    return tuple(sorted(found, key=lambda one: (one.launched, one.index, one.id)))


def _parse_instance(found: Mapping[str, Any]) -> Instance:
    tags = read_tags(found)
    return Instance(
        id=found["InstanceId"],
        cluster=tags.get(Tag.CLUSTER, ""),
        state=found["State"]["Name"],
        type=str(found.get("InstanceType", "")),
        zone=str(found.get("Placement", {}).get("AvailabilityZone", "")),
        private=str(found.get("PrivateIpAddress") or ""),
        public=str(found.get("PublicIpAddress") or ""),
        spot=found.get("InstanceLifecycle") == "spot",
        launched=found["LaunchTime"].timestamp(),
        ended=_parse_end(str(found.get("StateTransitionReason") or "")),
        until=_parse_time(tags.get(Tag.UNTIL, "")),
        generation=_parse_time(tags.get(Tag.GENERATION, "")),
        index=int(found.get("AmiLaunchIndex", 0)),
        group=tags.get(Tag.GROUP, ""),
        reason=str(found.get("StateReason", {}).get("Message") or ""),
    )


def drop_earlier_cluster(instances: Iterable[Instance], group: SecurityGroup | None) -> tuple[Instance, ...]:
    """Return instances without the terminated ones whose tag names another security group than `group`.

    All stay without a `group`. AWS lists terminated instances, perhaps of an earlier cluster of this name, for an hour.
    """
    return tuple(one for one in instances if not group or one.state != "terminated" or one.group in ("", group.id))


def _parse_end(reason: str) -> float:
    """`User initiated (2026-01-31 12:00:00 GMT)` -> seconds since the epoch; 0.0 for a text without a time."""
    try:
        text = reason[reason.index("(") + 1 : reason.index(")")].removesuffix(" UTC").removesuffix(" GMT")
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0


def _parse_time(text: str) -> int:
    return int(text) if is_count(text, least=0) else 0


def find_machine(instance_type: str) -> str:
    """Return "aarch64" for a type with Graviton CPUs, by its name, such as c8g.large or im4gn.large; else "x86_64"."""
    return "aarch64" if _GRAVITON.match(instance_type) else "x86_64"


def find_disk_size(image: Image) -> int:
    """Return the size of an AMI's root disk in GB; 0 if unknown."""
    disks = {one.get("DeviceName"): one.get("Ebs", {}) for one in image.get("BlockDeviceMappings", ())}
    return int(disks.get(image.get("RootDeviceName"), {}).get("VolumeSize", 0))


def find_own_address() -> str:
    """Return the public address of this machine, unchecked, from a web service of AWS; CpuftError: none within 10 s."""
    try:
        with urllib.request.urlopen(_ADDRESS_SERVICE, timeout=10) as answer:
            return str(answer.read(100).decode(errors="replace")).strip()
    except OSError as error:
        raise CpuftError(f"{_ADDRESS_SERVICE} does not say your address ({error}): give it with --ssh-from") from None


def find_resources(client: AwsClient, name: str, now: float) -> Resources:
    """Return what carries the tag of the cluster `name` in the client's region, seen at `now`.

    Left out are attached volumes, deleted placement groups, and terminated instances of an earlier cluster.
    """
    filters = [{"Name": f"tag:{Tag.CLUSTER}", "Values": [name]}]
    places = client.query("describe_placement_groups", Filters=filters).get("PlacementGroups", ())
    unattached = [*filters, {"Name": "status", "Values": ["available"]}]
    volumes = client.query("describe_volumes", Filters=unattached)["Volumes"]
    return replace(
        _find_clusters(client, filters, now).get(name, Resources(now)),
        caller=normalize_owner(client.caller),
        placement_group=next((one["GroupName"] for one in places if one.get("State") != "deleted"), ""),
        volumes=tuple(one["VolumeId"] for one in volumes),
    )


def find_clusters(client: AwsClient, now: float) -> dict[str, Resources]:
    """Return by name all clusters in the client's region: their security groups and instances only, seen at `now`."""
    return _find_clusters(client, [{"Name": "tag-key", "Values": [Tag.CLUSTER]}], now)


def _find_clusters(client: AwsClient, filters: list[dict[str, Any]], now: float) -> dict[str, Resources]:
    groups = [_parse_group(one) for one in client.query("describe_security_groups", Filters=filters)["SecurityGroups"]]
    instances = parse_instances(client.query("describe_instances", Filters=filters))
    by_name = {group.cluster: group for group in groups}
    clusters = {}
    for name in sorted({*by_name, *(one.cluster for one in instances)}):
        group, own = by_name.get(name), [one for one in instances if one.cluster == name]
        clusters[name] = Resources(now, group=group, instances=drop_earlier_cluster(own, group))
    return clusters


def find_host_key(client: AwsClient, instance: str) -> str:
    """Return the host key "ssh-ed25519 AAAA..." that cloud-init wrote to an instance's console; "" before it has."""
    answer = client.find("get_console_output", "UnsupportedOperation", InstanceId=instance, Latest=True)
    # Types before the Nitro system show their console only some minutes after the boot.
    answer = answer or client.query("get_console_output", InstanceId=instance)
    found = _HOST_KEY.findall(answer.get("Output", ""))
    return found[-1] if found else ""


def find_offer(client: AwsClient, config: AwsConfig) -> Offer:
    """Return what AWS offers of the instance type that the options ask for.

    The AMI is that of --image or the newest one of its recipe, otherwise Debian 12's. Raises CpuftError: the type or
    the AMI is unknown, or the region has no default network.
    """
    found = _find_type(client, config.type)
    subnets = client.query("describe_subnets", Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
    if not subnets:
        raise CpuftError(f"region {client.region} has no default network: make one with `aws ec2 create-default-vpc`")
    filters = [{"Name": "instance-type", "Values": [config.type]}]
    response = client.query("describe_instance_type_offerings", LocationType="availability-zone", Filters=filters)
    offering = {one["Location"] for one in response["InstanceTypeOfferings"]}
    prices = find_spot_prices(client, config.type) if config.spot else {}
    zones = {one["AvailabilityZone"]: one["SubnetId"] for one in subnets if one["AvailabilityZone"] in offering}
    return Offer(
        type=found,
        zones=zones,
        spot_prices={zone: price for zone, price in prices.items() if zone in zones},
        image=_find_image(client, config, found),
        has_spot_role=not config.spot or bool(client.find("get_role", "NoSuchEntity", RoleName=SPOT_ROLE)),
    )


def _find_type(client: AwsClient, instance_type: str) -> dict[str, Any]:
    answer = client.find("describe_instance_types", "InvalidInstanceType", InstanceTypes=[instance_type])
    if not answer:
        names = suggest_names(instance_type, read_instance_types())
        raise CpuftError(f"region {client.region} has no instance type {instance_type!r:.60}: {names}")
    return dict(answer["InstanceTypes"][0])


def _find_image(client: AwsClient, config: AwsConfig, found: Mapping[str, Any]) -> Image:
    """Return the AMI of --image, or the newest one of its recipe, or else Debian 12's; `found` is AWS's on the type."""
    architecture = Offer(found, {}, {}).architecture
    image = _find_recipe_image(client, config.recipe, architecture) if config.recipe else config.image
    wanted = image
    if not image:
        name = _DEBIAN_PARAMETERS.get(architecture, _DEBIAN_PARAMETERS["x86_64"])
        answer = client.find("get_parameter", "ParameterNotFound", Name=name)
        if not answer:
            raise CpuftError(f"region {client.region} offers no AMI of Debian 12: give an AMI with --image")
        wanted = answer["Parameter"]["Value"]
    images: Sequence[Image] = client.find("describe_images", "InvalidAMIID", ImageIds=[wanted]).get("Images", ())
    if not images:
        raise CpuftError(
            f"region {client.region} has no AMI {wanted!r:.60} that you can use: give an id of this region, ami-..."
        )
    return images[0]


def _find_recipe_image(client: AwsClient, path: str, architecture: str) -> str:
    found = find_images(client, f"tag:{Tag.IMAGE}", read_recipe(path).digest)
    fitting = [one for one in found if one["State"] == READY and one.get("Architecture", "x86_64") == architecture]
    return next((str(one["ImageId"]) for one in reversed(fitting)), "")


def find_images(client: AwsClient, name: str, value: str) -> list[Image]:
    """Return this account's AMIs in any state, the oldest first, that the DescribeImages filter name=value selects."""
    filters = [{"Name": name, "Values": [value]}]
    found = client.query("describe_images", Owners=["self"], Filters=filters)["Images"]
    return sorted(found, key=lambda one: (one["CreationDate"], one["ImageId"]))


def find_spot_prices(client: AwsClient, instance_type: str) -> dict[str, float]:
    """Return the present price of a spot instance in dollars per hour, by name of the zone."""
    products = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
    asked = {"InstanceTypes": [instance_type], "ProductDescriptions": products, "MaxResults": 100}
    # The newest price comes first; the last one that is written into the dictionary stays.
    history: Sequence[dict[str, Any]] = client.query("describe_spot_price_history", **asked)["SpotPriceHistory"]
    return {one["AvailabilityZone"]: float(one["SpotPrice"]) for one in reversed(history)}
