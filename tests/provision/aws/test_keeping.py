"""What is rented, kept and taken down: found by its tags from anywhere, leased, closed to the world."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.provision.aws.ami import AmiBuilder, delete_image, list_images
from cpuft.provision.aws.client import ACTIONS, READ, TAG, UNTIL, read_tags
from cpuft.provision.aws.facts import parse_instances
from cpuft.provision.aws.plan import NoCapacityError
from cpuft.provision.aws.provider import Aws
from cpuft.provision.options import ImageConfig
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
from tests.provision.simulated import write_wheels

pytestmark = pytest.mark.real
RECIPE = Path(__file__).parents[3] / "ami" / "recipe.yaml"


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
    assert Aws.describe_region(REGION, region.services()) == []
    make(region, tmp_path)
    make(region, tmp_path, name="other", nodes=1, spot=True)
    region.seconds += 1800
    said = Aws.describe_region(REGION, region.services())
    assert [line for line in said if line.startswith("cluster")] == [
        "cluster lab (aws), 4 nodes",
        "cluster other (aws), 1 node",
    ]
    # Half an hour of four, but for the seconds in which they were started.
    assert 2.5 < float(said[1].partition("about $")[2].split()[0]) < 3.24
    assert "in 3 h " in said[1]


def test_spot_instances_that_were_taken_back_are_rented_again(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path, spot=True)
    client().terminate_instances(InstanceIds=[one["InstanceId"] for one in live()][:2])
    make(region, tmp_path, spot=True)
    assert [one["InstanceLifecycle"] for one in live()] == ["spot"] * 4
    # The role of the account is made once.
    assert region.mutating.count("create_service_linked_role") == 1


@pytest.mark.parametrize(("options", "kinds"), [({"spot": True}, []), ({"spot_or_demand": True}, [None] * 4)])
def test_on_demand_only_where_no_zone_has_spot_instances_and_it_was_asked_for(
    options: dict[str, bool], kinds: list[None], region: Region, tmp_path: Path
) -> None:
    region.spot_fault = "InsufficientInstanceCapacity"
    lab = make_aws(region, tmp_path, **options)
    with contextlib.suppress(NoCapacityError):
        lab.make(say, refuse)
    assert [one.get("InstanceLifecycle") for one in live()] == kinds
    again = make_aws(region, tmp_path, **options)
    region.calls.clear()
    with contextlib.suppress(NoCapacityError):
        again.make(say, refuse)
    assert region.mutating.count("run_instances") == 5 * (not kinds)
    again.down(say)
    assert left(region) == NOTHING


def test_what_a_cluster_has_cost_is_told_when_it_is_gone(region: Region, tmp_path: Path) -> None:
    """By AWS's own times; an earlier cluster of the same name is none of it."""
    make(region, tmp_path)
    first = {one["InstanceId"] for one in live()}
    down(region, tmp_path)
    lab = make_aws(region, tmp_path, nodes=2)
    lab.make(say, refuse)
    told = float(lab.down(say).partition("it has cost about $")[2].split()[0])
    found = [one for place in client().describe_instances()["Reservations"] for one in place["Instances"]]
    mine = parse_instances({"Reservations": [{"Instances": [one for one in found if one["InstanceId"] not in first]}]})
    assert len(mine) == 2
    assert told == pytest.approx(sum(one.ended - one.launched for one in mine) / 3600 * 1.6128, rel=0.01, abs=1e-6)


def test_a_lease_is_extended_for_all(region: Region, tmp_path: Path) -> None:
    lab = make_aws(region, tmp_path, lease="1h")
    lab.make(say, refuse)
    region.seconds += 1800
    assert lab.extend("3h", say).startswith("cluster lab: the instances terminate themselves at")
    (until,) = {int(read_tags(one)[UNTIL]) for one in live()}
    assert 3 * 3600 - 2 < until - region.now() <= 3 * 3600
    assert "in 2 h 5" in lab.describe()
    region.seconds += 4 * 3600
    with pytest.raises(CpuftError, match=r"the lease of lab ended at .*: remove it with .*, then rent it again"):
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
    write_wheels(tmp_path / "wheels")
    config = ImageConfig(recipe=str(RECIPE), wheels=str(tmp_path / "wheels"), region=REGION, yes=True)
    AmiBuilder(config, {"CPUFT_STATE": str(tmp_path / "state")}, region.services()).make(say, refuse)
    delete_image(list_images(REGION, region.services()).split()[0], REGION, False, say, region.services())
    assert left(region) == NOTHING
    # Who calls is asked once, and the clients of all tests are the same.
    assert {name for name, _ in region.calls} | {"get_caller_identity"} == set(ACTIONS)
    assert {*region.mutating} == {name for name, action in ACTIONS.items() if action.kind != READ}


def test_nobody_is_asked_twice_and_a_no_costs_nothing(region: Region, tmp_path: Path) -> None:
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    lab = make_aws(region, tmp_path)
    lab.config = replace(lab.config, yes=False)
    with pytest.raises(
        CpuftError,
        match=r"nothing was rented: answer yes .* add --yes. The price: 4 x m7i.8xlarge on demand",
    ):
        lab.make(say, no)
    assert len(asked) == 1
    assert left(region) == NOTHING
    assert region.mutating == []
