"""The least that credentials must allow for renting: an IAM policy made from the table of calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cpuft.provision.aws.client import ACTIONS, CHANGE, LOOK, MAKE, ROLE, SPOT_SERVICE, tag_of

_ROLE = f"arn:aws:iam::*:role/aws-service-role/{SPOT_SERVICE}/*"


def _new(kind: str) -> dict[str, Any]:
    """Only what carries our tag from its first moment may be made."""
    return {"StringLike": {f"aws:RequestTag/{tag_of(kind)}": "*"}}


def _ours(kind: str) -> dict[str, Any]:
    """Only what carries our tag may be changed or ended."""
    return {"StringLike": {f"aws:ResourceTag/{tag_of(kind)}": "*"}}


def make_policy() -> dict[str, Any]:
    """A policy of every call that this version can make, and of no other."""
    made = {name: action for name, action in ACTIONS.items() if action.kind == MAKE}
    statements = [_allow("Look", [one.right for one in ACTIONS.values() if one.kind == LOOK], "*")]
    for name, action in made.items():
        title = "".join(part.title() for part in name.split("_"))
        statements.append(_allow(title, [action.right], _resources(action.made), _new(action.made[0])))
        if action.used:
            statements.append(_allow(f"{title}From", [action.right], _resources(action.used)))
        if action.ours:
            statements.append(_allow(f"{title}Of", [action.right], _resources(action.ours), _ours(action.ours[0])))
    births = {"StringEquals": {"ec2:CreateAction": [action.right.partition(":")[2] for action in made.values()]}}
    kinds = {kind for action in made.values() for kind in action.made}
    statements.append(_allow("TagAtBirth", ["ec2:CreateTags"], _resources(sorted(kinds)), births))
    changes = [one for one in ACTIONS.values() if one.kind == CHANGE]
    for kind in sorted({kind for one in changes for kind in one.made}):
        title = "Change" + "".join(part.title() for part in kind.split("-"))
        rights = [one.right for one in changes if kind in one.made]
        statements.append(_allow(title, rights, _resources([kind]), _ours(kind)))
    roles = [one.right for one in ACTIONS.values() if one.kind == ROLE]
    statements.append(_allow("Spot", roles, [_ROLE], {"StringEquals": {"iam:AWSServiceName": SPOT_SERVICE}}))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(name: str, rights: list[str], resources: Any, condition: Any = None) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": sorted(rights), "Resource": resources}
    return statement | ({"Condition": condition} if condition else {})


def _resources(kinds: Iterable[str]) -> list[str]:
    # Names of images and snapshots hold no account.
    return [f"arn:aws:ec2:*:{'' if kind in ('image', 'snapshot') else '*'}:{kind}/*" for kind in kinds]


def format_policy() -> str:
    """The policy as IAM takes it."""
    return json.dumps(make_policy(), indent=2) + "\n"
