"""Renting, against a region in this process: all or nothing, nothing twice, nothing left; whatever goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.provision.aws.client import GENERATION, OWNER, TAG, UNTIL, read_tags
from cpuft.provision.aws.plan import NoCapacityError
from tests.provision.aws.region import (
    NAME,
    NOTHING,
    KilledError,
    Region,
    client,
    down,
    left,
    live,
    make,
    make_aws,
    refuse,
    say,
)

CALLS = [
    "create_security_group",
    "create_placement_group",
    "import_key_pair",
    "authorize_security_group_ingress",
    "revoke_security_group_egress",
    "authorize_security_group_egress",
    "run_instances",
]
"""What renting changes, in order."""

pytestmark = pytest.mark.real


def test_a_dry_run_changes_nothing(region: Region, tmp_path: Path) -> None:
    plan = make_aws(region, tmp_path).show()
    assert region.mutating == []
    assert left(region) == NOTHING
    assert [*tmp_path.iterdir()] == []
    assert "4 x m7i.8xlarge on demand" in plan.notes[0]
    assert "$6.45 per hour, $25.80" in plan.notes[0]
    tried = {name: parameters for name, parameters in region.calls if parameters.get("DryRun")}
    assert {*tried} == {"create_placement_group", "create_security_group", "run_instances"}
    # The printed policy allows only what carries the cluster's tag from the start.
    assert [name for name, one in tried.items() for kind in one["TagSpecifications"] if TAG not in str(kind)] == []


def test_a_cluster_is_what_was_asked_for_and_making_it_again_does_nothing(region: Region, tmp_path: Path) -> None:
    said = make(region, tmp_path)
    assert "4 x m7i.8xlarge" in said
    assert "the instances terminate themselves at" in said
    assert region.mutating == CALLS
    found = live()
    assert len(found) == 4
    assert {one["Placement"]["AvailabilityZone"] for one in found} == {"us-east-1a"}
    tags = read_tags(found[0])
    assert (tags[TAG], tags[OWNER]) == (NAME, "arn:aws:sts::123456789012:user/moto")
    assert 0 <= int(tags[UNTIL]) - int(tags[GENERATION]) - 4 * 3600 < 60

    seen = len(region.mutating)
    make(region, tmp_path)
    assert region.mutating[seen:] == []
    assert make_aws(region, tmp_path).drift() == []
    down(region, tmp_path)
    assert left(region) == NOTHING
    assert [*(tmp_path / "state").iterdir()] == []


def test_instances_are_closed_encrypted_and_end_themselves(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path)
    (request,) = [
        parameters for name, parameters in region.calls if name == "run_instances" and "UserData" in parameters
    ]
    assert (request["MinCount"], request["MaxCount"]) == (4, 4)
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert request["MetadataOptions"]["HttpTokens"] == "required"
    assert [one["Ebs"]["Encrypted"] for one in request["BlockDeviceMappings"]] == [True]
    assert "IamInstanceProfile" not in request
    (group,) = [one for one in client().describe_security_groups()["SecurityGroups"] if one["GroupName"] == "cpuft-lab"]
    inside = {"IpProtocol": "-1", "pairs": [group["GroupId"]], "ranges": []}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "pairs": [], "ranges": ["203.0.113.7/32"]}

    def read(way: str) -> list[dict[str, object]]:
        return [
            {key: rule[key] for key in ("IpProtocol", "FromPort", "ToPort") if rule.get(key, -1) != -1}
            | {
                "pairs": [one["GroupId"] for one in rule["UserIdGroupPairs"]],
                "ranges": [one["CidrIp"] for one in rule["IpRanges"]],
            }
            for rule in group[way]
        ]

    assert sorted(read("IpPermissions"), key=str) == sorted([inside, ssh], key=str)
    assert read("IpPermissionsEgress") == [inside]


def test_no_secret_is_told(region: Region, tmp_path: Path) -> None:
    """In user data is the host key alone; in plans and on command lines none."""
    lab = make_aws(region, tmp_path)
    lab.make(say, refuse)
    keys = {name: (lab.directory / name).read_text() for name in ("id_ed25519", "host_key")}
    data = next(parameters["UserData"] for name, parameters in region.calls if "UserData" in parameters)
    assert keys["host_key"].splitlines()[2] in data
    assert keys["id_ed25519"].splitlines()[2] not in data
    client().terminate_instances(InstanceIds=[live()[0]["InstanceId"]])
    assert "PRIVATE KEY" not in str(lab.show())
    assert {(lab.directory / name).stat().st_mode & 0o777 for name in (*keys, "user-data")} == {0o600}


def test_a_launcher_killed_anywhere_leaves_nothing_that_down_does_not_find(region: Region, tmp_path: Path) -> None:
    """Before a call is as after the call before it: it is the same that is there."""
    for number, when in [(0, "before"), *((number, "after") for number in range(len(CALLS)))]:
        folder = tmp_path / f"{number}-{when}"
        region.calls.clear()
        region.kill = (number, when)
        with pytest.raises(KilledError):
            make(region, folder, nodes=2)
        assert region.mutating == CALLS[: number + 1]
        region.kill = (-1, "")
        down(region, folder)
        assert left(region) == NOTHING


def test_launchers_that_are_killed_after_one_call_each_make_exactly_what_was_asked_for(
    region: Region, tmp_path: Path
) -> None:
    for name in [CALLS[0], *CALLS[3:6], *CALLS[1:3], CALLS[6]]:
        region.calls.clear()
        region.kill = (0, "after")
        with pytest.raises(KilledError):
            make(region, tmp_path)
        assert region.mutating == [name]
    region.calls.clear()
    region.kill = (-1, "")
    make(region, tmp_path)
    assert region.mutating == []
    assert len(live()) == 4


def test_what_has_just_been_started_and_is_not_told_of_yet_is_not_started_again(region: Region, tmp_path: Path) -> None:
    region.kill = (CALLS.index("run_instances"), "after")
    with pytest.raises(KilledError):
        make(region, tmp_path)
    region.calls.clear()
    region.kill = (-1, "")
    region.hidden = 3
    make(region, tmp_path)
    assert region.mutating == ["run_instances"]
    assert len(live()) == 4


def test_downs_that_are_killed_after_one_call_each_leave_nothing(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path)
    for name in ["terminate_instances", "delete_placement_group", "delete_key_pair", "delete_security_group"]:
        region.calls.clear()
        region.kill = (0, "after")
        with pytest.raises(KilledError):
            down(region, tmp_path)
        assert region.mutating == [name]
    region.kill = (-1, "")
    down(region, tmp_path)
    assert left(region) == NOTHING
    assert [*(tmp_path / "state").iterdir()] == []


def test_an_answer_that_was_lost_starts_nothing_twice(region: Region, tmp_path: Path) -> None:
    region.faults = ["ServiceUnavailable", "lost"]
    make(region, tmp_path)
    assert region.mutating.count("run_instances") == 3
    assert len(live()) == 4


def test_the_third_zone_gets_all_when_two_refuse(region: Region, tmp_path: Path) -> None:
    region.lasting = {"us-east-1a": "InsufficientInstanceCapacity", "us-east-1b": "Unsupported"}
    make(region, tmp_path)
    assert [one["Placement"]["AvailabilityZone"] for one in live()] == ["us-east-1c"] * 4


def test_only_words_for_capacity_lead_to_another_zone(region: Region, tmp_path: Path) -> None:
    region.lasting = {"us-east-1a": "VcpuLimitExceeded"}
    with pytest.raises(CpuftError, match="VcpuLimitExceeded"):
        make(region, tmp_path)
    assert live() == []


def test_when_all_zones_refuse_each_is_named_and_nothing_is_left(region: Region, tmp_path: Path) -> None:
    zones = [f"us-east-1{letter}" for letter in "abcdf"]
    region.lasting = dict.fromkeys(zones, "InsufficientInstanceCapacity")
    with pytest.raises(NoCapacityError) as error:
        make(region, tmp_path)
    assert [zone for zone in zones if zone not in str(error.value)] == []
    assert left(region) == NOTHING
    assert [*(tmp_path / "state").iterdir()] == []
    assert region.seconds < 30


def test_what_ended_is_rented_again_in_the_same_zone(region: Region, tmp_path: Path) -> None:
    region.lasting = {"us-east-1a": "InsufficientInstanceCapacity"}
    make(region, tmp_path)
    region.lasting = {}
    first = {one["InstanceId"] for one in live()}
    client().terminate_instances(InstanceIds=[*first][:1])
    assert make_aws(region, tmp_path).drift() == [
        "here: record that instances are requested again",
        "here: write the user data of the instances",
        "here: start 1 instance of m7i.8xlarge in us-east-1b, all or none",
    ]
    make(region, tmp_path)
    assert {one["Placement"]["AvailabilityZone"] for one in live()} == {"us-east-1b"}
    assert len(live()) == 4
    assert len(first & {one["InstanceId"] for one in live()}) == 3
