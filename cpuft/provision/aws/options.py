"""Options of `cpuft provision aws`."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option
from cpuft.provision.options import RECIPE, REGION, SSH_FROM


@dataclass(frozen=True)
class AwsConfig:
    """A cluster of instances that are rented from AWS."""

    nodes: int = option(2, "Number of instances", least=1, most=1000)
    type: str = option("m7i.8xlarge", "Type of all instances", takes="NAME")
    name: str = option("cluster", "Name of the cluster: lower-case letters and digits", takes="NAME")
    spot: bool = option(False, "Rent spot instances: they cost less, but AWS may reclaim them with two minutes' notice")
    spot_or_demand: bool = option(False, "Rent spot instances, or on-demand instances if no zone has spot capacity")
    lease: str = option(
        "4h",
        "Time from 10m to 30d, such as 90m, 4h or 2d, after which the instances of a new cluster terminate themselves, "
        "even if this machine is off. A run that is still active extends it, up to --lease-limit. For an existing "
        "cluster, cpuft provision extend changes it, and this option has no effect",
        takes="TIME",
    )
    lease_limit: str = option(
        "",
        "Longest time, counted from the making of the cluster, to which an active run extends the lease by itself, "
        "such as 8h or 2d. To forbid extensions, give the same time as for --lease (default: twice --lease)",
        takes="TIME",
    )
    image: str = option(
        "", "AMI to start the instances from (default: the newest AMI of --recipe, else Debian 12)", takes="AMI"
    )
    recipe: str = option(
        RECIPE,
        "File that describes an AMI; the instances start from the newest AMI that `cpuft provision image --aws` built "
        "from this file",
        takes="FILE",
    )
    region: str = option("", REGION, takes="NAME")
    zone: str = option(
        "", "Availability zone to rent in (default: tries one zone after another until one has capacity)", takes="NAME"
    )
    disk: int = option(50, "Size of each instance's encrypted disk in GB", least=8, most=16384)
    placement_group: bool = option(
        True, "Place the instances close to each other: the network is faster, but capacity is scarcer"
    )
    threads_per_core: int = option(2, "Hardware threads per core; 1 turns hyper-threading off", least=1, most=2)
    ssh_from: str = option("", SSH_FROM, takes="ADDRESS")
    prefix: str = option(
        "/opt/cpuft", "Folder on every instance for the Python environment with torch and cpuft", takes="PATH"
    )
    wheels: str = option(
        "",
        "Folder on this machine with the wheels of all Python packages, cpuft_kernels included, to send to the "
        "instances (default: pinned versions are downloaded to this machine)",
        takes="FOLDER",
    )
    yes: bool = option(False, "Rent the instances at the price that is shown, without asking")
