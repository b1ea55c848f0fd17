"""What instances cost before, during and after a rental. An unknown price is said to be unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpuft.provision.aws.cost import Price, describe_cost, describe_instances, describe_price, find_price
from cpuft.provision.aws.facts import Resources
from tests.provision.aws.test_plan import CONFIG, NOW, make_instance


def test_an_unknown_price_is_said_to_be_unknown() -> None:
    zones = {"us-east-1a": 0.7, "us-east-1b": 0.6}
    known = find_price("m7i.8xlarge", "us-east-1", {})
    spot = find_price("m7i.8xlarge", "us-east-1", zones)
    arm = {kind: find_price(f"{kind}.4xlarge", "us-east-1", {}) for kind in ("c8g", "m8g", "r8g")}
    assert arm == {"c8g": Price(0.63808, "2025"), "m8g": Price(0.71808, "2025"), "r8g": Price(0.94256, "2025")}
    assert known == Price(1.6128, "2025")
    assert spot == Price(1.6128, "2025", {"us-east-1a": 0.7, "us-east-1b": 0.6})
    unknown = find_price("m7i.8xlarge", "eu-north-1", {})
    assert unknown == find_price("x9.large", "us-east-1", {}) == Price(None, "")

    def describe(price: Price, spot: bool) -> str:
        config = replace(CONFIG, market="spot" if spot else "on-demand", region="us-east-1")
        return describe_price(price, config, 4, NOW, NOW + 7200, NOW + 7200).partition(" until the lease")[0]

    assert describe(known, False) == (
        "4 x m7i.8xlarge on demand: each instance costs about $1.613 per hour (list price of us-east-1 in 2025). All "
        "together cost $6.45 per hour, $12.90"
    )
    assert describe(spot, True) == (
        "4 x m7i.8xlarge spot: each instance costs $0.600 to $0.700 per hour now in us-east-1, on demand about "
        "$1.613 per hour (list price of us-east-1 in 2025). All together cost $2.80 per hour, $5.60"
    )
    assert describe(unknown, True) == (
        "4 x m7i.8xlarge spot: each instance costs an unknown price, on demand an unknown price (cpuft has only the "
        "list prices of us-east-1). All together cost an unknown price"
    )


def test_the_cost_is_seconds_times_price() -> None:
    """One runs for an hour, one ended after a quarter, and one ended at an unknown time: its lease's end counts."""
    instances = [
        make_instance(1, launched=NOW - 3600.0),
        make_instance(2, launched=NOW - 3600.0, state="terminated", ended=NOW - 2700.0),
        make_instance(3, launched=NOW - 3600.0, state="terminated", until=NOW - 1800),
    ]
    said = "about $3.50 for 1.75 instance hours (list price of us-east-1 in 2025)"
    assert describe_cost(Price(2.0, "2025"), instances, NOW) == said
    assert describe_cost(Price(None, ""), instances, NOW) == "an unknown price for 1.75 instance hours"
    spot = [replace(instances[0], spot=True)]
    assert describe_cost(Price(2.0, "2025"), spot, NOW) == "an unknown price for 1.00 instance hours"
    assert describe_cost(Price(2.0, "2025"), [], NOW) == "about $0 for 0 instance hours"


def test_a_cluster_that_was_removed_is_not_said_to_have_a_lease() -> None:
    gone = make_instance(1, launched=NOW - 3600.0, state="terminated", ended=NOW - 1800.0, until=NOW + 3600)
    removed, others = (Resources(NOW, instances=one) for one in ((gone,), (gone, replace(gone, state="shutting-down"))))
    assert describe_instances(removed, Price(2.0, "2025"))[0] == (
        "it was removed, and has cost about $1.00 for 0.5 instance hours (list price of us-east-1 in 2025); AWS lists "
        "its instances for about an hour"
    )
    assert describe_instances(others, Price(2.0, "2025"))[0].startswith("the lease ends at 2027-01-15 ")


def test_a_price_says_the_cost_at_the_limit_and_on_demand() -> None:
    config, price = (
        replace(CONFIG, market="spot-first"),
        Price(1.6128, "2025", {"us-east-1a": 0.6, "us-east-1b": 0.7}),
    )
    assert describe_price(price, config, 4, NOW, NOW + 7200, NOW + 14400).partition(" All together cost ")[2] == (
        "$2.80 per hour, $5.60 until the lease ends at 2027-01-15 10:00 UTC (in 2 h 00 min). Running jobs can extend "
        "the lease to 2027-01-15 12:00 UTC, for $11.20. On demand, if no zone has spot instances: $12.90. Disks and "
        "network traffic cost extra"
    )


@pytest.mark.parametrize("seconds", [61, 1234, 86399])
@pytest.mark.parametrize("spot", [False, True])
def test_a_bill_is_instance_seconds_times_price(seconds: int, spot: bool) -> None:
    """Each spot instance counts at the price of its zone. Small sums are right to within 1 %, too."""
    zones = {"us-east-1a": 0.61, "us-east-1b": 0.67}
    price = Price(1.6128, "2025", zones)
    start, ended = NOW - 90000.0, NOW - 90000.0 + seconds
    instances = [
        make_instance(number, launched=start, state="terminated", ended=ended, zone=zone, spot=spot)
        for number, zone in enumerate(["us-east-1a", "us-east-1b", "us-east-1b"])
    ]
    hourly = 0.61 + 2 * 0.67 if spot else 3 * 1.6128
    said = describe_cost(price, instances, NOW).split()
    assert said[0] == "about"
    assert float(said[1].lstrip("$")) == pytest.approx(hourly * seconds / 3600, rel=0.01)
    assert float(said[3]) == pytest.approx(3 * seconds / 3600, rel=0.01)
