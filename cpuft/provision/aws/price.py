"""What instances cost, and have cost so far; what is unknown is said to be unknown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuft.provision.aws.facts import COSTS, Instance, Zone
from cpuft.provision.aws.lease import format_span, format_time
from cpuft.report.instances import Instance as Kind

LISTED = "us-east-1"
"""The region whose prices our table has."""


@dataclass(frozen=True)
class Price:
    """Of one instance, in dollars an hour; None where it is unknown."""

    on_demand: float | None
    dated: str
    """When the list price was looked up."""
    spot: tuple[float, float] | None = None
    """The lowest and the highest over the zones, now."""


def find_price(kind: str, region: str, table: dict[str, Kind], zones: Sequence[Zone] = ()) -> Price:
    """What an instance of a kind costs, by the table and by what the zones ask for spot now."""
    listed = table.get(kind) if region == LISTED else None
    spot = sorted(zone.spot_price for zone in zones if zone.spot_price)
    return Price(
        listed.dollars_per_hour if listed else None,
        listed.dated if listed else "",
        (spot[0], spot[-1]) if spot else None,
    )


def describe_price(price: Price, nodes: int, kind: str, spot: bool, now: float, until: float) -> str:
    """What `nodes` more instances cost to the end of their lease, in one line."""
    hours = max(0.0, until - now) / 3600
    each = [f"on demand about {price.on_demand:.3f} $ (list of {price.dated})" if price.on_demand else _NO_LIST]
    each += [f"spot now {_format_range(price.spot)} $" if price.spot else "spot now unknown"] if spot else []
    asked = (price.spot[1] if price.spot else None) if spot else price.on_demand
    total = f"{asked * nodes:.2f} $ an hour, {asked * nodes * hours:.2f} $" if asked else "an unknown price"
    market = "spot" if spot else "on demand"
    return (
        f"{nodes} x {kind} {market}, an hour of one: {', '.join(each)}; in all {total} to the end of the lease at "
        f"{format_time(until)}, in {format_span(until - now)}; disks and traffic come on top"
    )


_NO_LIST = "on demand unknown"


def _format_range(prices: tuple[float, float]) -> str:
    low, high = prices
    return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"


def reckon_seconds(instances: Sequence[Instance], now: float) -> float:
    """Seconds paid for so far. Of an instance whose end is unknown: to the end of its lease, at most."""
    return sum(_paid_until(one, now) - one.launched for one in instances)


def _paid_until(one: Instance, now: float) -> float:
    if one.state in COSTS:
        return now
    return one.ended or max(one.launched, min(now, float(one.until or now)))


def describe_cost(price: Price, instances: Sequence[Instance], now: float) -> str:
    """What instances have cost so far. A spot price changes: its highest now is what is reckoned with."""
    costs = [
        (price.spot[1] if price.spot else None) if one.spot else price.on_demand
        for one in instances
    ]  # fmt: skip
    hours = [reckon_seconds([one], now) / 3600 for one in instances]
    if not all(costs):
        return f"{sum(hours):.2f} instance hours so far, at an unknown price"
    return f"about {sum(each * long for each, long in zip((cost or 0.0 for cost in costs), hours)):.2f} $ so far"
