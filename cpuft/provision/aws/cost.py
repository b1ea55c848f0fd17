"""What instances cost and have cost, and the description of a cluster: its instances, its lease and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cpuft.instance_types import read_instance_types
from cpuft.provision.aws.client import AwsClient
from cpuft.provision.aws.facts import BILLED, LIVE, Instance, Resources, find_spot_prices
from cpuft.provision.aws.lease import format_span, format_time
from cpuft.provision.aws.options import AwsConfig

LISTED = "us-east-1"
"""The region whose list prices cpuft has."""


@dataclass(frozen=True)
class Price:
    """Price of one instance, in dollars per hour; None if unknown."""

    on_demand: float | None
    """List price."""
    dated: str
    """The year in which the list price was looked up; empty without one."""
    spot_by_zone: Mapping[str, float] = field(default_factory=dict)
    """Present spot prices; zones without a price are left out."""

    @property
    def source(self) -> str:
        """Where the list price comes from: "list price of us-east-1 in 2025"."""
        return f"list price of {LISTED} in {self.dated}"

    def find(self, instance: Instance) -> float | None:
        """Return an instance's price: list price, or spot price now of its zone, else the highest; None if unknown."""
        if not instance.spot:
            return self.on_demand
        return self.spot_by_zone.get(instance.zone, max(self.spot_by_zone.values(), default=None))


def find_price(instance_type: str, region: str, spot_by_zone: Mapping[str, float]) -> Price:
    """Return the price of a type; the list price is None outside us-east-1, and for types that cpuft does not know."""
    listed = read_instance_types().get(instance_type) if region == LISTED else None
    return Price(listed.dollars_per_hour if listed else None, listed.dated if listed else "", spot_by_zone)


def find_price_of(client: AwsClient, instances: Sequence[Instance]) -> Price:
    """Return the price of a cluster's instances, all of one type; AWS is asked for spot prices if one is a spot one."""
    instance_type = instances[0].type if instances else ""
    spot = find_spot_prices(client, instance_type) if any(one.spot for one in instances) else {}
    return find_price(instance_type, client.region, spot)


def describe_price(price: Price, config: AwsConfig, missing: int, now: float, until: float, limit: float) -> str:
    """Return sentences, the last without a full stop: what `missing` instances cost in an hour, until the end of the
    lease (`until`) and until its `limit`; times are in seconds since the epoch.
    """
    spot, hourly = price.spot_by_zone.values(), price.on_demand or 0.0
    each = f"about ${hourly:.3f} per hour ({price.source})"
    if not hourly:
        each = f"an unknown price (cpuft has only the list prices of {LISTED})"
    if config.spot:
        low, hourly = min(spot, default=0.0), max(spot, default=0.0)
        span = f"{low:.3f}" if low == hourly else f"{low:.3f} to ${hourly:.3f}"
        each = f"{f'${span} per hour now in {config.region}' if spot else 'an unknown price'}, on demand {each}"
    hourly *= missing
    hours, longest = max(0.0, until - now) / 3600, max(0.0, limit - now) / 3600
    end = f"the lease ends at {format_time(until)} (in {format_span(until - now)})"
    total = f"${hourly:.2f} per hour, ${hourly * hours:.2f}" if hourly else "an unknown price"
    sentences = [
        f"{missing} x {config.type} {'spot' if config.spot else 'on demand'}: each instance costs {each}",
        f"All together cost {total} until {end}",
    ]
    if limit > until:
        cost = f", for ${hourly * longest:.2f}" if hourly else ""
        sentences.append(f"Running jobs can extend the lease to {format_time(limit)}{cost}")
    if config.market == "spot-first":
        cost = f"${price.on_demand * missing * hours:.2f}" if price.on_demand else "an unknown price"
        sentences.append(f"On demand, if no zone has spot instances: {cost}")
    return ". ".join([*sentences, "Disks and network traffic cost extra"])


def describe_cost(price: Price, instances: Sequence[Instance], now: float) -> str:
    """Return "about $1.25 for 2.00 instance hours (list price of us-east-1 in 2025)", or "an unknown price for ..."."""
    hours = [_count_seconds(one, now) / 3600 for one in instances]
    spent, prices = f"{_format_amount(sum(hours))} instance hours", [price.find(one) for one in instances]
    if not all(prices):
        return f"an unknown price for {spent}"
    cost = sum(each * one for each, one in zip(prices, hours) if each)
    sources = sorted({"present spot price" if one.spot else price.source for one in instances})
    return f"about ${_format_amount(cost)} for {spent}" + (f" ({' and '.join(sources)})" if sources else "")


def _count_seconds(one: Instance, now: float) -> float:
    """Return for how many seconds an instance was paid; an unknown end is that of its lease, `now` at the latest."""
    end = now if one.state in BILLED else one.ended or max(one.launched, min(now, float(one.until or now)))
    return max(0.0, end - one.launched)


def _format_amount(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.3g}"


def describe_instances(found: Resources, price: Price) -> list[str]:
    """Return a line about a cluster's lease and cost, and one for each instance."""
    lines = [_describe_lease(found, price)]
    for one in found.instances:
        market = "spot" if one.spot else "on demand"
        live = one.state in LIVE
        end = found.now if live else one.ended or found.now
        age = f"{'up' if live else 'ran'} for {format_span(end - one.launched)}"
        lines.append(f"{one.private or one.id}  {one.state}, {one.id}, {one.type} {market} in {one.zone}, {age}")
    return lines


def _describe_lease(found: Resources, price: Price) -> str:
    group, now = found.group, found.now
    until = max([group.until if group else 0, *(one.until for one in found.instances)])
    if not until:
        return "AWS has no resource that is tagged as this cluster's"
    cost = describe_cost(price, found.instances, now)
    is_left = group or found.volumes or found.placement_group
    if not is_left and all(one.state == "terminated" for one in found.instances):
        return f"it was removed, and has cost {cost}; AWS lists its instances for about an hour"
    lease = f"the lease {'ends' if until > now else 'ended'} at {format_time(until)}"
    lease += f" (in {format_span(until - now)})" if until > now else ""
    if group and group.limit > until:
        lease += f"; running jobs can extend it to {format_time(group.limit)}"
    owner = f"owner: {group.owner}" if group else "its security group was deleted"
    return f"{lease}; so far it has cost {cost}; {owner}"
