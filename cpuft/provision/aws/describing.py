"""Rented clusters in words: what there is, for how long, and what it has cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cpuft.errors import counted
from cpuft.provision.aws.facts import LIVE, Group, Instance
from cpuft.provision.aws.lease import format_span, format_time
from cpuft.provision.aws.price import Price, describe_cost


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
