"""A rented cluster, planned: pure functions of what there is and what is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpuft.errors import CpuftError, counted
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry, read_entry
from cpuft.hosts.ssh_files import KEYGEN
from cpuft.plan import Plan, Stages, Step
from cpuft.provision.aws.calls import LIMIT, UNTIL, make_tags, plan_call, tag_all
from cpuft.provision.aws.facts import Found, Group, Instance, Offer, Rule, format_rules
from cpuft.provision.aws.launching import (
    choose_zone,
    has_placement_group,
    make_cluster_tags,
    make_group_tags,
    plan_launch,
    resource_name,
)
from cpuft.provision.aws.lease import RENEWAL, format_time, make_extension
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.ownership import KEY_MARK, is_ours, plan_removal
from cpuft.provision.reconcile import plan_files

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
