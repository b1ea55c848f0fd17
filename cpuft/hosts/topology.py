"""A host's cores and network interfaces, and which of them each rank and communication worker gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpuft.errors import CpuftError, last_line
from cpuft.hardware import parse_cpuinfo
from cpuft.serialization import is_count, load, parse_json

_LEAST_USED = 0.75
"""Least share of a host's cores that ranks within NUMA nodes must use."""


@dataclass(frozen=True)
class Core:
    """A physical core; all numbers are the kernel's."""

    socket: int
    numa_node: int
    threads: tuple[int, ...]
    """Its hardware threads; a rank uses only the first."""


@dataclass(frozen=True)
class HostFacts:
    """Facts of a host, as `cpuft.hosts.facts` reports them."""

    hostname: str
    python: str
    kernel: str
    """Release of the kernel, as in uname -r."""
    boot_id: str
    """Equal on two hosts that are one machine under two addresses (network namespaces, containers)."""
    cpu_model: str
    cpu_flags: tuple[str, ...]
    """Flags of the first CPU in /proc/cpuinfo, such as "avx512f"."""
    lscpu: str
    """Output of `lscpu -p=CPU,CORE,SOCKET,NODE`; empty if lscpu failed."""
    allowed_cpus: tuple[int, ...]
    """Hardware threads on which the process that reported may run, in ascending order."""
    cpu_quota: float
    """Number of cores that the control group's CPU quota allows; 0 for no limit."""
    interfaces: dict[str, str]
    """IPv4 address by name of network interface, with loopback."""
    routes: dict[str, str]
    """Target address -> local address from which it is reached, "" without a route. The only target is the head host,
    or for that the next host."""
    free_port: int
    """A TCP port on which nothing listened."""
    libraries: dict[str, str]
    """Path by name of the libraries for LD_PRELOAD that are installed, such as jemalloc."""
    uid: int
    """Id of the user that runs commands there."""
    efa: bool = False
    """Whether it has AWS's Elastic Fabric Adapter, with driver and library."""
    memory_free: int = 0
    """Bytes of memory that processes of the machine can get now; 0: not known."""
    memory_left: int = -1
    """Bytes of memory that the limits of control groups leave; -1: no limit."""
    machine: str = "x86_64"
    """Architecture, as in uname -m."""
    system: str = "linux"
    """Operating system, as in `sys.platform`; "darwin" for macOS, where training is only tried out."""

    @property
    def seen_cores(self) -> tuple[Core, ...]:
        """Cores on which the process that reported may run, ordered by NUMA node, socket and core; never empty."""
        return parse_lscpu(self.lscpu, self.allowed_cpus)

    @property
    def cores(self) -> tuple[Core, ...]:
        """Cores to use: the first of `seen_cores`, as many as the control group's CPU quota allows and at least one."""
        # With more threads than the quota the kernel would pause each in turn while the others wait for it.
        return self.seen_cores[: max(1, int(self.cpu_quota))] if self.cpu_quota else self.seen_cores

    @property
    def numa_nodes(self) -> int:
        """Number of NUMA nodes that have cores to use; 1 if equal shares of them would leave over a quarter unused."""
        return len(_divide_by_nodes(self.cores))


def spread_cores(hosts: Sequence[HostFacts]) -> list[tuple[Core, ...]]:
    """Return the cores of each host, as many as `HostFacts.cores`: on one machine (`boot_id`) different ones, as long
    as there are any. Containers with a CPU quota see all cores of their machine, and would begin with the same one.
    """
    taken: dict[str, set[tuple[int, ...]]] = {}
    found = []
    for facts in hosts:
        others = taken.setdefault(facts.boot_id, set())
        chosen = sorted(facts.seen_cores, key=lambda core: core.threads in others)[: len(facts.cores)]
        others |= {core.threads for core in chosen}
        found.append(tuple(core for core in facts.seen_cores if core in chosen))
    return found


@dataclass(frozen=True)
class RankCores:
    """One rank's hardware threads: `compute` for OpenMP, `comm` for communication workers; no number is in both."""

    compute: tuple[int, ...]
    comm: tuple[int, ...] = ()


def parse_facts(text: str, host: str) -> HostFacts:
    """Return the facts in what `cpuft.hosts.facts` printed; CpuftError, which names `host`: it has another form."""
    try:
        values = load(dict[str, Any], parse_json(text))
        cpuinfo = load(str, values.pop("cpuinfo", None), "cpuinfo")
        cpu = parse_cpuinfo(cpuinfo, load(str, values.get("machine"), "machine"))
        values["allowed_cpus"] = values.get("allowed_cpus") or None  # an empty list is not valid: nothing could run
        return load(HostFacts, values | {"cpu_model": cpu.model, "cpu_flags": list(cpu.flags)})
    except ValueError:
        last = last_line(text, "nothing")
        raise CpuftError(
            f"host {host} did not report its facts (its last line: {last[:200]}): check that python3 runs there"
        ) from None


def parse_lscpu(text: str, allowed: tuple[int, ...]) -> tuple[Core, ...]:
    """Return the cores in the output of `lscpu -p=CPU,CORE,SOCKET,NODE` that have hardware threads in `allowed`, by
    NUMA node, socket and number; if there are none, each of these threads is a core of socket 0 and NUMA node 0.
    """
    threads: dict[tuple[int, int, int], list[int]] = {}
    for line in text.splitlines():
        columns = line.split(",")
        if len(columns) < 3 or not columns[0] or not all(is_count(column or "0", least=0) for column in columns[:3]):
            continue
        cpu, core, socket = (int(column or 0) for column in columns[:3])
        numa_node = int(columns[3]) if len(columns) > 3 and is_count(columns[3], least=0) else socket
        if cpu in allowed:
            threads.setdefault((numa_node, socket, core), []).append(cpu)
    if not threads:
        return tuple(Core(0, 0, (cpu,)) for cpu in allowed)
    return tuple(Core(socket, node, tuple(sorted(cpus))) for (node, socket, _), cpus in sorted(threads.items()))


def choose_comm_cores(cores_per_rank: int, ranks: int, backend: str) -> tuple[int, str]:
    """Return (number of cores that each rank leaves to communication workers, reason as a phrase for the user): an
    eighth of `cores_per_rank`, rounded down, at most 4; 0 for one rank and for the backend "gloo".
    """
    if ranks == 1:
        return 0, "a single rank sends nothing"
    if backend == "gloo":
        return 0, "gloo's threads share the cores of their rank"
    if cores_per_rank < 8:
        return 0, f"{cores_per_rank} cores per rank are too few to give any away"
    # The recipe that cpuft follows gives oneCCL 4 of 32 cores.
    count = min(4, cores_per_rank // 8)
    return count, f"{count} of {cores_per_rank} cores per rank carry communication"


def plan_placement(cores: tuple[Core, ...], ranks: int, comm_cores: int) -> tuple[RankCores, ...]:
    """Return the cores of each rank on one host, in the order of the local ranks. All ranks get equal numbers of cores,
    and if the ranks divide evenly over the NUMA nodes, all of a rank's are on one node. If there are more ranks than
    cores, they share cores. Raises CpuftError: `comm_cores` leave a rank no core.
    """
    cpus = [core.threads[0] for core in cores]
    if ranks > len(cpus):
        return tuple(RankCores((cpus[rank % len(cpus)],)) for rank in range(ranks))
    groups = _even_groups(cores, ranks)
    smallest = min(len(group) for group in groups)
    if comm_cores >= smallest:
        raise CpuftError(
            f"{ranks} ranks on {len(cpus)} cores have {smallest} cores each, and communication takes {comm_cores}: "
            f"lower --ppn or --comm-cores"
        )
    return tuple(RankCores(tuple(group[comm_cores:]), tuple(group[:comm_cores])) for group in groups)


def _divide_by_nodes(cores: tuple[Core, ...]) -> list[list[int]]:
    """Return the first threads of the cores of each NUMA node; all in one list if equal shares would waste cores."""
    nodes: dict[int, list[int]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(core.threads[0])
    pools = list(nodes.values())
    # A CPU quota or a share of a Slurm node takes the first cores, so that the last node may have only a few.
    if min(map(len, pools)) * len(pools) < _LEAST_USED * len(cores):
        return [[cpu for pool in pools for cpu in pool]]
    return pools


def _even_groups(cores: tuple[Core, ...], ranks: int) -> list[list[int]]:
    pools = _divide_by_nodes(cores)
    if ranks % len(pools) or min(len(pool) for pool in pools) < ranks // len(pools):
        pools = [[cpu for pool in pools for cpu in pool]]
    share = ranks // len(pools)
    size = min(len(pool) // share for pool in pools)
    return [pool[index * size : (index + 1) * size] for pool in pools for index in range(share)]


def format_mask(cpus: tuple[int, ...]) -> str:
    """Return the hexadecimal mask of hardware threads that I_MPI_PIN_DOMAIN takes: "0x3" for (0, 1), "0x0" for ()."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


_UNSUITABLE = ("lo", "docker", "br-", "virbr", "veth", "tun", "tap", "wg", "tailscale", "cni", "flannel", "cali")


@dataclass(frozen=True)
class Interface:
    """A network interface of a host and its IPv4 address."""

    name: str
    address: str
    reason: str
    """Why it was chosen, as a phrase for the user."""


def choose_interface(facts: HostFacts, target: str, wanted: str = "") -> Interface:
    """Return the interface `wanted`, or if that is "" the one by which a host reaches `target`, one of the keys of
    `routes`. Raises CpuftError: there is no such interface with an address, or (not for `wanted`) it is one that other
    hosts cannot reach, such as lo or docker0.
    """
    if wanted:
        if wanted not in facts.interfaces:
            known = ", ".join(sorted(facts.interfaces))
            raise CpuftError(f"host {facts.hostname} has no interface {wanted} with an address: use one of {known}")
        return Interface(wanted, facts.interfaces[wanted], "the interface you named")
    source = facts.routes.get(target, "")
    name = next((name for name, address in sorted(facts.interfaces.items()) if address == source), "")
    if not name or name.startswith(_UNSUITABLE):
        raise CpuftError(
            f"host {facts.hostname} reaches {target} by {name or 'no interface'}, which other hosts cannot use: "
            f"write addresses of the cluster's own network into the hostfile, or name --iface"
        )
    return Interface(name, source, f"the interface of {facts.hostname} that routes to {target}")
