"""What instances cost, and have cost so far; what is unknown is said to be unknown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cpuft.errors import counted
from cpuft.provision.aws.client import Cloud
from cpuft.provision.aws.facts import (
    COSTS,
    LIVE,
    Group,
    Instance,
    find_spot_prices,
    read_table,
)
from cpuft.provision.aws.lease import format_span, format_time
from cpuft.provision.aws.options import AwsConfig
from cpuft.report.estimate import Instance as Kind

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
    spot_in: Mapping[str, float] = field(default_factory=dict)
    """The same, zone by zone."""

    @property
    def source(self) -> str:
        """Region and year of the list price."""
        return f"list price of {LISTED} in {self.dated}"

    def source_of(self, instances: Sequence[Instance]) -> str:
        """Where the prices of these instances come from."""
        sources = sorted({"spot price of now" if one.spot else self.source for one in instances})
        return f" at the {' and the '.join(sources)}" if sources else ""

    def of(self, one: Instance) -> float | None:
        """What an instance costs an hour. A spot price changes: the one of now is reckoned with."""
        if not one.spot:
            return self.on_demand
        return self.spot_in.get(one.zone, self.spot[1] if self.spot else None)


def find_price(kind: str, region: str, table: dict[str, Kind], spot: Mapping[str, float]) -> Price:
    """What an instance of a kind costs, by the table and by what AWS asks for spot now, zone by zone."""
    listed = table.get(kind) if region == LISTED else None
    asked = {zone: price for zone, price in spot.items() if price}
    return Price(
        listed.dollars_per_hour if listed else None,
        listed.dated if listed else "",
        (min(asked.values()), max(asked.values())) if asked else None,
        asked,
    )


def describe_price(price: Price, config: AwsConfig, missing: int, now: float, until: float, limit: float) -> str:
    """What missing instances cost to the end of their lease, in one line; and to its limit, if jobs move it so far."""
    hours, later = max(0.0, until - now) / 3600, max(0.0, limit - now) / 3600
    listed = f"on demand about {price.on_demand:.3f} $ ({price.source})" if price.on_demand else _NO_LIST
    spot = f"spot now {_format_range(price.spot)} $ in {config.region}" if price.spot else "spot now unknown"
    each = [listed, spot] if config.spot else [listed]
    asked = (price.spot[1] if price.spot else None) if config.spot else price.on_demand
    hourly = asked * missing if asked else 0.0
    total = f"{hourly:.2f} $ an hour, {hourly * hours:.2f} $" if hourly else "an unknown price"
    most = f", running jobs move it to {format_time(limit)} at most" + (f": {hourly * later:.2f} $" if hourly else "")
    also = _describe_demand(price, missing, hours) if config.spot and config.spot_or_demand else ""
    market = "spot" if config.spot else "on demand"
    return (
        f"{missing} x {config.type} {market}, an hour of one: {', '.join(each)}; in all {total} to the end of the "
        f"lease at {format_time(until)}, in {format_span(until - now)}{most if limit > until else ''}{also}; "
        "disks and traffic come on top"
    )


def _describe_demand(price: Price, missing: int, hours: float) -> str:
    total = f"{price.on_demand * missing * hours:.2f} $" if price.on_demand else "at an unknown price"
    return f"; on demand where no zone has spot instances: {total}"


_NO_LIST = f"on demand unknown (not in the list of {LISTED})"


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


def reckon_cost(price: Price, instances: Sequence[Instance], now: float) -> float | None:
    """What instances have cost so far, in dollars; None where a price is unknown."""
    costs = [price.of(one) for one in instances]
    if not all(costs):
        return None
    return sum((cost or 0.0) * reckon_seconds([one], now) / 3600 for cost, one in zip(costs, instances))


def describe_cost(price: Price, instances: Sequence[Instance], now: float) -> str:
    """What instances have cost so far, in words."""
    cost = reckon_cost(price, instances, now)
    if cost is None:
        return f"{reckon_seconds(instances, now) / 3600:.2f} instance hours so far, at an unknown price"
    return f"about {format_dollars(cost)} $ so far{price.source_of(instances)}"


def format_dollars(cost: float) -> str:
    """A sum, to a cent or to three digits."""
    return f"{cost:.2f}" if cost >= 1 else f"{cost:.3g}"


def describe_bill(price: Price, instances: Sequence[Instance], now: float) -> str:
    """What a cluster has cost that is gone; nothing where AWS tells of no instance any more."""
    if not instances:
        return ""
    cost, hours = reckon_cost(price, instances, now), reckon_seconds(instances, now) / 3600
    said = f"about {format_dollars(cost)} $" if cost is not None else "an unknown price"
    source = price.source_of(instances) if cost is not None else ""
    return f"it has cost {said} for {format_dollars(hours)} instance hours{source}; disks and traffic come on top"


def find_costs(cloud: Cloud, instances: Sequence[Instance]) -> Price:
    """What an hour of a cluster's instances costs."""
    kind = instances[0].type if instances else ""
    prices = find_spot_prices(cloud, kind) if any(one.spot for one in instances) else {}
    return find_price(kind, cloud.region, read_table(), prices)


def describe_instances(group: Group | None, instances: Sequence[Instance], now: float, price: Price) -> list[str]:
    """A line for the cluster, and one for each instance that AWS tells of."""
    lines = [_describe_whole(group, instances, now, price)]
    for one in instances:
        market = "spot" if one.spot else "on demand"
        age = format_span((now if one.state in LIVE else one.ended or now) - one.launched)
        lines.append(f"{one.private or one.id}  {one.state}, {one.id}, {one.type} {market} in {one.zone}, for {age}")
    return lines


def _describe_whole(group: Group | None, instances: Sequence[Instance], now: float, price: Price) -> str:
    until = max([group.until if group else 0, *(one.until for one in instances)])
    if not until:
        return "nothing at AWS carries its tag"
    left = f"in {format_span(until - now)}" if until > now else "which is past"
    if group and group.limit > until:
        left += f"; jobs move it, to {format_time(group.limit)} at most"
    whose = f", of {group.owner}" if group else ", its security group is gone"
    return f"lease to {format_time(until)}, {left}; {describe_cost(price, instances, now)}{whose}"


def describe_cluster(
    name: str, group: Group | None, instances: Sequence[Instance], now: float, price: Price
) -> list[str]:
    """The same for a cluster of which only the tags are known."""
    nodes = counted(sum(one.state in LIVE for one in instances), "node")
    head = f"cluster {name} (aws), {nodes}"
    return [head, *(f"  {line}" for line in describe_instances(group, instances, now, price))]
