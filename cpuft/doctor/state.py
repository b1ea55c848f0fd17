"""What was found on every host of a cluster: all that checks look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuft.hosts.hostfile import Host
from cpuft.hosts.topology import HostFacts
from cpuft.measurement import Link


@dataclass(frozen=True)
class Health:
    """What `cpuft.doctor.probe` found on a host."""

    time: float
    """Its clock, seconds since 1970."""
    executable: str
    packages: dict[str, str]
    mpi: str
    kernels: str
    """Path of a C++ compiler, or of kernels that were compiled elsewhere; empty where there is neither."""
    own_address: str
    amx_usable: bool
    memory_available: int
    shm_free: int
    disk_free: int
    mtus: dict[str, int]
    governors: list[str]
    huge_pages: str
    load: float
    memlock: int
    """Bytes a process may lock; -1 for no limit."""
    open_files: int
    """Files a process may open, once it has asked for all it may have; -1 for no limit."""
    leftovers: list[str]
    listening: dict[str, str]
    """What runs listen at, by process and port -> address; without loopback."""
    steal: float
    ssh: dict[str, str]
    """Address of a peer -> what ssh complained of."""
    listens: bool
    connected: dict[str, float]
    """Address of a peer -> milliseconds a connection took."""


@dataclass(frozen=True)
class HostState:
    """One line of the hostfile, and what is behind it."""

    host: Host
    address: str = ""
    """What its name resolves to; empty for nothing."""
    facts: HostFacts | None = None
    health: Health | None = None
    failure: str = ""
    """Why it could not be asked."""
    kind: str = ""
    """Of the failure, where it is one of ssh's (`HostError.kind`)."""
    outside_port: int = 0
    """TCP port of the host that this machine could connect to from another network; 0: none, or it was not tried."""
    skew: float = 0.0
    """Seconds by which its clock is surely ahead of (or, negative, behind) this machine's."""

    @property
    def name(self) -> str:
        """The host for a reader: as the hostfile names it, and what it calls itself."""
        if self.facts is None or self.facts.hostname == self.host.name:
            return self.host.name
        return f"{self.host.name} ({self.facts.hostname})"


@dataclass(frozen=True)
class ClusterState:
    """All hosts, and what a run is meant to find there."""

    hosts: tuple[HostState, ...]
    python: str = ""
    """Where the training environment's Python should be; empty when nobody said."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks planned on each host, by its name in the hostfile; empty when no launch is planned."""
    links: tuple[Link, ...] = ()
    """Measured on request only."""

    @property
    def answering(self) -> tuple[tuple[HostState, HostFacts, Health], ...]:
        """Hosts that could be asked."""
        return tuple((h, h.facts, h.health) for h in self.hosts if h.facts and h.health)
