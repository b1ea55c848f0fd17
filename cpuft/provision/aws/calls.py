"""Calls to AWS as steps of a plan: each prints as a line of AWS's own command line, and is made by boto3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpuft.plan import Step

TAG = "cpuft:cluster"
"""Tag of everything that belongs to a cluster; its value is the cluster's name. Everything else is found by it."""
OWNER, UNTIL, GENERATION = "cpuft:owner", "cpuft:until", "cpuft:generation"
"""Who made it; when its lease ends; when its missing instances were last asked for. Times are seconds of the epoch."""
LIMIT, GROUP = "cpuft:limit", "cpuft:group"
"""Until when a running job may move the end of the lease; of an instance, which group it was started in."""
IMAGE, ENVIRONMENT = "cpuft:image", "cpuft:environment"
"""Of images and their snapshots, which outlive clusters: the recipe's digest, the environment's stamp."""

LOOK, MAKE, CHANGE, ROLE = "look", "make", "change", "role"
"""What a call does: nothing; make something with our tag; change or end something that has the tag; make the role
without which AWS starts no spot instances."""
SPOT_SERVICE, SPOT_ROLE = "spot.amazonaws.com", "AWSServiceRoleForEC2Spot"


@dataclass(frozen=True)
class Action:
    """One call that this room may make."""

    service: str
    """As boto3 and AWS's command line call it."""
    right: str
    """As a policy calls it."""
    kind: str
    made: tuple[str, ...] = ()
    """Kinds of resources that it makes, or changes."""
    used: tuple[str, ...] = ()
    """Kinds of resources that it needs, and that are not the cluster's."""
    ours: tuple[str, ...] = ()
    """Kinds of resources that it needs, and that must be the cluster's."""


def tag_of(kind: str) -> str:
    """The tag that all resources of a kind carry that are ours."""
    return IMAGE if kind in ("image", "snapshot") else TAG


def _look(right: str, service: str = "ec2", prefix: str = "") -> Action:
    return Action(service, f"{prefix or service}:{right}", LOOK)


def _change(right: str, *made: str) -> Action:
    return Action("ec2", f"ec2:{right}", CHANGE, made)


ACTIONS: dict[str, Action] = {
    "get_caller_identity": _look("GetCallerIdentity", "sts"),
    "get_role": _look("GetRole", "iam"),
    "get_parameter": _look("GetParameter", "ssm"),
    "get_service_quota": _look("GetServiceQuota", "service-quotas", "servicequotas"),
    "describe_images": _look("DescribeImages"),
    "describe_instance_type_offerings": _look("DescribeInstanceTypeOfferings"),
    "describe_instance_types": _look("DescribeInstanceTypes"),
    "describe_instances": _look("DescribeInstances"),
    "describe_key_pairs": _look("DescribeKeyPairs"),
    "describe_placement_groups": _look("DescribePlacementGroups"),
    "describe_security_groups": _look("DescribeSecurityGroups"),
    "describe_snapshots": _look("DescribeSnapshots"),
    "describe_spot_price_history": _look("DescribeSpotPriceHistory"),
    "describe_subnets": _look("DescribeSubnets"),
    "describe_volumes": _look("DescribeVolumes"),
    "create_security_group": Action("ec2", "ec2:CreateSecurityGroup", MAKE, ("security-group",), ("vpc",)),
    "create_placement_group": Action("ec2", "ec2:CreatePlacementGroup", MAKE, ("placement-group",)),
    "import_key_pair": Action("ec2", "ec2:ImportKeyPair", MAKE, ("key-pair",)),
    "run_instances": Action(
        "ec2",
        "ec2:RunInstances",
        MAKE,
        ("instance", "volume", "network-interface", "spot-instances-request"),
        ("image", "subnet", "security-group", "key-pair", "placement-group"),
    ),
    "create_image": Action("ec2", "ec2:CreateImage", MAKE, ("image", "snapshot"), ours=("instance",)),
    "create_service_linked_role": Action("iam", "iam:CreateServiceLinkedRole", ROLE),
    "create_tags": _change("CreateTags", "security-group", "instance"),
    "authorize_security_group_ingress": _change("AuthorizeSecurityGroupIngress", "security-group"),
    "authorize_security_group_egress": _change("AuthorizeSecurityGroupEgress", "security-group"),
    "revoke_security_group_ingress": _change("RevokeSecurityGroupIngress", "security-group"),
    "revoke_security_group_egress": _change("RevokeSecurityGroupEgress", "security-group"),
    "terminate_instances": _change("TerminateInstances", "instance"),
    "delete_security_group": _change("DeleteSecurityGroup", "security-group"),
    "delete_placement_group": _change("DeletePlacementGroup", "placement-group"),
    "delete_key_pair": _change("DeleteKeyPair", "key-pair"),
    "delete_volume": _change("DeleteVolume", "volume"),
    "deregister_image": _change("DeregisterImage", "image"),
    "delete_snapshot": _change("DeleteSnapshot", "snapshot"),
}
"""All calls of this room, by boto3's names for them: no other can be made, and the printed policy is made of these."""


@dataclass(frozen=True)
class Call:
    """A call, its parameters as AWS has them."""

    method: str
    """One of ACTIONS."""
    parameters: dict[str, Any]
    files: dict[str, str]
    """Parameters that are files' contents: name -> path."""


def plan_call(
    method: str, why: str, region: str, parameters: Mapping[str, Any], files: Mapping[str, str] | None = None
) -> Step:
    """A call as a step: the words of AWS's command line that do the same. What is secret comes from a file."""
    words = ["aws", ACTIONS[method].service, method.replace("_", "-"), "--region", region]
    words += ["--cli-input-json", json.dumps(parameters)]
    for name, path in (files or {}).items():
        words += [f"--{_dashed(name)}", f"fileb://{path}"]
    return Step(why, tuple(words))


def parse_call(step: Step) -> Call | None:
    """The call that `plan_call` wrote; None for a step that is none."""
    if step.command[0] != "aws":
        return None
    _, _, verb, _, _, _, text, *rest = step.command
    files = {
        "".join(part.title() for part in flag[2:].split("-")): path.removeprefix("fileb://")
        for flag, path in zip(rest[::2], rest[1::2])
    }
    return Call(verb.replace("-", "_"), json.loads(text), files)


def _dashed(name: str) -> str:
    """`UserData` -> `user-data`."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


def make_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as calls have them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_all(tags: Mapping[str, str], *kinds: str) -> list[dict[str, Any]]:
    """TagSpecifications that give all resources a call makes these tags, from their first moment."""
    return [{"ResourceType": kind, "Tags": make_tags(tags)} for kind in kinds]


def read_tags(found: Mapping[str, Any]) -> dict[str, str]:
    """Tags of what a call described."""
    return {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
