"""The printed policy: what it allows to create, change and read."""

from __future__ import annotations

import json

from cpuft.provision.aws.client import ACTIONS, CHANGE, CREATE, ROLE, tag_of
from cpuft.provision.aws.policy import format_policy, make_policy


def test_the_policy_allows_creating_and_changing_tagged_resources_only() -> None:
    statements = make_policy()["Statement"]
    assert json.loads(format_policy()) == make_policy()
    granted = {right for statement in statements for right in statement["Action"]}
    assert granted == {action.permission for action in ACTIONS.values()}
    free = [one for one in statements if one["Resource"] == "*"]
    assert [one["Sid"] for one in free] == ["Look"]
    roles = [action.permission for action in ACTIONS.values() if action.kind == ROLE]
    (role,) = [one for one in statements if one["Action"] == roles]
    assert role["Condition"] == {"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}}
    changes = {action.permission for action in ACTIONS.values() if action.kind == CHANGE} - {"ec2:CreateTags"}
    for statement in statements:
        condition = json.dumps(statement.get("Condition"))
        if_changes = {*statement["Action"]} & changes
        kind = statement["Resource"][0].split(":")[-1].removesuffix("/*")
        assert not if_changes or f'"aws:ResourceTag/{tag_of(kind)}"' in condition
    (imaged,) = [one for one in statements if one["Sid"] == "CreateImageOf"]
    assert (imaged["Resource"], list(imaged["Condition"]["StringLike"])) == (
        ["arn:aws:ec2:*:*:instance/*"],
        ["aws:ResourceTag/cpuft:cluster"],
    )
    made = {action.permission: action.targets for action in ACTIONS.values() if action.kind == CREATE}
    for right, kinds in made.items():
        resources = [
            resource
            for one in statements
            if right in one["Action"] and f"aws:RequestTag/{tag_of(kinds[0])}" in json.dumps(one.get("Condition"))
            for resource in one["Resource"]
        ]
        accounts = ["" if kind in ("image", "snapshot") else "*" for kind in kinds]
        assert resources == [f"arn:aws:ec2:*:{account}:{kind}/*" for account, kind in zip(accounts, kinds)]
