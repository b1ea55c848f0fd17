"""A rented cluster, planned: pure functions of what there is and what is asked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted, near_names
from cpuft.files import hash_text
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry, read_entry
from cpuft.hosts.ssh_files import KEYGEN
from cpuft.plan import Plan, Stages, Step
from cpuft.provision.aws.client import (
    GENERATION,
    GROUP,
    LIMIT,
    OWNER,
    SPOT_SERVICE,
    TAG,
    UNTIL,
    make_tags,
    plan_call,
    tag_all,
)
from cpuft.provision.aws.facts import QUOTAS, Found, Group, Instance, Offer, Rule, Zone, format_rules, is_standard
from cpuft.provision.aws.lease import RENEWAL, format_time, format_user_data, make_extension, parse_lease, parse_limit
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.cluster_files import KEY_MARK, is_ours, plan_files, plan_removal

_LEAST_PREFIX = 16


def parse_ssh_from(text: str) -> str:
    """A range of addresses from what a user said: `203.0.113.7` is `203.0.113.7/32`. Raises CpuftError."""
    try:
        found = ipaddress.IPv4Network(text.strip())
    except ValueError:
        raise CpuftError(f"--ssh-from {text!r:.60} is no IPv4 address: give yours, such as 203.0.113.7") from None
    if found.prefixlen < _LEAST_PREFIX:
        raise CpuftError(f"--ssh-from {text} is as good as the whole world: give your own address")
    return str(found)


def check_offer(config: AwsConfig, found: Found, offer: Offer, region: str) -> Offer:
    """The offer. Raises CpuftError when what is missing cannot be rented."""
    missing = config.nodes - len(found.live)
    market = "spot" if config.spot else "on-demand"
    if market not in offer.markets:
        raise CpuftError(f"{config.type} is not rented {market}: choose another --type")
    if "x86_64" not in offer.architectures:
        machine = "/".join(offer.architectures)
        raise CpuftError(f"{config.type} is {machine}, and cpuft needs x86_64: choose an Intel one with --type")
    if offer.image.architecture not in ("x86_64", ""):
        raise CpuftError(f"image {offer.image.id} is for {offer.image.architecture}: name one for x86_64 with --image")
    if config.threads_per_core == 1 and offer.threads and 1 not in offer.threads:
        raise CpuftError(f"{config.type} cannot leave a core's second thread out: drop --threads-per-core")
    if config.zone and config.zone not in offer.all_zones:
        raise CpuftError(
            f"{region} has no zone {config.zone!r:.60} for you: {near_names(config.zone, offer.all_zones)}"
        )
    if not offer.zones:
        raise CpuftError(f"no zone of {region} with a default subnet has {config.type}: try another --type or --region")
    _check_zones(config, offer, missing)
    _check_quota(config, offer, missing)
    return offer


def _check_zones(config: AwsConfig, offer: Offer, missing: int) -> None:
    zones = [zone for zone in offer.zones if zone.name == (config.zone or zone.name)]
    if not zones:
        others = ", ".join(zone.name for zone in offer.zones)
        raise CpuftError(f"{config.type} is not offered in {config.zone}, but in {others}: choose one of these")
    most = max(zone.addresses for zone in zones)
    if most < missing:
        raise CpuftError(
            f"{missing} instances are asked for, and the subnets have {most} free addresses: ask for fewer"
        )


def _check_quota(config: AwsConfig, offer: Offer, missing: int) -> None:
    """Of types with a quota of their own nothing is known before they are asked for."""
    asked = missing * offer.vcpus
    if offer.quota is not None and is_standard(config.type) and offer.used + asked > offer.quota:
        fit = max(0, int(offer.quota - offer.used) // offer.vcpus)
        code = QUOTAS[config.spot]
        raise CpuftError(
            f"{missing} x {config.type} are {asked} vCPUs; {offer.quota:.0f} may run at a time, {offer.used} do now: "
            f"{f'ask for {fit} nodes, or ' if fit else ''}have quota {code} raised in Service Quotas"
        )


STALE_SECONDS = 1800
"""After that nobody waits for the answer to a launch, and AWS still tells of what it started and has ended since."""
_PREPARE = (Path(__file__).with_name("user_data.sh")).read_text(encoding="utf-8")


class NoCapacityError(CpuftError):
    """Every zone that could be tried has refused."""


def resource_name(name: str) -> str:
    """What AWS knows a cluster's group, key and placement group by."""
    return f"cpuft-{name}"


def make_cluster_tags(config: AwsConfig, found: Found) -> dict[str, str]:
    """Tags of everything of a cluster. The group has decided when the lease ends."""
    until = found.group.until if found.group else int(found.now) + parse_lease(config.lease)
    return {TAG: config.name, OWNER: found.owner, UNTIL: str(until)}


def make_group_tags(config: AwsConfig, found: Found) -> dict[str, str]:
    """What the group alone remembers, beside those."""
    limit = int(found.now) + parse_limit(config.lease_limit, parse_lease(config.lease))
    return make_cluster_tags(config, found) | {GENERATION: str(int(found.now)), LIMIT: str(limit)}


def has_placement_group(config: AwsConfig, offer: Offer | None) -> bool:
    """Whether instances get a placement group: one alone needs none, and some types take none."""
    return config.placement_group and config.nodes > 1 and (offer is None or offer.clusters)


def choose_zone(config: AwsConfig, found: Found, offer: Offer, refused: Mapping[str, str]) -> Zone:
    """The zone of what is there already; else the first, for spot the cheapest, that has not refused.

    Raises NoCapacityError: all have refused, each named with its reason.
    """
    there = {one.zone for one in found.live}
    zones = [zone for zone in offer.zones if zone.name in (there or {config.zone or zone.name})]
    left = [zone for zone in zones if zone.name not in refused]
    if not left:
        told = "; ".join(f"{name}: {said}" for name, said in refused.items())
        raise NoCapacityError(
            f"no zone has {counted(config.nodes - len(found.live), 'instance')} of {config.type} ({told}): try "
            f"another --type or --region, {'' if config.spot else '--spot, '}--no-placement-group, or later"
        )
    return min(left, key=lambda zone: (zone.spot_price if config.spot else 0.0, zone.name))


def plan_launch(
    config: AwsConfig, found: Found, group: Group, offer: Offer, zone: Zone, region: str, directory: str
) -> list[list[Step]]:
    """All missing instances in one call, all or none.

    The call's token says what is asked for: the group, the generation, the zone. So the same call again, after an
    answer that was lost, starts nothing. What ended since then needs a new generation.
    """
    missing, stages = config.nodes - len(found.live), []
    if config.spot and not offer.spot_role:
        why = "make the role by which AWS starts spot instances, once for the account"
        stages.append([plan_call("create_service_linked_role", why, region, {"AWSServiceName": SPOT_SERVICE})])
    generation = group.generation
    used = any(one.generation == generation for one in found.instances)
    if used or found.now - generation > STALE_SECONDS:
        generation = max(int(found.now), generation + 1)
        change = {"Resources": [group.id], "Tags": make_tags({GENERATION: str(generation)})}
        stages.append([plan_call("create_tags", "note that instances are asked for anew", region, change)])
    path = f"{directory}/user-data"
    command = ("sh", "-c", _PREPARE, "prepare", f"{directory}/host_key", path)
    told = format_user_data(group.until, group.limit)
    stages.append([Step("write what instances are told at birth", command, stdin=told)])
    request = make_request(config, found, offer, zone, missing) | {
        "ClientToken": hash_text(f"{group.id} {generation} {zone.name}{' spot' * config.spot}", 32),
        "KeyName": resource_name(config.name),
    }
    request["NetworkInterfaces"][0]["Groups"] = [group.id]
    for one in request["TagSpecifications"]:
        own = {GENERATION: str(generation), GROUP: group.id, "Name": resource_name(config.name)}
        one["Tags"] += make_tags(own)
    if has_placement_group(config, offer):
        request["Placement"]["GroupName"] = resource_name(config.name)
    why = f"start {counted(missing, 'instance')} of {config.type} in {zone.name}, all or none"
    return [*stages, [plan_call("run_instances", why, region, request, {"UserData": path})]]


def make_request(config: AwsConfig, found: Found, offer: Offer, zone: Zone, missing: int) -> dict[str, Any]:
    """RunInstances' parameters, but for what must have been made before: so far it can be tried out."""
    disk: dict[str, Any] = {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    disk["VolumeSize"] = max(config.disk, offer.image.gigabytes)
    interface = {"DeviceIndex": 0, "SubnetId": zone.subnet, "AssociatePublicIpAddress": True}
    # Whether ranks use it is decided by what the hosts say: it carries everything else as well.
    interface |= {"InterfaceType": "efa"} if offer.efa and config.nodes > 1 else {}
    request: dict[str, Any] = {
        "ImageId": offer.image.id,
        "InstanceType": config.type,
        "MinCount": missing,
        "MaxCount": missing,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "BlockDeviceMappings": [{"DeviceName": offer.image.root, "Ebs": disk}],
        "NetworkInterfaces": [interface | {"DeleteOnTermination": True}],
        "Placement": {"AvailabilityZone": zone.name},
    }
    # Without the tag it would not be allowed: the printed policy lets nothing else be made.
    kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] if config.spot else [])]
    request["TagSpecifications"] = tag_all(make_cluster_tags(config, found), *kinds)
    if config.threads_per_core < max(offer.threads, default=0):
        request["CpuOptions"] = {"CoreCount": offer.cores, "ThreadsPerCore": config.threads_per_core}
    if config.spot:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return request


NOTICE = "http://169.254.169.254/latest/meta-data/spot/instance-action"
"""Answers on a spot instance that AWS is about to take back."""


@dataclass(frozen=True)
class Facts:
    """What planning a rented cluster needs to know."""

    found: Found
    files: Mapping[str, str]
    """Texts of the cluster's files on this machine, by path."""
    directory: str
    hostfile: str
    region: str
    address: str = ""
    """The only range of addresses that may reach ssh."""
    offer: Offer | None = None
    """Gathered when something is missing only."""
    refused: Mapping[str, str] | None = None
    """Why zones had no instances, by their names."""
    on_demand: bool = False
    """Whether spot instances were asked for in vain, and others will do."""


def check_owner(name: str, found: Found) -> None:
    """Raises CpuftError when somebody else made the cluster."""
    others = found.owners - {found.owner}
    if others:
        raise CpuftError(f"{name} is a cluster of {others.pop()}, and you are {found.owner}: choose another --name")


def check_rental(config: AwsConfig, found: Found) -> None:
    """Raises CpuftError when what there is can never become what is asked for."""
    check_owner(config.name, found)
    down = f"cpuft provision down {config.name}"
    if found.group and found.group.until <= found.now:
        ended = f"the lease of {config.name} ended at {format_time(found.group.until)}"
        if not found.live or found.group.limit <= found.now:
            raise CpuftError(f"{ended}: {down}, and rent it anew")
        if len(found.live) < config.nodes:
            raise CpuftError(f"{ended}, and only a job keeps its nodes: cpuft provision extend {config.name} first")
    if len(found.live) > config.nodes:
        raise CpuftError(f"{config.name} has {len(found.live)} nodes, --nodes {config.nodes} asks for fewer: {down}")
    kinds = sorted({(one.type, one.zone, one.spot) for one in found.live})
    for kind, zone, _ in kinds:
        if kind != config.type:
            raise CpuftError(f"{config.name} has nodes of type {kind}: {down}, or ask for --type {kind}")
        if config.zone and zone != config.zone:
            raise CpuftError(f"{config.name} is in zone {zone}: {down}, or leave out --zone")


def plan_rental(config: AwsConfig, facts: Facts) -> Plan:
    """What is missing of the cluster at AWS, and of its files here. Raises CpuftError when it cannot be had."""
    found = facts.found
    check_rental(config, found)
    stages: list[list[Step]] = [*_plan_files(config, facts), _plan_group(config, facts), _plan_others(config, facts)]
    config = replace(config, spot=config.spot and not facts.on_demand)
    missing = config.nodes - len(found.live)
    notes = []
    if missing and facts.offer:
        zone = choose_zone(config, found, facts.offer, facts.refused or {})
        if found.group:
            stages += plan_launch(config, found, found.group, facts.offer, zone, facts.region, facts.directory)
        else:
            what = f"{counted(missing, 'instance')} of image {facts.offer.image.name or facts.offer.image.id}"
            notes = [f"when the group is there: ssh from {facts.address} only, {what} in {zone.name}"]
    return Plan(tuple(tuple(stage) for stage in stages if stage), tuple(notes))


def _plan_files(config: AwsConfig, facts: Facts) -> list[list[Step]]:
    """The entry first, then two keys: that we log in with, and that hosts show the first time."""
    base = facts.directory
    python, there = f"{config.prefix}/env/bin/python", f"{config.prefix}/clusters/{config.name}/ssh_config"
    entry = Entry(config.name, "aws", facts.hostfile, f"{base}/ssh_config", python, {}, remember(config), there)
    entry = replace(entry, notice=find_notice(config), renewal=RENEWAL)
    entry = replace(entry, until=facts.found.group.until if facts.found.group else 0)
    steps = plan_files({f"{base}/{FILE_NAME}": format_entry(entry)}, facts.files, "remember the cluster")
    keys = [
        Step(why, ("sh", "-c", KEYGEN, "keygen", f"{base}/{name}", KEY_MARK, kind))
        for name, kind, why in (
            ("id_ed25519", "ed25519", "make the key to log in with"),
            ("host_key", "ecdsa", "make the key that its hosts show first"),
        )
        if f"{base}/{name}.pub" not in facts.files
    ]
    if keys and facts.found.live:
        raise _lacks_keys(config.name, facts)
    return [steps, keys]


def remember(config: AwsConfig) -> dict[str, str]:
    """What the entry keeps of what was asked for: not what concerns one run."""
    return {key: str(value) for key, value in asdict(replace(config, yes=False, recipe="")).items()}


def find_notice(config: AwsConfig) -> str:
    """Where the hosts learn that they are about to go; empty for what is never taken back."""
    return NOTICE if config.spot else ""


def _lacks_keys(name: str, facts: Facts) -> CpuftError:
    down = f"cpuft provision down {name} --region {facts.region}"
    return CpuftError(f"the keys of {name} are not on this machine: go on where it was made, or {down}")


def check_config(name: str, facts: Facts) -> str:
    """Path of the configuration by which this machine's ssh reaches the instances. Raises CpuftError without one."""
    path = f"{facts.directory}/ssh_config"
    if path not in facts.files:
        raise _lacks_keys(name, facts)
    return path


def _plan_group(config: AwsConfig, facts: Facts) -> list[Step]:
    """The group carries what the cluster is to be; its rules are exactly what they must be."""
    found, region, group = facts.found, facts.region, facts.found.group
    if not group:
        assert facts.offer
        tags = make_group_tags(config, found)
        parameters = {
            "GroupName": resource_name(config.name),
            "Description": "Made by cpuft provision",
            "VpcId": facts.offer.zones[0].vpc,
            "TagSpecifications": tag_all(tags, "security-group"),
        }
        return [plan_call("create_security_group", "make the security group", region, parameters)]
    inside: Rule = ("-1", -1, -1, group.id)
    ssh: Rule = ("tcp", 22, 22, facts.address)
    steps = []
    for way, has, wanted in (("ingress", group.ingress, {inside, ssh}), ("egress", group.egress, {inside})):
        changes = (("revoke", {*has} - wanted, "close"), ("authorize", wanted - {*has}, "open"))
        for verb, rules, word in changes:
            if rules:
                told = ", ".join(_describe_rule(rule, group) for rule in sorted(rules))
                parameters = {"GroupId": group.id, "IpPermissions": format_rules(sorted(rules))}
                why = f"{word} {way}: {told}"
                steps.append(plan_call(f"{verb}_security_group_{way}", why, region, parameters))
    return steps


def _describe_rule(rule: Rule, group: Group) -> str:
    protocol, first, last, peer = rule
    ports = "all ports" if protocol == "-1" else f"{protocol} {first}" + (f" to {last}" if last != first else "")
    return f"{ports} for {'the hosts themselves' if peer == group.id else peer}"


def _plan_others(config: AwsConfig, facts: Facts) -> list[Step]:
    found, name = facts.found, resource_name(config.name)
    tags, steps = make_cluster_tags(config, found), []
    if has_placement_group(config, facts.offer) and not found.placement_group and facts.offer:
        why = "make the placement group, so that instances are close to each other"
        parameters = {"GroupName": name, "Strategy": "cluster", "TagSpecifications": tag_all(tags, "placement-group")}
        steps.append(plan_call("create_placement_group", why, facts.region, parameters))
    if not found.key_pair:
        parameters = {"KeyName": name, "TagSpecifications": tag_all(tags, "key-pair")}
        public = {"PublicKeyMaterial": f"{facts.directory}/id_ed25519.pub"}
        steps.append(plan_call("import_key_pair", "tell AWS the key to log in with", facts.region, parameters, public))
    return steps


def needs_offer(config: AwsConfig, found: Found) -> bool:
    """Whether something is missing that AWS must be asked about first."""
    lacks_place = config.placement_group and config.nodes > 1 and not found.placement_group
    return len(found.live) < config.nodes or not found.group or lacks_place


def plan_rental_down(name: str, facts: Facts) -> Plan:
    """Everything with the cluster's tag, in the order in which it can go; what remembers it last."""
    found, region = facts.found, facts.region
    check_owner(name, found)
    running = [one.id for one in found.instances if one.state not in ("terminated", "shutting-down")]
    if running:
        why = f"end {counted(len(running), 'instance')}"
        return Plan(((plan_call("terminate_instances", why, region, {"InstanceIds": running}),),))
    steps = []
    for kind, there in (("placement_group", found.placement_group), ("key_pair", found.key_pair)):
        parameters = {"GroupName" if kind == "placement_group" else "KeyName": there}
        steps += [plan_call(f"delete_{kind}", f"delete the {kind.replace('_', ' ')}", region, parameters)] * bool(there)
    steps += [plan_call("delete_volume", "delete a disk", region, {"VolumeId": one}) for one in found.volumes]
    if found.group:
        parameters = {"GroupId": found.group.id}
        steps.append(plan_call("delete_security_group", "delete the security group", region, parameters))
    removal = plan_removal(facts.files, facts.directory, facts.hostfile, f"{facts.hostfile}.lock")
    stages = [tuple(steps), removal if is_ours(facts.files, facts.directory) else ()]
    return Plan(tuple(stage for stage in stages if stage))


def plan_extension(name: str, facts: Facts, until: int) -> Plan:
    """Let a lease end at another time, as far as tags tell of it.

    Raises CpuftError: there is nothing left whose lease could go on.
    """
    check_owner(name, facts.found)
    group, live = facts.found.group, facts.found.live
    if not group or not live:
        raise CpuftError(f"{name} has no instances in {facts.region} any more: rent them with cpuft provision aws")
    tags = make_tags({UNTIL: str(until), LIMIT: str(max(until, group.limit))})
    change = {"Resources": [group.id, *(one.id for one in live)], "Tags": tags}
    why = f"move the end of the lease from {format_time(group.until)} to {format_time(until)}"
    return Plan(((plan_call("create_tags", why, facts.region, change),),))


def tell_instances(found: Found, until: int) -> tuple[Step, ...]:
    """Instances end themselves at the time that they know."""
    limit = max(until, found.group.limit if found.group else 0)
    return tuple(Step("tell the instance", make_extension(until, limit), host=one.private) for one in found.live)


def plan_lease_note(name: str, facts: Facts, until: int) -> Stages:
    """Note in the cluster's entry when its lease ends, where it is remembered here."""
    path = f"{facts.directory}/{FILE_NAME}"
    if path not in facts.files:
        return ()
    entry = read_entry(Path(facts.directory).parent, name)
    steps = plan_files({path: format_entry(replace(entry, until=until))}, facts.files, "note the end of the lease")
    return (tuple(steps),) if steps else ()


def is_young(found: Found, made: float, seconds: float) -> bool:
    """Whether something that was asked for may still appear: AWS tells of it some time after."""
    asked = max(made, float(found.group.generation) if found.group else 0.0)
    return found.now - asked < seconds


def name_states(instances: tuple[Instance, ...]) -> str:
    """`2 running, 1 pending`."""
    states = [one.state for one in instances]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
