"""Starting instances, planned: which zone, what is asked for, and how the same call is known again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted
from cpuft.files import hash_text
from cpuft.plan import Step
from cpuft.provision.aws.calls import (
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
from cpuft.provision.aws.facts import Found, Group, Offer, Zone
from cpuft.provision.aws.lease import format_user_data, parse_lease, parse_limit
from cpuft.provision.aws.options import AwsConfig

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
