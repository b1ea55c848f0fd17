"""Clusters on AWS, in a region in this process: all or nothing, nothing twice, nothing left, whatever goes wrong."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name

from cpuft.errors import CpuftError
from cpuft.hosts.registry import FILE_NAME, format_entry, read_entry
from cpuft.provision.aws.ami import AmiBuilder, delete_image, list_images
from cpuft.provision.aws.client import POLICY, Tag, read_tags
from cpuft.provision.aws.facts import Resources, find_host_key, parse_instances
from cpuft.provision.aws.plan import NoCapacityError
from cpuft.provision.aws.provider import describe_region
from cpuft.provision.cluster_files import read_files
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
from tests.provision.aws.test_client import list_actions
from tests.provision.aws.test_plan import NOW, make_instance
from tests.provision.simulated import write_wheels

CALLS = [
    "create_security_group",
    "create_placement_group",
    "authorize_security_group_ingress",
    "revoke_security_group_egress",
    "authorize_security_group_egress",
    "run_instances",
]
"""Changing calls of renting a cluster, in order."""

pytestmark = pytest.mark.real


def test_a_dry_run_changes_nothing(region: Region, tmp_path: Path) -> None:
    plan = make_aws(region, tmp_path).show()
    assert region.mutating == []
    assert left(region) == NOTHING
    assert [*tmp_path.iterdir()] == []
    assert "4 x m7i.8xlarge on demand" in plan.notes[0]
    assert "$6.45 per hour, $25.80" in plan.notes[0]
    tried = {name: parameters for name, parameters in region.calls if parameters.get("DryRun")}
    calls = {"create_placement_group", "create_security_group", "get_console_output", "run_instances"}
    assert {*tried} == calls
    # The printed policy allows creating only what gets the cluster's tag at once.
    kinds = [kind for one in tried.values() for kind in one.get("TagSpecifications", ())]
    assert [kind for kind in kinds if Tag.CLUSTER not in str(kind)] == []


def test_instances_are_not_connected_to_before_their_consoles_show_host_keys(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path)
    with pytest.raises(CpuftError, match="no ed25519 host key is on the console of") as error:
        make_aws(region, tmp_path, uses_ssh=True).drift()
    assert "accept-host-keys" not in str(error.value)
    assert region.seconds == 0


def test_a_cluster_is_what_was_asked_for_and_making_it_again_does_nothing(region: Region, tmp_path: Path) -> None:
    said = make(region, tmp_path)
    assert "4 x m7i.8xlarge" in said
    assert "the instances terminate themselves at" in said
    assert region.mutating == CALLS
    found = live()
    assert len(found) == 4
    assert {one["Placement"]["AvailabilityZone"] for one in found} == {"us-east-1a"}
    tags = read_tags(found[0])
    assert (tags[Tag.CLUSTER], tags[Tag.OWNER]) == (NAME, "arn:aws:sts::123456789012:user/moto")
    assert 0 <= int(tags[Tag.UNTIL]) - int(tags[Tag.GENERATION]) - 4 * 3600 < 60

    seen = len(region.mutating)
    make(region, tmp_path)
    assert region.mutating[seen:] == []
    assert make_aws(region, tmp_path).drift() == []
    down(region, tmp_path)
    assert left(region) == NOTHING
    assert [*(tmp_path / "state").iterdir()] == []


def test_instances_are_closed_and_encrypted_and_shutting_down_terminates_them(region: Region, tmp_path: Path) -> None:
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


def test_no_private_key_is_shown(region: Region, tmp_path: Path) -> None:
    """User data contains the public key; no call and no plan contains the private one."""
    lab = make_aws(region, tmp_path)
    lab.make(say, refuse)
    key = (lab.directory / "id_ed25519").read_text()
    data = next(parameters["UserData"] for name, parameters in region.calls if "UserData" in parameters)
    assert (lab.directory / "id_ed25519.pub").read_text().strip() in data
    client().terminate_instances(InstanceIds=[live()[0]["InstanceId"]])
    for text in (str(region.calls), str(lab.show())):
        assert "PRIVATE KEY" not in text
        assert key.splitlines()[2] not in text
    assert (lab.directory / "id_ed25519").stat().st_mode & 0o777 == 0o600


def test_down_finds_everything_wherever_make_was_killed(region: Region, tmp_path: Path) -> None:
    """Dying before a call leaves the same as dying after the previous call."""
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


def test_makes_that_are_killed_after_one_call_each_make_the_cluster_together(region: Region, tmp_path: Path) -> None:
    for name in [CALLS[0], *CALLS[2:5], CALLS[1], CALLS[5]]:
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


def test_instances_that_aws_does_not_list_yet_are_not_started_again(region: Region, tmp_path: Path) -> None:
    region.kill = (CALLS.index("run_instances"), "after")
    with pytest.raises(KilledError):
        make(region, tmp_path)
    region.calls.clear()
    region.kill = (-1, "")
    # Twice before the request is repeated, and four times after its answer.
    region.hidden = 6
    make(region, tmp_path)
    assert region.mutating == ["run_instances"]
    assert len(live()) == 4


def test_downs_that_are_killed_after_one_call_each_leave_nothing(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path)
    for name in ["terminate_instances", "delete_placement_group", "delete_security_group"]:
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


def test_only_capacity_errors_lead_to_another_zone(region: Region, tmp_path: Path) -> None:
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


def test_terminated_instances_are_replaced_in_the_same_zone(region: Region, tmp_path: Path) -> None:
    region.lasting = {"us-east-1a": "InsufficientInstanceCapacity"}
    make(region, tmp_path)
    region.lasting = {}
    first = {one["InstanceId"] for one in live()}
    client().terminate_instances(InstanceIds=[*first][:1])
    assert make_aws(region, tmp_path).drift() == [
        "here: record that instances are requested again",
        "here: start 1 instance of m7i.8xlarge in us-east-1b, all or none",
    ]
    make(region, tmp_path)
    assert {one["Placement"]["AvailabilityZone"] for one in live()} == {"us-east-1b"}
    assert len(live()) == 4
    assert len(first & {one["InstanceId"] for one in live()}) == 3


@pytest.mark.parametrize("at_once", [True, False])
def test_instances_that_aws_ends_at_their_start_are_not_replaced(at_once: bool, region: Region, tmp_path: Path) -> None:
    region.ending, region.ends_at_once = "Client.InvalidKMSKey.InvalidState: The key is disabled", at_once
    # Otherwise it would go on forever if it started others in their place.
    region.kill = (len(CALLS), "before")
    with pytest.raises(CpuftError, match=r"AWS has ended instance i-\w+ of lab \(Client\.InvalidKMSKey\..*\): correct"):
        make(region, tmp_path, nodes=2, uses_ssh=True)
    assert region.mutating.count("run_instances") == 1
    region.ending, region.ends_at_once, region.kill = "", False, (-1, "")
    make(region, tmp_path, nodes=2)
    assert len(live()) == 2


@pytest.mark.parametrize("after", ["confirm", "run"])
def test_an_instance_that_aws_takes_during_make_is_not_replaced_without_a_question(
    after: str, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def agree(question: str) -> bool:
        asked.append(question)
        return True

    lab = make_aws(region, tmp_path, nodes=2, market="spot", yes=False)
    if after == "confirm":
        lab.make(say, agree)
    real = getattr(lab, after)

    def lose(*words: Any) -> None:
        real(*words)
        if found := live():
            # A repetition without a question is an error at once, not an endless loop.
            region.kill = (len(region.mutating), "before")
            client().terminate_instances(InstanceIds=[found[0]["InstanceId"]])

    with monkeypatch.context() as patch:
        patch.setattr(lab, after, lose)
        with pytest.raises(CpuftError, match=r"AWS has ended instance i-\w+ of lab .*: correct"):
            lab.make(say, agree)
    region.kill = (-1, "")
    assert (len(live()), len(asked)) == (1, 1)
    lab.make(say, agree)
    assert (len(live()), len(asked)) == (2, 2)


def test_down_terminates_all_instances_although_aws_has_forgotten_one(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(region, tmp_path, nodes=2)
    lab = make_aws(region, tmp_path)
    real, forgotten = lab._find_resources, make_instance(1, state="shutting-down")

    def find() -> Resources:
        found = real()
        return replace(found, instances=(forgotten, *found.instances)) if region.seconds < 60 else found

    monkeypatch.setattr(lab, "_find_resources", find)
    lab.down(say)
    assert left(region) == NOTHING
    assert 60 <= region.seconds < 65


@pytest.mark.parametrize(
    ("state", "wanted", "minutes", "advice"),
    [("pending", "running", 5, "remove them with"), ("shutting-down", "terminated", 10, "look at the EC2 console")],
)
def test_waiting_for_instances_has_a_time_limit(
    state: str,
    wanted: str,
    minutes: int,
    advice: str,
    region: Region,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = make_aws(region, tmp_path)
    found = Resources(NOW, instances=(make_instance(1, state=state), make_instance(2, state=wanted)))
    monkeypatch.setattr(lab, "_find_resources", lambda: found)
    lab._wait_for(wanted, {"i-2"}, 60.0 * minutes)
    assert region.seconds == 0
    said = f"after {minutes} minutes, not all instances of lab are {wanted}: {advice}"
    with pytest.raises(CpuftError, match=said):
        lab._wait_for(wanted, {"i-1", "i-2"}, 60.0 * minutes)
    assert 60 * minutes <= region.seconds < 60 * minutes + 5


RECIPE = Path(__file__).parents[3] / "ami" / "recipe.yaml"


def test_down_waits_for_instances_that_appear_late(region: Region, tmp_path: Path) -> None:
    region.kill = (5, "after")
    with pytest.raises(KilledError):
        make(region, tmp_path)
    region.kill = (-1, "")
    region.hidden = 5
    down(region, tmp_path)
    assert left(region) == NOTHING


def test_another_machine_finds_it_by_its_tags(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path / "here")
    elsewhere = make_aws(region, tmp_path / "elsewhere")
    assert elsewhere.describe().count(" running, i-") == 4
    with pytest.raises(CpuftError, match="the key of lab is not on this machine"):
        elsewhere.make(say, refuse)
    elsewhere.down(say)
    assert left(region) == NOTHING


@pytest.mark.parametrize(
    ("kind", "place", "other"), [("aws", "eu-west-1", "in eu-west-1"), ("hosts", "", "of kind hosts")]
)
def test_down_leaves_the_record_of_another_cluster_of_this_name(
    kind: str, place: str, other: str, region: Region, tmp_path: Path
) -> None:
    """The record and the keys of a cluster in another region, or of another kind, are the only way to its hosts."""
    make(region, tmp_path)
    lab = make_aws(region, tmp_path)
    entry = read_entry(lab.root, NAME)
    record = lab.directory / FILE_NAME
    record.write_text(format_entry(replace(entry, kind=kind, options=entry.options | {"region": place})))
    files = read_files(lab.directory, Path(lab.hostfile))
    with pytest.raises(CpuftError, match="the key of lab is not on this machine"):
        make_aws(region, tmp_path, uses_ssh=True).plan_extension("5h")
    before = len(region.calls)
    with pytest.raises(CpuftError, match=f"lab is a cluster {other} already: choose another --name, or "):
        lab.make(say, refuse)
    assert len(region.calls) == before
    assert lab.down(say).startswith(
        f"cluster lab was removed from us-east-1, and cluster lab {other} was left as it is"
    )
    assert left(region) == NOTHING
    assert read_files(lab.directory, Path(lab.hostfile)) == files


def test_all_clusters_of_a_region_are_described(region: Region, tmp_path: Path) -> None:
    assert describe_region(REGION, region.services()) == "there is no cluster in region us-east-1\n"
    make(region, tmp_path)
    make(region, tmp_path, name="other", nodes=1, market="spot")
    region.seconds += 1800
    said = describe_region(REGION, region.services()).splitlines()
    assert [line for line in said if line.startswith("cluster")] == [
        "cluster lab (aws), 4 nodes",
        "cluster other (aws), 1 node",
    ]
    # Half an hour of four instances, less the seconds in which they were started.
    assert 2.5 < float(said[1].partition("about $")[2].split()[0]) < 3.24
    assert "in 3 h " in said[1]


def test_reclaimed_spot_instances_are_replaced(region: Region, tmp_path: Path) -> None:
    make(region, tmp_path, market="spot")
    client().terminate_instances(InstanceIds=[one["InstanceId"] for one in live()][:2])
    make(region, tmp_path, market="spot")
    assert [one["InstanceLifecycle"] for one in live()] == ["spot"] * 4
    # The role is created once for the account.
    assert region.mutating.count("create_service_linked_role") == 1


@pytest.mark.parametrize(("market", "kinds"), [("spot", []), ("spot-first", [None] * 4)])
def test_on_demand_only_where_no_zone_has_spot_instances_and_it_was_asked_for(
    market: str, kinds: list[None], region: Region, tmp_path: Path
) -> None:
    region.spot_fault = "InsufficientInstanceCapacity"
    lab = make_aws(region, tmp_path, market=market)
    with contextlib.suppress(NoCapacityError):
        lab.make(say, refuse)
    assert [one.get("InstanceLifecycle") for one in live()] == kinds
    again = make_aws(region, tmp_path, market=market)
    region.calls.clear()
    with contextlib.suppress(NoCapacityError):
        again.make(say, refuse)
    assert region.mutating.count("run_instances") == 5 * (not kinds)
    again.down(say)
    assert left(region) == NOTHING


def test_down_says_what_a_cluster_has_cost(region: Region, tmp_path: Path) -> None:
    """By the times that AWS says, and without an earlier cluster of the same name."""
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
    (until,) = {int(read_tags(one)[Tag.UNTIL]) for one in live()}
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


def test_the_printed_policy_allows_nothing_that_is_not_needed(region: Region, tmp_path: Path) -> None:
    lab = make_aws(region, tmp_path, market="spot")
    lab.make(say, refuse)
    lab.extend("5h", say)
    assert find_host_key(lab.client, live()[0]["InstanceId"]) == ""
    (volume, *_) = left(region)["volumes"]
    assert volume
    tags = [{"ResourceType": "volume", "Tags": [{"Key": Tag.CLUSTER, "Value": NAME}]}]
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
    allowed = list_actions(*json.loads(POLICY.read_text())["Statement"])
    made = {xform_name(action.partition(":")[2]) for action in allowed}
    # The caller is queried once per client, and all tests share a client. An AMI is deleted with its snapshots.
    assert {name for name, _ in region.calls} | {"get_caller_identity", "delete_snapshot"} == made


def test_the_user_is_asked_once_and_nothing_is_rented_after_a_no(region: Region, tmp_path: Path) -> None:
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
