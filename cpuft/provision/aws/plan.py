"""Plans for a cluster on AWS: what is missing, which calls create it, and in which order it is deleted. Pure functions.

The security group is created first. Its tags say what the cluster is, so everything else can be found or repeated from
there, whatever happens to this machine.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.files import hash_text
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry, read_entry
from cpuft.plans import Plan, Step
from cpuft.provision.aws.client import SPOT_SERVICE, CallStep, Tag, make_tags, plan_call, specify_tags
from cpuft.provision.aws.facts import Offer, Resources, Rule, SecurityGroup, find_disk_size
from cpuft.provision.aws.lease import (
    RENEW_COMMAND,
    format_time,
    format_user_data,
    make_schedule_command,
    parse_lease,
    parse_limit,
)
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.cluster_files import plan_files, plan_key, plan_removal
from cpuft.provision.servers import ClusterFacts

_NOTICE_URL = "http://169.254.169.254/latest/meta-data/spot/instance-action"
"""EC2's metadata service has this URL on a spot instance when AWS is about to reclaim it."""
STALE_SECONDS = 1800
"""Age at which a request is made anew: nobody waits for its response, and AWS still lists what it started."""
_SHORTEST_PREFIX = 16


class NoCapacityError(CpuftError):
    """No zone that may be tried has capacity."""


@dataclass(frozen=True)
class RentalFacts:
    """What planning a cluster on AWS needs to know."""

    resources: Resources
    files: Mapping[str, str]
    """Texts of the cluster's files on this machine, by path."""
    directory: str
    hostfile: str
    region: str
    ssh_from: str = ""
    """The only address range that may reach ssh, such as "203.0.113.7/32"."""
    offer: Offer | None = None
    """None when nothing is missing that would have to be rented."""
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Why there was no capacity, by (zone, market)."""
    servers: ClusterFacts | None = None
    """What the instances say; None as long as something is missing in AWS, or if they are not logged in to."""

    @property
    def public_key(self) -> str:
        """As in a .pub file; empty if this machine has none."""
        return self.files.get(f"{self.directory}/id_ed25519.pub", "").strip()


def parse_ssh_from(text: str) -> str:
    """Return "203.0.113.7/32" for "203.0.113.7", else the range. CpuftError: none, as 203.0.113.7/24, or over /16."""
    try:
        found = ipaddress.IPv4Network(text.strip())
    except ValueError:
        raise CpuftError(
            f"--ssh-from {text!r:.60} is neither an IPv4 address, such as 203.0.113.7, nor a range, such as "
            "203.0.113.0/24: give yours"
        ) from None
    if found.prefixlen < _SHORTEST_PREFIX:
        raise CpuftError(f"--ssh-from {text} would let almost everybody reach ssh: give your own address")
    return str(found)


def check_offer(config: AwsConfig, offer: Offer, region: str) -> None:
    """Check that AWS offers such instances. Raises CpuftError that names the option to change."""
    market = "spot" if config.spot else "on-demand"
    if market not in offer.type["SupportedUsageClasses"]:
        raise CpuftError(f"AWS does not offer {config.type} as {market} instance: choose another --type")
    if not offer.architecture:
        has = "/".join(offer.type["ProcessorInfo"]["SupportedArchitectures"])
        raise CpuftError(f"{config.type} is {has}, and cpuft needs x86_64 or arm64: choose another --type")
    if (architecture := offer.image.get("Architecture", "x86_64")) != offer.architecture:
        image = offer.image["ImageId"]
        raise CpuftError(f"AMI {image} is for {architecture}: choose an AMI for {offer.architecture} with --image")
    if not offer.zones:
        raise CpuftError(
            f"no zone of {region} with a default subnet offers {config.type}: try another --type or --region"
        )
    if config.zone and config.zone not in offer.zones:
        names = suggest_names(config.zone, offer.zones)
        raise CpuftError(f"region {region} has no zone {config.zone!r:.60} that offers {config.type}: {names}")


def _check_owner(name: str, resources: Resources) -> None:
    group = resources.group
    if group and group.owner != resources.caller:
        raise CpuftError(f"cluster {name} belongs to {group.owner}, and you are {resources.caller}: use another --name")


def check_rental(config: AwsConfig, resources: Resources) -> None:
    """Raise CpuftError when what exists can never become what the options ask for, somebody else made it, or its lease
    has ended. Instances that a job may keep, because the limit has not passed, are accepted if none is missing.
    """
    _check_owner(config.name, resources)
    name, live, group, now = config.name, resources.live, resources.group, resources.now
    remove = f"remove it with `cpuft provision down {name}`"
    if group and group.until <= now:
        ended = f"the lease of {name} ended at {format_time(group.until)}"
        if not live or group.limit <= now:
            raise CpuftError(f"{ended}: {remove}, then rent it again")
        if len(live) < config.nodes:
            raise CpuftError(f"{ended}, and only a running job keeps it: first run `cpuft provision extend {name}`")
    if len(live) > config.nodes:
        raise CpuftError(f"{name} has {len(live)} nodes, and --nodes {config.nodes} asks for fewer: {remove}")
    for one in live:
        if one.type != config.type:
            raise CpuftError(f"{name} has nodes of type {one.type}: {remove}, or use --type {one.type}")
        if config.zone and one.zone != config.zone:
            raise CpuftError(f"{name} is in zone {one.zone}: {remove}, or leave out --zone")


def needs_offer(config: AwsConfig, resources: Resources) -> bool:
    """Whether instances, the group or a wanted placement group are missing, which need `RentalFacts.offer`."""
    lacks_placement_group = config.placement_group and config.nodes > 1 and not resources.placement_group
    return len(resources.live) < config.nodes or not resources.group or lacks_placement_group


def plan_rental(config: AwsConfig, facts: RentalFacts) -> Plan:
    """Return the steps that create what is missing in AWS, and the cluster's files on this machine.

    All missing instances are started in one zone, once the security group and the key exist; until then, a note names
    them. Raises CpuftError when the cluster can never become what the options ask for or its key is on another machine,
    and NoCapacityError when every zone has refused.
    """
    resources = facts.resources
    check_rental(config, resources)
    missing, has_spot = config.nodes - len(resources.live), any(one.spot for one in resources.live)
    launch, notes = list[list[Step]](), list[str]()
    if missing and facts.offer:
        zone, market = choose_zone(config, resources, facts.offer, facts.refused)
        has_spot = has_spot or market == "spot"
        if resources.group and facts.public_key:
            launch = _plan_launch(replace(config, market=market), facts, resources.group, facts.offer, zone)
        else:
            image = facts.offer.image.get("Name") or facts.offer.image["ImageId"]
            notes = [
                f"The next steps are planned when the security group exists: allow ssh from {facts.ssh_from} only, and "
                f"start {counted(missing, 'instance')} of image {image} in {zone}"
            ]
    stages = [*_plan_files(config, facts, has_spot), _plan_group(config, facts), _plan_placement(config, facts)]
    return Plan(tuple(tuple(stage) for stage in (*stages, *launch) if stage), tuple(notes))


def _plan_files(config: AwsConfig, facts: RentalFacts, has_spot: bool) -> list[list[Step]]:
    base, until = facts.directory, facts.resources.group.until if facts.resources.group else 0
    path, text = f"{base}/{FILE_NAME}", format_entry(make_entry(config, base, facts.hostfile, until, has_spot))
    why = "update the record of the cluster" if path in facts.files else "register the cluster"
    steps = plan_files({path: text}, facts.files, why)
    if facts.public_key:
        return [steps]
    if facts.resources.live:
        raise _make_key_error(config.name, facts)
    return [steps, [plan_key(f"{base}/id_ed25519", "make the key to log in with")]]


def make_entry(config: AwsConfig, directory: str, hostfile: str, until: int, has_spot: bool) -> Entry:
    """Return the record of a cluster; `until` is the end of its lease in epoch seconds, 0 if not fixed yet."""
    # The option `yes` is of one run only, and a recipe belongs to the folder in which the command runs.
    kept = replace(config, yes=False, image="" if config.recipe else config.image)
    return Entry(
        config.name,
        "aws",
        hostfile,
        f"{directory}/ssh_config",
        f"{config.prefix}/env/bin/python",
        options={key: str(value) for key, value in asdict(kept).items()},
        ssh_config_there=f"{config.prefix}/clusters/{config.name}/ssh_config",
        # On-demand instances are never reclaimed, so hosts look for a notice only if one of them is a spot instance.
        notice=_NOTICE_URL if has_spot else "",
        renewal=RENEW_COMMAND,
        until=until,
    )


def _make_key_error(name: str, facts: RentalFacts) -> CpuftError:
    return CpuftError(
        f"the key of {name} is not on this machine: run the command where the cluster was made, or remove the "
        f"cluster with `cpuft provision down {name} --region {facts.region}`"
    )


def check_ssh_config(name: str, facts: RentalFacts) -> str:
    """Return the path of the cluster's ssh configuration; CpuftError if this machine does not have it."""
    path = f"{facts.directory}/ssh_config"
    if path not in facts.files:
        raise _make_key_error(name, facts)
    return path


def _resource_name(name: str) -> str:
    return f"cpuft-{name}"


def find_lease(config: AwsConfig, resources: Resources) -> tuple[int, int]:
    """Return (end, limit) of the lease in epoch seconds: the group's, else by the options (CpuftError: not valid)."""
    if resources.group:
        return resources.group.until, resources.group.limit
    now, lease = int(resources.now), parse_lease(config.lease)
    return now + lease, now + parse_limit(config.lease_limit, lease)


def _make_cluster_tags(config: AwsConfig, resources: Resources) -> dict[str, str]:
    return {Tag.CLUSTER: config.name, Tag.OWNER: resources.caller, Tag.UNTIL: str(find_lease(config, resources)[0])}


def _plan_group(config: AwsConfig, facts: RentalFacts) -> list[Step]:
    """Plan the security group with its tags; once it exists, plan that it has exactly the rules that it should have."""
    resources, region, group = facts.resources, facts.region, facts.resources.group
    if not group:
        tags = _make_cluster_tags(config, resources)
        tags |= {Tag.GENERATION: str(int(resources.now)), Tag.LIMIT: str(find_lease(config, resources)[1])}
        parameters = {
            "GroupName": _resource_name(config.name),
            "Description": "Made by cpuft provision",
            "TagSpecifications": specify_tags(tags, "security-group"),
        }
        return [plan_call("create_security_group", "create the security group", region, parameters)]
    inside: Rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group.id}]}
    ssh: Rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": facts.ssh_from}]}
    steps: list[Step] = []
    for direction, rules, wanted in (("ingress", group.ingress, (inside, ssh)), ("egress", group.egress, (inside,))):
        for verb, word, changed in (
            ("revoke", "close", [rule for rule in rules if rule not in wanted]),
            ("authorize", "open", [rule for rule in wanted if rule not in rules]),
        ):
            if changed:
                parameters = {"GroupId": group.id, "IpPermissions": changed}
                why = f"{word} {direction}: {', '.join(_describe_rule(rule, group) for rule in changed)}"
                steps.append(plan_call(f"{verb}_security_group_{direction}", why, region, parameters))
    return steps


def _describe_rule(rule: Rule, group: SecurityGroup) -> str:
    protocol, *ends, [peers] = rule.values()
    (peer,) = peers.values()
    ports = "all ports" if protocol == "-1" else f"{protocol} {' to '.join(map(str, dict.fromkeys(ends)))}"
    return f"{ports} for {'the cluster itself' if peer == group.id else peer}"


def _plan_placement(config: AwsConfig, facts: RentalFacts) -> list[Step]:
    if not facts.offer or not _uses_placement_group(config, facts.offer) or facts.resources.placement_group:
        return []
    why = "create the placement group, so that instances are close to each other"
    specification = specify_tags(_make_cluster_tags(config, facts.resources), "placement-group")
    parameters = {"GroupName": _resource_name(config.name), "Strategy": "cluster", "TagSpecifications": specification}
    return [plan_call("create_placement_group", why, facts.region, parameters)]


def _uses_placement_group(config: AwsConfig, offer: Offer) -> bool:
    return config.placement_group and config.nodes > 1 and offer.in_placement_groups


def choose_zone(
    config: AwsConfig, resources: Resources, offer: Offer, refused: Mapping[tuple[str, str], str]
) -> tuple[str, str]:
    """Return the zone to start instances in, and the market, "spot" or "on-demand"; not again a pair in `refused`.

    The zone is that of the instances that exist, otherwise --zone, otherwise the cheapest for spot instances, otherwise
    the first by name. Raises NoCapacityError when no zone is left.
    """
    used = {one.zone for one in resources.live}
    zones = [zone for zone in sorted(offer.zones) if zone in (used or {config.zone or zone})]
    for market in ("spot", "on-demand") if config.market == "spot-first" else (config.market,):
        if left := [zone for zone in zones if (zone, market) not in refused]:
            prices = offer.spot_prices if market == "spot" else {}
            return min(left, key=lambda zone: prices.get(zone, math.inf)), market
    reasons = "; ".join(f"{name}: {reason}" for (name, _), reason in refused.items())
    raise NoCapacityError(
        f"no zone has {counted(config.nodes - len(resources.live), 'instance')} of {config.type} ({reasons}): try "
        f"another --type or --region, {'' if config.spot else '--market spot, '}--no-placement-group, or wait"
    )


def _plan_launch(
    config: AwsConfig, facts: RentalFacts, group: SecurityGroup, offer: Offer, zone: str
) -> list[list[Step]]:
    """Plan one call that starts all missing instances or none.

    By its ClientToken, of security group, generation and zone, a call that is repeated after a lost response starts
    nothing again. A new generation begins when the present one has instances or is stale.
    """
    resources, region = facts.resources, facts.region
    missing, stages = config.nodes - len(resources.live), list[list[Step]]()
    if config.spot and not offer.has_spot_role:
        why = "create the role with which AWS starts spot instances, once for the account"
        stages.append([plan_call("create_service_linked_role", why, region, {"AWSServiceName": SPOT_SERVICE})])
    generation = group.generation
    is_used = any(one.generation == generation for one in resources.instances)
    if is_used or resources.now - generation > STALE_SECONDS:
        generation = max(int(resources.now), generation + 1)
        change = {"Resources": [group.id], "Tags": make_tags({Tag.GENERATION: str(generation)})}
        stages.append([plan_call("create_tags", "record that instances are requested again", region, change)])
    request = make_request(config, resources, offer, zone, missing)
    request["ClientToken"] = hash_text(f"{group.id} {generation} {zone}{' spot' * config.spot}", 32)
    request["UserData"] = format_user_data(group.until, group.limit, facts.public_key)
    request["NetworkInterfaces"][0]["Groups"] = [group.id]
    tags = {Tag.GENERATION: str(generation), Tag.GROUP: group.id, "Name": _resource_name(config.name)}
    for one in request["TagSpecifications"]:
        one["Tags"] += make_tags(tags)
    if _uses_placement_group(config, offer):
        request["Placement"]["GroupName"] = _resource_name(config.name)
    start = f"start {counted(missing, 'spot instance' if config.spot else 'instance')}"
    why = f"{start} of {config.type} in {zone}, all or none"
    return [*stages, [plan_call("run_instances", why, region, request)]]


def make_request(config: AwsConfig, resources: Resources, offer: Offer, zone: str, count: int) -> dict[str, Any]:
    """Return the parameters of RunInstances for `count` instances that a dry run can check before anything exists."""
    disk: dict[str, Any] = {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    disk["VolumeSize"] = max(config.disk, find_disk_size(offer.image))
    has_efa = offer.type.get("NetworkInfo", {}).get("EfaSupported")
    interface = {"DeviceIndex": 0, "SubnetId": offer.zones[zone], "AssociatePublicIpAddress": True}
    # The adapter carries all other traffic as well. Whether ranks use it is decided on the hosts.
    interface |= {"InterfaceType": "efa"} if has_efa and config.nodes > 1 else {}
    request: dict[str, Any] = {
        "ImageId": offer.image["ImageId"],
        "InstanceType": config.type,
        "MinCount": count,
        "MaxCount": count,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "BlockDeviceMappings": [{"DeviceName": offer.image["RootDeviceName"], "Ebs": disk}],
        "NetworkInterfaces": [interface | {"DeleteOnTermination": True}],
        "Placement": {"AvailabilityZone": zone},
    }
    # The policy that we print allows the call only if everything that it creates gets the tag.
    kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] if config.spot else [])]
    request["TagSpecifications"] = specify_tags(_make_cluster_tags(config, resources), *kinds)
    if config.spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return request


def plan_rental_down(name: str, facts: RentalFacts) -> Plan:
    """Return the steps that delete everything with the cluster's tag, in the order that AWS allows, then its record.

    While instances are not terminated, that is the only step. Raises CpuftError when somebody else made the cluster.
    """
    resources, region = facts.resources, facts.region
    _check_owner(name, resources)
    running = [one.id for one in resources.instances if one.state != "terminated"]
    if running:
        why = f"terminate {counted(len(running), 'instance')}"
        return Plan(((plan_call("terminate_instances", why, region, {"InstanceIds": running}),),))
    calls: list[CallStep] = []
    if resources.placement_group:
        parameters = {"GroupName": resources.placement_group}
        calls.append(plan_call("delete_placement_group", "delete the placement group", region, parameters))
    calls += [plan_call("delete_volume", "delete a disk", region, {"VolumeId": one}) for one in resources.volumes]
    if resources.group:
        parameters = {"GroupId": resources.group.id}
        calls.append(plan_call("delete_security_group", "delete the security group", region, parameters))
    stages = [tuple(calls), plan_removal(facts.files, facts.directory, facts.hostfile)]
    return Plan(tuple(stage for stage in stages if stage))


def plan_lease_extension(name: str, facts: RentalFacts, until: int) -> Plan:
    """Return the steps that move the end of the lease, and an earlier limit, to `until`: on AWS, instances and here.

    Raises CpuftError when the cluster has no instances any more or somebody else made it.
    """
    _check_owner(name, facts.resources)
    group, live = facts.resources.group, facts.resources.live
    if not group or not live:
        raise CpuftError(f"{name} has no instances in {facts.region}: rent some with `cpuft provision aws`")
    limit = max(until, group.limit)
    tags = make_tags({Tag.UNTIL: str(until), Tag.LIMIT: str(limit)})
    why = f"move the end of the lease from {format_time(group.until)} to {format_time(until)}"
    change = {"Resources": [group.id, *(one.id for one in live)], "Tags": tags}
    call = plan_call("create_tags", why, facts.region, change)
    command, why = make_schedule_command(until, limit), "set the end of the lease on the instance"
    stages: list[tuple[Step, ...]] = [(call,), tuple(Step(why, command, host=one.private) for one in live)]
    path = f"{facts.directory}/{FILE_NAME}"
    if path in facts.files:
        text = format_entry(replace(read_entry(Path(facts.directory).parent, name), until=until))
        stages.append(tuple(plan_files({path: text}, facts.files, "record the end of the lease")))
    return Plan(tuple(stage for stage in stages if stage))
