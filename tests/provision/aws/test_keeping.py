"""What is rented, kept and taken down: found by its tags from anywhere, leased, closed to the world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.provision.aws.calls import ACTIONS, LOOK, TAG, UNTIL, read_tags
from cpuft.provision.aws.doing import describe_region
from tests.provision.aws.region import (
    NAME,
    NOTHING,
    REGION,
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

pytestmark = pytest.mark.real


def test_down_waits_for_what_appears_late(region: Region, tmp_path: Path) -> None:
    region.kill = (6, "after")
    with pytest.raises(KilledError):
        make(region, tmp_path)
    region.kill = (-1, "")
    region.hidden = 5
    down(region, tmp_path)
    assert left(region) == NOTHING


def test_another_machine_finds_it_by_its_tags(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path / "here")
    elsewhere = make_aws(region, tmp_path / "elsewhere")
    assert elsewhere.describe().count("running") == 4
    with pytest.raises(CpuftError, match="the keys of lab are not on this machine"):
        elsewhere.make(say, refuse)
    elsewhere.down(say)
    assert left(region) == NOTHING


def test_all_clusters_of_a_region_are_told_of(region: Region, tmp_path: Path) -> None:
    assert describe_region(REGION, region.edge()) == "nothing in us-east-1 carries the tag of a cluster\n"
    make(region, tmp_path)
    make(region, tmp_path, name="other", nodes=1, spot=True)
    region.seconds += 1800
    said = describe_region(REGION, region.edge()).splitlines()
    assert [line for line in said if line.startswith("cluster")] == [
        "cluster lab (aws), 4 nodes",
        "cluster other (aws), 1 node",
    ]
    # Half an hour of four, but for the seconds in which they were started.
    assert 2.5 < float(said[1].partition("about ")[2].split()[0]) < 3.24
    assert "in 3 h " in said[1]


def test_a_lease_is_extended_for_all(region: Region, tmp_path: Path) -> None:
    lab = make_aws(region, tmp_path, lease="1h")
    lab.make(say, refuse)
    region.seconds += 1800
    assert lab.extend("3h", say).startswith("cluster lab ends itself at")
    (until,) = {int(read_tags(one)[UNTIL]) for one in live()}
    assert 3 * 3600 - 2 < until - region.now() <= 3 * 3600
    assert "in 2 h 5" in lab.describe()
    region.seconds += 4 * 3600
    with pytest.raises(CpuftError, match=r"the lease of lab ended at .*: cpuft provision down lab, and rent it anew"):
        make(region, tmp_path)


def test_rules_that_somebody_added_are_closed_again(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path)
    (group,) = [one for one in client().describe_security_groups()["SecurityGroups"] if one["GroupName"] == "cpuft-lab"]
    world = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    client().authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[world])
    assert make_aws(region, tmp_path).drift() == ["here: close ingress: tcp 22 for 0.0.0.0/0"]
    make(region, tmp_path)
    assert make_aws(region, tmp_path).drift() == []


def test_every_call_of_the_table_is_made(region: Region, tmp_path: Path) -> None:
    """So that the printed policy allows nothing that is not needed."""
    lab = make_aws(region, tmp_path, spot=True)
    lab.make(say, refuse)
    lab.extend("5h", say)
    (volume, *_) = left(region)["volumes"]
    assert volume
    tags = [{"ResourceType": "volume", "Tags": [{"Key": TAG, "Value": NAME}]}]
    client().create_volume(AvailabilityZone="us-east-1a", Size=8, TagSpecifications=tags)
    (group,) = [one for one in client().describe_security_groups()["SecurityGroups"] if one["GroupName"] == "cpuft-lab"]
    world = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    client().authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[world])
    lab.make(say, refuse)
    lab.down(say)
    assert left(region) == NOTHING
    # Who calls is asked once, and the clients of all tests are the same.
    assert {name for name, _ in region.calls} | {"get_caller_identity"} == set(ACTIONS)
    assert {*region.mutating} == {name for name, action in ACTIONS.items() if action.kind != LOOK}


def test_nobody_is_asked_twice_and_a_no_costs_nothing(region: Region, tmp_path: Path) -> None:
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    lab = make_aws(region, tmp_path)
    lab.config = replace(lab.config, yes=False)
    with pytest.raises(CpuftError, match=r"nothing was rented \(4 x m7i.8xlarge on demand.*say --yes"):
        lab.make(say, no)
    assert len(asked) == 1
    assert left(region) == NOTHING
    assert region.mutating == []
