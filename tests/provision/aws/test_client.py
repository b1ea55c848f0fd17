"""Calls to AWS as steps of a plan."""

from __future__ import annotations

import json

import pytest

from cpuft.provision.aws.client import plan_call


@pytest.mark.parametrize("value", ["a b", "a'b", 'a"b', "$HOME", "a\nb", "--region", "é"])
def test_a_call_is_a_step_that_prints_as_a_command_of_aws(value: str) -> None:
    call = plan_call("run_instances", "start", "us-east-1", {"KeyName": value})
    assert call.command[:5] == ("aws", "ec2", "run-instances", "--region", "us-east-1")
    assert json.loads(call.command[-1]) == {"KeyName": value}
    assert (call.method, call.parameters) == ("run_instances", {"KeyName": value})
