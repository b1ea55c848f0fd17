"""What `cpuft provision` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config import option


@dataclass(frozen=True)
class LocalConfig:
    """A cluster of network namespaces on this machine."""

    nodes: int = option(4, "hosts", least=1)
    cores_per_node: float = option(0.0, "CPU time of each host, in cores (0: no limit)", least=0.0)
    net: str = option("", "rate of each host's link in tc's words, e.g. 1gbit (default: no limit)")
    shm: str = option("1g", "size of each host's /dev/shm")
    image: str = option("", "golden image whose root filesystem the hosts get (default: this machine's own files)")
    name: str = option("local", "name of the cluster, 8 letters and digits at most")
    without_root: bool = option(False, "no namespaces: only a hostfile of this machine with --nodes slots")
