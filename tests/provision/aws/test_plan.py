"""Plans for a cluster on AWS: checks before renting, calls, zones, and the order of deletion."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.ssh_config import Member, format_inside, format_ssh_config
from cpuft.provision.aws.client import CallStep
from cpuft.provision.aws.cost import Price, describe_instances
from cpuft.provision.aws.facts import Instance, Offer, Resources, SecurityGroup
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.plan import (
    NoCapacityError,
    RentalFacts,
    check_offer,
    check_rental,
    choose_zone,
    make_request,
    parse_ssh_from,
    plan_rental,
    plan_rental_down,
)

NOW = 1_800_000_000
ME = "arn:aws:iam::1:user/me"
CONFIG = AwsConfig(name="lab", nodes=4, type="m7i.8xlarge", region="us-east-1")
GROUP = SecurityGroup(
    "sg-1", "lab", ME, NOW + 3600, NOW - 60, (), ({"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]},)
)
ZONES = {f"us-east-1{letter}": f"subnet-{letter}" for letter in "cab"}
OFFER = Offer(
    {
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "SupportedUsageClasses": ["on-demand", "spot"],
        "PlacementGroupInfo": {"SupportedStrategies": ["cluster"]},
    },
    ZONES,
    {"ImageId": "ami-1", "Name": "debian", "RootDeviceName": "/dev/xvda", "Architecture": "x86_64"},
)


def change_type(**changes: Any) -> dict[str, Any]:
    """Return the instance type of `OFFER` with changes."""
    return {**OFFER.type, **changes}


def make_instance(number: int, **changes: Any) -> Instance:
    one = Instance(
        f"i-{number}", "lab", "running", "m7i.8xlarge", "us-east-1a", f"10.0.0.{number}", f"54.0.0.{number}",
        False, NOW - 1800.0, 0.0, NOW + 3600, NOW - 60, number,
    )  # fmt: skip
    return replace(one, **changes)


def make_facts(found: Resources, **changes: Any) -> RentalFacts:
    files = {"/state/lab/id_ed25519.pub": "ssh-ed25519 AAAA cpuft\n"}
    own = RentalFacts(found, files, "/state/lab", "/here/hostfiles/lab", "us-east-1", "203.0.113.7/32", OFFER)
    return replace(own, **changes)


@pytest.mark.parametrize(
    ("text", "range_"), [("203.0.113.7", "203.0.113.7/32"), ("203.0.113.7\n", "203.0.113.7/32"), ("10.1.0.0/16",) * 2]
)
def test_addresses_that_may_reach_ssh(text: str, range_: str) -> None:
    assert parse_ssh_from(text) == range_


@pytest.mark.parametrize("text", ["0.0.0.0/0", "10.0.0.0/8", "::/0", "here", "", "1.2.3", "1.2.3.4/24"])
def test_wrong_addresses_for_ssh_are_refused(text: str) -> None:
    with pytest.raises(CpuftError, match=r"--ssh-from .*: give you"):
        parse_ssh_from(text)


def test_a_call_after_a_lost_answer_is_the_same_one() -> None:
    """The ClientToken depends on the group, the generation and the zone, and not on the time."""

    def find_call(now: float, refused: dict[tuple[str, str], str], **changes: Any) -> dict[str, Any]:
        group = replace(GROUP, **changes)
        plan = plan_rental(CONFIG, make_facts(Resources(now, ME, group), refused=refused))
        call = plan.stages[-1][0]
        assert isinstance(call, CallStep)
        return dict(call.parameters)

    first = find_call(NOW, {})
    assert first == find_call(NOW + 600, {})
    other = {("us-east-1a", "on-demand"): "InsufficientInstanceCapacity"}
    tokens = {
        first["ClientToken"],
        find_call(NOW, other)["ClientToken"],
        find_call(NOW, {}, generation=NOW - 59)["ClientToken"],
        find_call(NOW, {}, id="sg-2")["ClientToken"],
        # That response is not awaited any more: its instances may have ended, so they are requested again.
        find_call(NOW + 3000, {})["ClientToken"],
    }
    assert len(tokens) == 5


def test_resources_are_deleted_in_the_right_order() -> None:
    whole = Resources(NOW, ME, GROUP, (make_instance(1), make_instance(2, state="terminated")), "cpuft-lab")

    def name_calls(found: Resources) -> list[str]:
        steps = [step for stage in plan_rental_down("lab", make_facts(found)).stages for step in stage]
        return [step.method for step in steps if isinstance(step, CallStep)]

    assert name_calls(whole) == ["terminate_instances"]
    # Only the plan that names them waits until they are terminated.
    assert name_calls(replace(whole, instances=(make_instance(1, state="shutting-down"),))) == ["terminate_instances"]
    ended = replace(whole, instances=whole.instances[1:], volumes=("vol-1",))
    assert name_calls(ended) == [
        "delete_placement_group",
        "delete_volume",
        "delete_security_group",
    ]
    assert name_calls(Resources(NOW, ME)) == []


@pytest.mark.parametrize(
    ("found", "config", "said"),
    [
        (
            Resources(NOW, "me", replace(GROUP, owner="you")),
            {},
            "cluster lab belongs to you, and you are me: use another",
        ),
        (
            Resources(NOW + 9999, ME, GROUP),
            {},
            "the lease of lab ended at .* UTC: remove it with .*down lab",
        ),
        (
            Resources(NOW, ME, GROUP, (make_instance(1), make_instance(2))),
            {"nodes": 1},
            "lab has 2 nodes, and --nodes 1 asks",
        ),
        (
            Resources(NOW, ME, GROUP, (make_instance(1, type="c7i.large"),)),
            {},
            "of type c7i.large: .* --type c7i.large",
        ),
        (Resources(NOW, ME, GROUP, (make_instance(1),)), {"zone": "us-east-1b"}, "lab is in zone us-east-1a"),
    ],
)
def test_a_cluster_that_cannot_become_what_is_asked_for_is_refused(
    found: Resources, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(CpuftError, match=said):
        plan_rental(replace(CONFIG, **config), make_facts(found))


@pytest.mark.parametrize(
    ("offer", "config", "said"),
    [
        (
            {"type": change_type(SupportedUsageClasses=["on-demand"])},
            {"market": "spot"},
            "AWS does not offer m7i.8xlarge as spot instance",
        ),
        (
            {"type": change_type(ProcessorInfo={"SupportedArchitectures": ["arm64_mac"]})},
            {},
            "m7i.8xlarge is arm64_mac, and cpuft needs x86_64 or arm64: choose another --type",
        ),
        (
            {"type": change_type(ProcessorInfo={"SupportedArchitectures": ["arm64"]})},
            {},
            "AMI ami-1 is for x86_64: choose an AMI for arm64 with --image",
        ),
        (
            {"image": {**OFFER.image, "Architecture": "arm64"}},
            {},
            "AMI ami-1 is for arm64: choose an AMI for x86_64 with --image",
        ),
        (
            {},
            {"zone": "us-east-1x"},
            "region us-east-1 has no zone 'us-east-1x' that offers m7i.8xlarge: did you mean us-east-1",
        ),
        ({"zones": {}}, {}, "no zone of us-east-1 with a default subnet offers m7i.8xlarge: try another"),
        (
            {"zones": {"us-east-1b": "subnet-b", "us-east-1c": "subnet-c"}},
            {"zone": "us-east-1a"},
            "region us-east-1 has no zone 'us-east-1a' that offers m7i.8xlarge: did you mean us-east-1c or us-east-1b",
        ),
    ],
)
def test_what_cannot_be_rented(offer: dict[str, Any], config: dict[str, Any], said: str) -> None:
    with pytest.raises(CpuftError, match=said):
        check_offer(replace(CONFIG, **config), replace(OFFER, **offer), "us-east-1")


ARM = {
    "type": change_type(
        ProcessorInfo={"SupportedArchitectures": ["arm64"]},
    ),
    "image": {**OFFER.image, "Architecture": "arm64"},
}


@pytest.mark.parametrize("offer", [{}, ARM])
def test_what_can_be_rented(offer: dict[str, Any]) -> None:
    check_offer(CONFIG, replace(OFFER, **offer), "us-east-1")


def test_the_cheapest_zone_is_first_for_spot() -> None:
    offer, nothing = replace(OFFER, spot_prices={"us-east-1a": 0.7, "us-east-1b": 0.6}), Resources(NOW, ME)
    assert choose_zone(CONFIG, nothing, offer, {}) == ("us-east-1a", "on-demand")
    assert choose_zone(replace(CONFIG, market="spot"), nothing, offer, {}) == ("us-east-1b", "spot")
    there = Resources(NOW, ME, GROUP, (make_instance(1, zone="us-east-1c"),))
    assert choose_zone(CONFIG, there, offer, {}) == ("us-east-1c", "on-demand")
    with pytest.raises(NoCapacityError, match=r"no zone has 3 instances of m7i.8xlarge \(us-east-1c: full\)"):
        choose_zone(CONFIG, there, offer, {("us-east-1c", "on-demand"): "full"})


@pytest.mark.parametrize(
    ("market", "chosen"), [("spot-first", ("us-east-1a", "on-demand")), ("spot", None)], ids=("on demand", "spot only")
)
def test_on_demand_instances_come_after_the_last_zone_for_spot(market: str, chosen: Any) -> None:
    config = replace(CONFIG, market=market)
    refused = {("us-east-1a", "spot"): "full", ("us-east-1b", "spot"): "full"}
    assert choose_zone(config, Resources(NOW, ME), OFFER, refused) == ("us-east-1c", "spot")
    refused["us-east-1c", "spot"] = "full"
    with contextlib.nullcontext() if chosen else pytest.raises(NoCapacityError):
        assert choose_zone(config, Resources(NOW, ME), OFFER, refused) == chosen


@pytest.mark.parametrize(
    ("spots", "refused", "watched"),
    [
        ((), (), True),
        ((), ("a", "b", "c"), False),
        ((False,) * 4, (), False),
        ((False,) * 3, ("a",), False),
        ((False, True), ("a",), True),
        ((True,) * 4, (), True),
    ],
    ids=("spot", "on demand", "complete", "refilled on demand", "one is spot", "all are spot"),
)
def test_only_clusters_with_spot_instances_look_for_interruption_notices(
    spots: tuple[bool, ...], refused: tuple[str, ...], watched: bool
) -> None:
    config = replace(CONFIG, market="spot-first")
    found = Resources(NOW, ME, GROUP, tuple(make_instance(number, spot=one) for number, one in enumerate(spots)))
    plan = plan_rental(config, make_facts(found, refused={(f"us-east-1{one}", "spot"): "full" for one in refused}))
    (record,) = (step for stage in plan.stages for step in stage if step.why == "register the cluster")
    assert ("169.254.169.254" in record.stdin) is watched


def find_request(config: AwsConfig, offer: Offer) -> dict[str, Any]:
    return make_request(config, Resources(NOW, ME, GROUP), offer, "us-east-1a", config.nodes)


@pytest.mark.parametrize(
    ("efa", "nodes", "kind"), [(True, 4, "efa"), (False, 4, None), (True, 1, None)], ids=("efa", "none", "alone")
)
def test_hosts_get_an_adapter_for_fast_fabrics_where_the_type_has_one(efa: bool, nodes: int, kind: str | None) -> None:
    offer = replace(OFFER, type=change_type(NetworkInfo={"EfaSupported": efa}))
    request = find_request(replace(CONFIG, nodes=nodes), offer)
    assert request["NetworkInterfaces"][0].get("InterfaceType") == kind


def test_a_cluster_whose_lease_a_job_has_extended() -> None:
    """By its tags the lease has ended; on the hosts it continues, up to its limit."""
    group = replace(GROUP, until=NOW - 60, limit=NOW + 3600)
    nodes = tuple(make_instance(number, until=NOW - 60) for number in range(4))
    check_rental(CONFIG, Resources(NOW, ME, group, nodes))
    for found, said in (
        (Resources(NOW, ME, group, nodes[:3]), "only a running job keeps it: first run `cpuft provision extend lab`"),
        (Resources(NOW, ME, group), "remove it with `cpuft provision down lab`, then rent it again"),
        (Resources(NOW + 4000, ME, group, nodes), "remove it with `cpuft provision down lab`, then rent it again"),
    ):
        with pytest.raises(CpuftError, match=said):
            check_rental(CONFIG, found)
    told = describe_instances(Resources(NOW - 120, ME, group, nodes), Price(None, ""))[0]
    assert "running jobs can extend it to 2027-01-15 09:00 UTC" in told


def test_hosts_know_private_addresses_and_this_machine_public_ones() -> None:
    members = [Member("10.0.0.1", "10.0.0.1", "root", key="ssh-ed25519 AAAA", reached="54.0.0.1")]
    here = format_ssh_config(members, "/k", "/known")
    assert "Host 10.0.0.1\n  HostName 54.0.0.1\n" in here
    assert "HostKeyAlias 10.0.0.1\n" in here
    inside = format_inside(members, "/opt/cpuft/clusters/lab", "/opt/cpuft/env/bin/python")
    assert "54.0.0.1" not in "".join(inside.values())
    assert inside["known_hosts"] == "10.0.0.1 ssh-ed25519 AAAA\n"
