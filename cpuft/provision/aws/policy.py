"""The IAM policy with the least permissions that renting needs, made from the table of calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cpuft.provision.aws.client import ACTIONS, CHANGE, CREATE, READ, ROLE, SPOT_SERVICE, tag_of

_SPOT_ROLE_ARN = f"arn:aws:iam::*:role/aws-service-role/{SPOT_SERVICE}/*"


def _require_new_tag(resource_type: str) -> dict[str, Any]:
    """Return the condition that a resource gets our tag when it is created."""
    return {"StringLike": {f"aws:RequestTag/{tag_of(resource_type)}": "*"}}


def _require_tag(resource_type: str) -> dict[str, Any]:
    """Return the condition that an existing resource carries our tag."""
    return {"StringLike": {f"aws:ResourceTag/{tag_of(resource_type)}": "*"}}


def make_policy() -> dict[str, Any]:
    """Return an IAM policy, as JSON values, that allows every call that this version can make, and no other call.

    Calls that change or delete resources are allowed only for resources with cpuft's tags.
    """
    creating = {name: action for name, action in ACTIONS.items() if action.kind == CREATE}
    statements = [_allow("Look", [one.permission for one in ACTIONS.values() if one.kind == READ], "*")]
    for name, action in creating.items():
        title, permissions = "".join(part.title() for part in name.split("_")), [action.permission]
        condition = _require_new_tag(action.targets[0])
        statements.append(_allow(title, permissions, _list_arns(action.targets), condition))
        if action.uses:
            statements.append(_allow(f"{title}From", permissions, _list_arns(action.uses)))
        if action.uses_tagged:
            condition = _require_tag(action.uses_tagged[0])
            statements.append(_allow(f"{title}Of", permissions, _list_arns(action.uses_tagged), condition))
    names = [action.permission.partition(":")[2] for action in creating.values()]
    created = sorted({kind for action in creating.values() for kind in action.targets})
    condition = {"StringEquals": {"ec2:CreateAction": names}}
    statements.append(_allow("TagAtBirth", ["ec2:CreateTags"], _list_arns(created), condition))
    changing = [one for one in ACTIONS.values() if one.kind == CHANGE]
    for kind in sorted({kind for one in changing for kind in one.targets}):
        title = "Change" + "".join(part.title() for part in kind.split("-"))
        permissions = [one.permission for one in changing if kind in one.targets]
        statements.append(_allow(title, permissions, _list_arns([kind]), _require_tag(kind)))
    permissions = [one.permission for one in ACTIONS.values() if one.kind == ROLE]
    condition = {"StringEquals": {"iam:AWSServiceName": SPOT_SERVICE}}
    statements.append(_allow("Spot", permissions, [_SPOT_ROLE_ARN], condition))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(name: str, permissions: list[str], resources: Any, condition: Any = None) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": sorted(permissions), "Resource": resources}
    return statement | ({"Condition": condition} if condition else {})


def _list_arns(resource_types: Iterable[str]) -> list[str]:
    """Return patterns of the names of all resources of these types. Those of images and snapshots name no account."""
    return [f"arn:aws:ec2:*:{'' if kind in ('image', 'snapshot') else '*'}:{kind}/*" for kind in resource_types]


def format_policy() -> str:
    """Return the policy as JSON text with a newline at its end, as IAM takes it."""
    return json.dumps(make_policy(), indent=2) + "\n"
