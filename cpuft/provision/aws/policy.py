"""The least that credentials must allow for renting: an IAM policy made from the table of calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cpuft.provision.aws.calls import ACTIONS, CHANGE, LOOK, MAKE, TAG

_NEW = {"StringLike": {f"aws:RequestTag/{TAG}": "*"}}
"""Only what carries a cluster's tag from its first moment may be made."""
_OURS = {"StringLike": {f"aws:ResourceTag/{TAG}": "*"}}
"""Only what carries a cluster's tag may be changed or ended."""


def make_policy() -> dict[str, Any]:
    """A policy of every call that this version can make, and of no other."""
    made = {name: action for name, action in ACTIONS.items() if action.kind == MAKE}
    statements = [_allow("Look", [one.right for one in ACTIONS.values() if one.kind == LOOK], "*")]
    for name, action in made.items():
        title = "".join(part.title() for part in name.split("_"))
        statements.append(_allow(title, [action.right], _resources(action.made), _NEW))
        if action.used:
            statements.append(_allow(f"{title}From", [action.right], _resources(action.used)))
    births = {"StringEquals": {"ec2:CreateAction": [action.right.partition(":")[2] for action in made.values()]}}
    kinds = {kind for action in made.values() for kind in action.made}
    statements.append(_allow("TagAtBirth", ["ec2:CreateTags"], _resources(sorted(kinds)), births))
    changes = [one for one in ACTIONS.values() if one.kind == CHANGE]
    for kind in sorted({kind for one in changes for kind in one.made}):
        title = "Change" + "".join(part.title() for part in kind.split("-"))
        statements.append(_allow(title, [one.right for one in changes if kind in one.made], _resources([kind]), _OURS))
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(name: str, rights: list[str], resources: Any, condition: Any = None) -> dict[str, Any]:
    statement = {"Sid": name, "Effect": "Allow", "Action": sorted(rights), "Resource": resources}
    return statement | ({"Condition": condition} if condition else {})


def _resources(kinds: Iterable[str]) -> list[str]:
    # Images belong to nobody's account where they are public.
    return [f"arn:aws:ec2:*:{'' if kind == 'image' else '*'}:{kind}/*" for kind in kinds]


def format_policy() -> str:
    """The policy as IAM takes it."""
    return json.dumps(make_policy(), indent=2) + "\n"
