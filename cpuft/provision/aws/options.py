"""Options of `cpuft provision aws`."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option
from cpuft.provision.options import NAME, PREFIX, RECIPE, REGION, SSH_FROM, WHEELS, YES


@dataclass(frozen=True)
class AwsConfig:
    """A cluster of instances that are rented from AWS."""

    nodes: int = option(2, "Number of instances; a cluster can grow later, but not shrink", least=1, most=1000)
    type: str = option(
        "m7i.8xlarge", "EC2 type of all instances, such as c7i.4xlarge, or c8g.4xlarge with Arm CPUs", takes="TYPE"
    )
    name: str = option("cluster", NAME, takes="NAME")
    market: str = option(
        "on-demand",
        "What to rent: on-demand instances; spot instances, which cost less, but which AWS may take back with two "
        "minutes' notice; or, with spot-first, spot instances if a zone has enough of them, otherwise on-demand "
        "instances",
        choices=("on-demand", "spot", "spot-first"),
    )
    lease: str = option(
        "4h",
        "Time after which the instances of a new cluster terminate themselves, even if this machine is off: 10m to "
        "30d, such as 90m, 4h or 2d. An active run extends it, up to --lease-limit; you change it with `cpuft "
        "provision extend`",
        takes="TIME",
    )
    lease_limit: str = option(
        "",
        "Time after which the instances of a new cluster terminate themselves even if a run is active, such as 8h or "
        "2d; the time of --lease forbids extensions by runs (default: twice --lease, 30d at most)",
        takes="TIME",
    )
    image: str = option(
        RECIPE,
        "AMI to start the instances from: its id, such as ami-0abc1234, or a recipe, a .yaml file, for the newest AMI "
        "that `cpuft provision image --aws` made from this recipe; if there is none, Debian 12",
        takes="AMI",
    )
    region: str = option("", REGION, takes="NAME")
    zone: str = option(
        "",
        "Availability zone to rent all instances in (default: the zones of the region in turn, until one has enough "
        "instances; the cheapest one first for spot instances)",
        takes="NAME",
    )
    disk: int = option(
        50, "Size of each instance's encrypted disk in GB; at least the size of the AMI's disk", least=8, most=16384
    )
    placement_group: bool = option(
        True,
        "Rent instances that are close to each other, in a cluster placement group: their network is faster, but AWS "
        "has fewer of them",
    )
    ssh_from: str = option("", SSH_FROM, takes="ADDRESS")
    prefix: str = option("/opt/cpuft", PREFIX, takes="PATH", rare=True)
    wheels: str = option("", WHEELS, takes="FOLDER", rare=True)
    yes: bool = option(False, YES)

    @property
    def spot(self) -> bool:
        """Whether spot instances are wanted, be it only at first."""
        return self.market != "on-demand"

    @property
    def recipe(self) -> str:
        """`image` if it ends in .yaml or .yml: the recipe whose newest AMI is wanted; "" for the id of an AMI."""
        return self.image if self.image.endswith((".yaml", ".yml")) else ""
