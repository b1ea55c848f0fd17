"""Calls to AWS as steps of a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpuft.provision.aws.client import POLICY, CallError, plan_call


@pytest.mark.parametrize("value", ["a b", "a'b", 'a"b', "$HOME", "a\nb", "--region", "é"])
def test_a_call_is_a_step_that_prints_as_a_command_of_aws(value: str) -> None:
    call = plan_call("run_instances", "start", "us-east-1", {"KeyName": value})
    assert call.command[:5] == ("aws", "ec2", "run-instances", "--region", "us-east-1")
    assert json.loads(call.command[-1]) == {"KeyName": value}
    assert (call.method, call.parameters) == ("run_instances", {"KeyName": value})


@pytest.mark.parametrize(
    ("code", "status", "is_transient", "said"),
    [
        ("InsufficientInstanceCapacity", 500, False, "AWS refused ec2:RunInstances (InsufficientInstanceCapacity: no)"),
        ("InternalError", 500, True, "AWS cannot do ec2:RunInstances now (InternalError: no): run the command again"),
        ("InvalidGroup.NotFound", 400, True, "AWS cannot do ec2:RunInstances now (InvalidGroup.NotFound: no)"),
        ("", 0, True, "AWS does not answer (ec2:RunInstances: no): check --region"),
        ("VcpuLimitExceeded", 400, False, "your quota does not allow this beside what runs already (VcpuLimitExceeded"),
        ("UnauthorizedOperation", 403, False, "your AWS credentials lack the permission ec2:RunInstances"),
        ("ExpiredToken", 400, False, "AWS does not accept your credentials (ExpiredToken): put an access key"),
    ],
)
def test_what_a_failed_call_says(code: str, status: int, is_transient: bool, said: str) -> None:
    """A capacity error comes as HTTP 500, and repeating the call in the same zone would not help."""
    error = CallError("ec2:RunInstances", code, "no.", status)
    assert error.is_transient == is_transient
    assert str(error).startswith(said)


def list_actions(*statements: dict[str, Any]) -> set[str]:
    actions = [one["Action"] for one in statements]
    return {action for one in actions for action in ([one] if isinstance(one, str) else one)}


CHANGING = {"ec2:AuthorizeSecurityGroupEgress", "ec2:AuthorizeSecurityGroupIngress", "ec2:CreateTags"}
CHANGING |= {"ec2:RevokeSecurityGroupEgress", "ec2:RevokeSecurityGroupIngress", "ec2:TerminateInstances"}
CHANGING |= {"ec2:DeletePlacementGroup", "ec2:DeleteSecurityGroup", "ec2:DeleteVolume"}
CHANGING |= {"ec2:DeleteSnapshot", "ec2:DeregisterImage"}


def test_the_policy_allows_changing_tagged_resources_only() -> None:
    statements = json.loads(POLICY.read_text())["Statement"]
    for one in statements:
        actions, kinds = list_actions(one), {part.split(":")[-1] for part in one["Resource"]}
        if actions & CHANGING and one["Sid"] != "TagAtBirth":
            tag = "image" if "image/*" in kinds else "cluster"
            assert one["Condition"] == {"StringLike": {f"aws:ResourceTag/cpuft:{tag}": "*"}}, one["Sid"]
            assert actions <= CHANGING, one["Sid"]
    assert [one["Sid"] for one in statements if one["Resource"] == "*"] == ["Look"]
    assert all(action.partition(":")[2].startswith(("Describe", "Get")) for action in list_actions(statements[0]))


def test_the_policy_allows_creating_tagged_resources_only() -> None:
    statements = {one["Sid"]: one for one in json.loads(POLICY.read_text())["Statement"]}
    for name, tag in (("CreateTagged", "cluster"), ("CreateTaggedImage", "image")):
        assert statements[name]["Condition"] == {"StringLike": {f"aws:RequestTag/cpuft:{tag}": "*"}}
    creating = list_actions(*(statements[name] for name in ("CreateTagged", "CreateTaggedImage")))
    free = [name for name, one in statements.items() if list_actions(one) & creating and "Condition" not in one]
    assert free == ["CreateSecurityGroupIn", "RunInstancesFrom"]
    assert statements["CreateSecurityGroupIn"]["Resource"] == "arn:aws:ec2:*:*:vpc/*"
    created = {*statements["CreateTagged"]["Resource"]}
    assert created & {*statements["RunInstancesFrom"]["Resource"]} == {
        "arn:aws:ec2:*:*:placement-group/*",
        "arn:aws:ec2:*:*:security-group/*",
    }
    births = statements["TagAtBirth"]["Condition"]["StringEquals"]["ec2:CreateAction"]
    assert {f"ec2:{name}" for name in births} == creating
