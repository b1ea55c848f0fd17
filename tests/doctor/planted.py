"""The facts of a healthy cluster, in which tests plant one fault at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpuft.doctor.checks import ClusterState, Health, HostState
from cpuft.hosts.hostfile import Host
from cpuft.hosts.topology import HostFacts

LSCPU = "".join(f"{cpu},{cpu},0,0\n" for cpu in range(8))
FACTS = HostFacts(
    hostname="",
    python="3.11.7",
    kernel="6.8.0",
    boot_id="",
    cpu_model="Xeon",
    cpu_flags=("amx_bf16", "amx_tile", "avx512_bf16"),
    lscpu=LSCPU,
    allowed_cpus=tuple(range(8)),
    cpu_quota=0.0,
    interfaces={},
    routes={},
    free_port=40000,
    libraries={"tcmalloc": "/usr/lib/libtcmalloc.so.4"},
    uid=0,
)
HEALTH = Health(
    time=0.0,
    executable="/opt/env/bin/python",
    packages={"torch": "2.13.0", "cpuft": "0.1.0"},
    mpi="Intel(R) MPI Library 2021.18",
    kernels="/usr/bin/g++",
    kernel_build="from the wheel, for AMX",
    own_address="",
    amx_usable=True,
    memory_available=60 << 30,
    shm_free=1 << 30,
    disk_free=100 << 30,
    mtus={"lo": 65536, "eth0": 1500, "docker0": 1500},
    governors=["performance"],
    page_size=4096,
    huge_pages="always [madvise] never",
    load=0.1,
    memlock=-1,
    open_files=1 << 20,
    leftovers=[],
    steal=0.0,
    ssh={},
    listens=True,
    tried=[],
    connected=[],
)


def healthy(hosts: int = 4) -> ClusterState:
    """A cluster on which the doctor finds nothing."""
    return ClusterState(tuple(_host(index, hosts) for index in range(1, hosts + 1)), "/opt/env/bin/python")


def _host(index: int, hosts: int) -> HostState:
    address = f"10.0.0.{index}"
    peers = [f"10.0.0.{other}" for other in range(1, hosts + 1) if other != index]
    facts = replace(
        FACTS,
        hostname=f"node{index}",
        boot_id=f"boot-{index}",
        interfaces={"lo": "127.0.0.1", "eth0": address, "docker0": "172.17.0.1"},
        routes={peers[0]: address},
    )
    health = replace(
        HEALTH,
        own_address=address,
        ssh=dict.fromkeys(peers, ""),
        tried=peers,
        connected=peers,
    )
    return HostState(Host(f"node{index}"), address, facts, health)


def plant(state: ClusterState, index: int, **changes: Any) -> ClusterState:
    """The same cluster with fields of host `index` (1 is the head host) changed, in whichever object they are."""
    one = state.hosts[index - 1]
    assert one.facts is not None
    assert one.health is not None
    of_facts = {name: value for name, value in changes.items() if hasattr(one.facts, name)}
    of_health = {name: value for name, value in changes.items() if hasattr(one.health, name) and name not in of_facts}
    own = {name: value for name, value in changes.items() if name not in of_facts and name not in of_health}
    one = replace(one, facts=replace(one.facts, **of_facts), health=replace(one.health, **of_health))
    hosts = list(state.hosts)
    hosts[index - 1] = replace(one, **own)
    return replace(state, hosts=tuple(hosts))
