"""What there is of a rented cluster, and what there is to rent: AWS's answers, read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from cpuft.config import is_count
from cpuft.provision.aws.calls import GENERATION, GROUP, LIMIT, OWNER, TAG, UNTIL, read_tags

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
