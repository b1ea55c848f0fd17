"""Prices of spot instances, which AWS tells. List prices are in `cpuft.instance_types`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpuft.provision.aws.client import AwsClient


def find_spot_prices(client: AwsClient, instance_type: str) -> dict[str, float]:
    """Return the present price of a spot instance in dollars per hour, by name of the zone."""
    products = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]
    asked = {"InstanceTypes": [instance_type], "ProductDescriptions": products, "MaxResults": 100}
    # The newest price comes first; the last one that is written into the dictionary stays.
    history: Sequence[dict[str, Any]] = client.query("describe_spot_price_history", **asked)["SpotPriceHistory"]
    return {one["AvailabilityZone"]: float(one["SpotPrice"]) for one in reversed(history)}
