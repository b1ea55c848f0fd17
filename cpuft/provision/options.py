"""Options of `cpuft provision local`, `hosts` and `image`. This module is light, because every help imports it."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option
from cpuft.serialization import LAST_PORT

RECIPE = "ami/recipe.yaml"
"""Default of --recipe: path of the recipe in a checkout of cpuft."""
NAME = "Name of the cluster, for --cluster: lower-case letters and digits, a letter first"
PREFIX = "Folder on every host in which the training environment is installed: Python packages such as torch and cpuft"
WHEELS = (
    "Folder on this machine with the wheels of all packages to install, with pip and cpuft_kernels, but without cpuft "
    "(default: cpuft downloads pinned versions to this machine)"
)
REGION = "AWS region, such as us-east-1 (default: the region of your AWS configuration)"
SSH_FROM = (
    "The only IPv4 address or range, such as 203.0.113.7 or 203.0.113.0/24, from which ssh reaches the instances "
    "(default: the address under which this machine reaches the internet)"
)
YES = "Rent at the price that is shown, without asking"


@dataclass(frozen=True)
class LocalConfig:
    """A simulated cluster: hosts that are network namespaces of this machine."""

    nodes: int = option(4, "Number of simulated hosts, 99 at most", least=1, most=99)
    cores_per_node: float = option(
        0.0, "CPU time that each host may use, in cores, such as 0.5; 0 sets no limit", least=0.0
    )
    net: str = option(
        "",
        "Rate of each host's network link in bits per second, as `tc` writes it, such as 1gbit or 20mbit (default: no "
        "limit)",
        takes="RATE",
    )
    shm: str = option("1g", "Size of /dev/shm on each host, such as 256m or 1g", takes="SIZE")
    image: str = option(
        "",
        "Folder of a golden image that `cpuft provision image --output` made: the root filesystem of each host "
        "(default: the hosts see the files of this machine)",
        takes="FOLDER",
    )
    name: str = option("local", f"{NAME}; at most 7 characters, or 6 from 10 hosts on", takes="NAME")


@dataclass(frozen=True)
class HostsConfig:
    """Make a cluster of servers over ssh: install the same environment on all of them, and let them reach each other.

    Run the command again to repair a cluster: it installs what is missing, and does nothing when nothing is.
    """

    hosts: str = option(
        "",
        "Required: names or addresses of the servers, separated by commas, in the network that connects the servers; "
        "the first one becomes the head host",
        takes="LIST",
    )
    name: str = option("cluster", NAME, takes="NAME")
    user: str = option("", "User to log in as on every server (default: your user name on this machine)", takes="NAME")
    key: str = option(
        "", "Private key to log in with (default: the keys of your ssh agent, and those in ~/.ssh)", takes="FILE"
    )
    jump: str = option(
        "",
        "Bastion hosts between this machine and the servers, separated by commas as for `ssh -J`; your ~/.ssh/config "
        "says how to reach them (default: this machine connects directly)",
        takes="LIST",
    )
    port: int = option(22, "TCP port of the ssh server on every server", least=1, most=LAST_PORT)
    prefix: str = option("/opt/cpuft", PREFIX, takes="PATH")
    wheels: str = option("", WHEELS, takes="FOLDER")
    pins: str = option(
        "",
        "Requirements file with a line name==version, ideally with --hash=, for each package that the servers install "
        "from their own package index (default: they get wheels from this machine, and need no index)",
        takes="FILE",
    )
    accept_host_keys: bool = option(
        False, "Accept the host key that each new server shows, without asking; cpuft does not read ~/.ssh/known_hosts"
    )


@dataclass(frozen=True)
class ImageConfig:
    """A golden image: a root filesystem on this machine, or an AMI."""

    recipe: str = option(RECIPE, "YAML file with the Debian packages, files and environment of the image", takes="FILE")
    output: str = option(
        "", "Folder in which to build a root filesystem; it must not exist yet, or hold the same image", takes="FOLDER"
    )
    wheels: str = option("", WHEELS, takes="FOLDER")
    aws: bool = option(False, "Make an AMI, on an instance that is rented for this and terminated afterwards")
    list: bool = option(
        False, "List the AMIs that cpuft has made in your AWS account in the region, and change nothing"
    )
    delete: str = option("", "Delete the AMI with this name or id and its snapshots, without asking", takes="NAME")
    region: str = option("", REGION, takes="NAME")
    zone: str = option(
        "",
        "Availability zone to build the AMI in (default: the zones in turn, until one has an instance)",
        takes="NAME",
    )
    type: str = option(
        "m7i.xlarge",
        "EC2 type of the instance that builds the AMI, with at least two cores; its architecture is the AMI's",
        takes="TYPE",
    )
    ssh_from: str = option("", SSH_FROM, takes="ADDRESS")
    yes: bool = option(False, YES)
