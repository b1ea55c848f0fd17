"""Facts about what AWS has, read from its responses."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cpuft.provision.aws import facts
from cpuft.provision.aws.client import AwsClient, CallError
from cpuft.provision.aws.options import AwsConfig
from tests.provision.aws.region import format_console
from tests.provision.aws.test_plan import GROUP, make_instance


def test_rules_are_read_with_one_peer_each() -> None:
    found = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 23,
        "IpRanges": [{"CidrIp": "203.0.113.7/32", "Description": "me"}, {"CidrIp": "10.0.0.0/8"}],
        "Ipv6Ranges": [{"CidrIpv6": "::/0"}],
        "PrefixListIds": [],
    }
    inside = {"IpProtocol": "-1", "FromPort": -1, "UserIdGroupPairs": [{"GroupId": "sg-1", "UserId": "1"}]}
    ports = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 23}
    assert facts.parse_rules([found, inside]) == (
        {**ports, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]},
        {**ports, "IpRanges": [{"CidrIp": "10.0.0.0/8"}]},
        {**ports, "Ipv6Ranges": [{"CidrIpv6": "::/0"}]},
        {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]},
    )


def test_instances_of_an_earlier_cluster_of_the_same_name_are_left_out() -> None:
    mine = (make_instance(1, group="sg-1", state="terminated"), make_instance(2, group="sg-1"))
    other = make_instance(3, group="sg-0", state="terminated")
    assert facts.drop_earlier_cluster((*mine, other), GROUP) == mine
    assert facts.drop_earlier_cluster((other,), None) == (other,)


BLOB = f"AAAAC3NzaC1lZDI1NTE5AAAAI{'b' * 42}/"


@pytest.mark.parametrize(
    ("console", "key"),
    [
        (format_console(f"ecdsa-sha2-nistp256 AAAA root@a\r\nssh-ed25519 {BLOB} root@a"), f"ssh-ed25519 {BLOB}"),
        (format_console(f"ssh-ed25519 {BLOB} root@a").partition("-----END")[0], ""),
        (format_console("ecdsa-sha2-nistp256 AAAA root@a"), ""),
        (format_console(f"ssh-ed25519 {BLOB[:40]} root@a"), ""),
        (f"ssh-ed25519 {BLOB} admin", ""),
        ("", ""),
    ],
    ids=("whole", "half", "another type", "half a key", "another key", "nothing"),
)
@pytest.mark.parametrize("nitro", [True, False])
def test_the_host_key_of_an_instance_is_read_from_its_console(console: str, key: str, nitro: bool) -> None:
    class Cloud:
        find = AwsClient.find

        def query(self, method: str, InstanceId: str, Latest: bool = False) -> dict[str, str]:
            assert (method, InstanceId) == ("get_console_output", "i-1")
            if Latest and not nitro:
                raise CallError(method, "UnsupportedOperation", "This instance type does not support it")
            return {"Output": console} if console else {}

    assert facts.find_host_key(cast(AwsClient, Cloud()), "i-1") == key


@pytest.mark.parametrize(
    ("arn", "owner"),
    [
        ("arn:aws:iam::1:user/me", "arn:aws:iam::1:user/me"),
        ("arn:aws:sts::1:assumed-role/Lab/session-7", "arn:aws:sts::1:assumed-role/Lab"),
    ],
)
def test_a_role_is_the_same_owner_in_every_session(arn: str, owner: str) -> None:
    assert facts.normalize_owner(arn) == owner


@pytest.mark.parametrize(
    ("reason", "ended"), [("User initiated (2026-01-31 12:00:00 GMT)", 1769860800.0), ("", 0.0), ("why (then)", 0.0)]
)
def test_when_an_instance_ended(reason: str, ended: float) -> None:
    assert facts._parse_end(reason) == ended


@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        *(
            (kind, "aarch64")
            for kind in ("c8g.4xlarge", "m8gd.xlarge", "r8gn.large", "im4gn.large", "a1.large", "t4g.nano")
        ),
        *((kind, "x86_64") for kind in ("m7i.8xlarge", "c7a.large", "g4dn.xlarge", "c7i-flex.large", "hpc7a.96xlarge")),
    ],
)
def test_the_name_of_a_type_tells_its_architecture(kind: str, machine: str) -> None:
    assert facts.find_machine(kind) == machine


@pytest.mark.parametrize("architecture, machine", [("arm64", "arm64"), ("x86_64", "amd64")])
def test_the_ami_has_the_architecture_of_the_type(architecture: str, machine: str) -> None:
    """A recipe has an AMI for each; without one, instances start from Debian's."""
    made = [
        {"ImageId": f"ami-{name}-{day}", "CreationDate": f"2026-11-0{day}", "State": "available", "Architecture": name}
        for name in ("x86_64", "arm64")
        for day in (1, 2)
    ]

    class Client:
        region = "us-east-1"
        images = made

        def query(self, method: str, **asked: Any) -> dict[str, Any]:
            return {"Images": self.images}

        def find(self, method: str, missing: str, **asked: Any) -> dict[str, Any]:
            if method == "get_parameter":
                return {"Parameter": {"Value": asked["Name"]}}
            return {"Images": [{"ImageId": asked["ImageIds"][0]}]}

    found = {"ProcessorInfo": {"SupportedArchitectures": ["i386", architecture]}}
    client: Any = Client()
    assert facts._find_image(client, AwsConfig(), found) == {"ImageId": f"ami-{architecture}-2"}
    client.images = []
    debian = facts._find_image(client, AwsConfig(), found)
    assert debian == {"ImageId": f"/aws/service/debian/release/12/latest/{machine}"}
    assert facts._find_image(client, AwsConfig(image="ami-1"), found) == {"ImageId": "ami-1"}
