"""What `cpuft provision` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config import LAST_PORT, option

RECIPE = "ami/recipe.yaml"
REGION = "region of AWS (default: your AWS settings')"
ZONE = "the only availability zone to try (default: one after another)"
SSH_FROM = "the only address that may reach ssh (default: yours, as the internet sees it)"


@dataclass(frozen=True)
class LocalConfig:
    """A cluster of network namespaces on this machine."""

    nodes: int = option(4, "hosts", least=1)
    cores_per_node: float = option(0.0, "CPU time of each host, in cores (0: no limit)", least=0.0)
    net: str = option("", "rate of each host's link in tc's words, e.g. 1gbit (default: no limit)")
    shm: str = option("1g", "size of each host's /dev/shm")
    image: str = option("", "golden image whose root filesystem the hosts get (default: this machine's own files)")
    name: str = option("local", "name of the cluster, 7 small letters and digits at most")
    without_root: bool = option(False, "no namespaces: only a hostfile of this machine with --nodes slots")


@dataclass(frozen=True)
class HostsConfig:
    """A cluster of servers that are reached over ssh."""

    hosts: str = option("", "names or addresses, a comma between, the master first")
    name: str = option("cluster", "name of the cluster")
    user: str = option("", "who to log in as (default: ssh's own)")
    key: str = option("", "private key to log in with (default: ssh's own)")
    jump: str = option("", "bastions on the way from here, as for ssh -J; how they are reached is as ssh's own says")
    port: int = option(22, "port of the hosts' ssh", least=1, most=LAST_PORT)
    prefix: str = option("/opt/cpuft", "directory of the environment, the same on every host")
    wheels: str = option(
        "", "directory of wheels to push, pip's own among them (default: downloaded here by exact pins)"
    )
    pins: str = option(
        "", "file of exact pins (name==version, better with --hash=) that hosts fetch from their own index instead"
    )
    accept_host_keys: bool = option(False, "take the host keys that are seen first, without asking")


@dataclass(frozen=True)
class AwsConfig:
    """A cluster of instances that are rented from AWS."""

    nodes: int = option(2, "instances", least=1, most=1000)
    type: str = option("m7i.8xlarge", "type of all instances")
    name: str = option("cluster", "name of the cluster")
    spot: bool = option(False, "spot instances: cheaper, and AWS may take them back at two minutes' notice")
    spot_or_demand: bool = option(False, "spot instances, or on demand where no zone has them")
    lease: str = option("4h", "instances end themselves after that, whatever becomes of this machine: 90m, 4h, 2d")
    lease_limit: str = option("", "running jobs move the lease's end, but not beyond that (default: twice --lease)")
    image: str = option("", "AMI that all instances start from (default: the recipe's, else Debian 12's own)")
    recipe: str = option(RECIPE, "its newest image is used, where cpuft provision image --aws has made one")
    region: str = option("", REGION)
    zone: str = option("", ZONE)
    disk: int = option(50, "GB of each instance's disk, encrypted", least=8, most=16384)
    placement_group: bool = option(True, "instances close to each other: faster links, but scarcer")
    threads_per_core: int = option(2, "hardware threads a core: 1 leaves the second out", least=1, most=2)
    ssh_from: str = option("", SSH_FROM)
    prefix: str = option("/opt/cpuft", "directory of the environment, the same on every instance")
    wheels: str = option("", "directory of wheels to push (default: downloaded here by exact pins)")
    yes: bool = option(False, "rent them at the price that is shown, without asking")


@dataclass(frozen=True)
class ImageConfig:
    """A golden image: a root filesystem on this machine, or an AMI."""

    recipe: str = option(RECIPE, "what is in it")
    output: str = option("", "directory of a root filesystem, made new")
    wheels: str = option("", "directory of wheels (default: downloaded by exact pins)")
    aws: bool = option(False, "make it an AMI: on an instance that is rented for that, and gone afterwards")
    list: bool = option(False, "list the AMIs that cpuft has made for you in a region")
    delete: str = option("", "take away one of these, by its name or AMI, and its snapshots")
    region: str = option("", REGION)
    zone: str = option("", ZONE)
    type: str = option("m7i.xlarge", "type of the instance that makes an AMI: two cores or more")
    ssh_from: str = option("", SSH_FROM)
    yes: bool = option(False, "rent that at the price that is shown, without asking")
