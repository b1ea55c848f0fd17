"""Options of `cpuft provision local`, `hosts` and `image`. This module is light, because every help imports it."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option
from cpuft.serialization import LAST_PORT

RECIPE = "ami/recipe.yaml"
"""Default of --recipe: path of the recipe in a checkout of cpuft."""
REGION = "AWS region, such as us-east-1 (default: the region of your AWS configuration)"
SSH_FROM = (
    "IPv4 address or range, such as 203.0.113.7, from which ssh may reach the instances (default: this machine's "
    "public address)"
)


@dataclass(frozen=True)
class LocalConfig:
    """A simulated cluster: hosts that are network namespaces of this machine."""

    nodes: int = option(4, "Number of hosts", least=1)
    cores_per_node: float = option(0.0, "CPU time that each host may use, in cores (0: no limit)", least=0.0)
    net: str = option(
        "", "Rate of each host's network link, as `tc` writes it: 1gbit, 20mbit (default: no limit)", takes="RATE"
    )
    shm: str = option("1g", "Size of /dev/shm on each host", takes="SIZE")
    image: str = option(
        "",
        "Golden image, made by `cpuft provision image`, that the hosts use as root filesystem (default: the files of "
        "this machine)",
        takes="FOLDER",
    )
    name: str = option("local", "Name of the cluster: at most 7 lower-case letters and digits", takes="NAME")


@dataclass(frozen=True)
class HostsConfig:
    """Make a cluster of servers over ssh: install the same environment on all of them, and let them reach each other.

    Run the command again to repair a cluster: it installs what is missing, and does nothing when nothing is.
    """

    hosts: str = option(
        "",
        "Names or addresses (required) of the servers, separated by commas; the first one becomes the head host",
        takes="LIST",
    )
    name: str = option("cluster", "Name of the cluster: lower-case letters and digits", takes="NAME")
    user: str = option("", "User to log in as (default: from your ssh configuration)", takes="NAME")
    key: str = option("", "Private key to log in with (default: from your ssh configuration)", takes="FILE")
    jump: str = option(
        "",
        "Bastion hosts between this machine and the servers, separated by commas as for `ssh -J`; your ssh "
        "configuration says how to reach them",
        takes="LIST",
    )
    port: int = option(22, "Port of the ssh server on every host", least=1, most=LAST_PORT)
    prefix: str = option("/opt/cpuft", "Folder of the training environment, the same path on every host", takes="PATH")
    wheels: str = option(
        "",
        "Folder of wheels to install on the hosts, which must include pip (default: downloaded to this machine, in "
        "pinned versions)",
        takes="FOLDER",
    )
    pins: str = option(
        "",
        "Requirements file with exact versions (name==version, ideally with --hash=) that the hosts install from their "
        "own package index, instead of wheels from this machine",
        takes="FILE",
    )
    accept_host_keys: bool = option(False, "Accept the host keys of servers that ssh does not know yet, without asking")


@dataclass(frozen=True)
class ImageConfig:
    """A golden image: a root filesystem on this machine, or an AMI."""

    recipe: str = option(RECIPE, "Recipe of the image: its packages, files and environment", takes="FILE")
    output: str = option("", "New folder to build a root filesystem in", takes="FOLDER")
    wheels: str = option(
        "", "Folder of wheels to install in the image (default: downloaded in pinned versions)", takes="FOLDER"
    )
    aws: bool = option(False, "Make an AMI, on an instance that is rented for this and terminated afterwards")
    list: bool = option(False, "List the AMIs that cpuft has made in your AWS account, in one region")
    delete: str = option("", "Delete the AMI with this name or id, and its snapshots", takes="NAME")
    region: str = option("", REGION, takes="NAME")
    zone: str = option("", "Availability zone to build the AMI in (default: tries all zones)", takes="NAME")
    type: str = option("m7i.xlarge", "Type of the instance that builds the AMI, with at least two cores", takes="NAME")
    ssh_from: str = option("", SSH_FROM, takes="ADDRESS")
    yes: bool = option(False, "Rent the instance at the price that is shown, without asking")
