"""The doctor's checks: what is known of a cluster's hosts, and pure functions that turn it into findings.

A code, such as CPUFT-001, is never given to another check.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TypeVar

from cpuft.doctor.finding import Finding, warning
from cpuft.doctor.probe import GOVERNORS, RUN_FOLDER, UNFETCHED
from cpuft.errors import CpuftError, counted, install_command
from cpuft.hardware import bf16_hardware, name_missing_bf16
from cpuft.hosts import transport
from cpuft.hosts.hostfile import Host
from cpuft.hosts.topology import HostFacts, choose_interface
from cpuft.record import Link

V = TypeVar("V")
_MIB = 1 << 20
_MIN_MTU = 1280
"""Every IPv6 network carries packets of this size (RFC 8200). A smaller MTU is a mistake."""
_MAX_CLOCK_SKEW_SECONDS = 2.0
_MIN_MEMORY_PER_RANK = 2048 * _MIB
"""Memory of a rank with a small encoder, torch and its data. BERT-base needs about twice as much."""
_MIN_SHM = 24 * _MIB
"""Free bytes in /dev/shm for the ranks of one host.

Intel MPI 2021.18 takes 18.1 MB for two local ranks with messages of up to 134 MB, and less for three to eight ranks. If
it cannot get them, a rank dies of SIGBUS. oneCCL uses 24 MB per rank if it can, and works without."""
_MIN_OPEN_FILES, _OPEN_FILES_PER_RANK = 320, 6
"""Files that a rank must be allowed to open: the first number, and the second one for each rank of the run.

oneCCL's key server polls 300 file descriptors at once (client_count_increase in its source), and poll(2) takes no more
than the process may open. With all backends in use, a rank of two has 81 open files, and a rank of four has 91.
"""
_MIN_DISK = 1024 * _MIB
"""Free bytes in /var/tmp for the directory of a run: a trained encoder, logs and prepared examples."""
_MAX_STEAL = 0.05
"""Largest share of CPU time taken by other guests of the hypervisor."""


@dataclass(frozen=True)
class Health:
    """What `cpuft.doctor.probe` found on a host."""

    time: float
    """The host's clock, in seconds since 1970."""
    executable: str
    """Path of the Python interpreter that ran the probe, as that process knows it."""
    packages: dict[str, str]
    mpi: str
    """First line of `mpirun --version`. Empty if there is no mpirun; it begins with "broken" if mpirun failed."""
    kernels: str
    """Path of a C++ compiler or of precompiled kernels. Empty if the host has neither."""
    kernel_build: str
    """Which build of the kernels training uses, such as "from the wheel, for AVX2". Empty if the host has no cpuft."""
    own_address: str
    amx_usable: bool
    memory_available: int
    """Bytes of memory that can be used without swapping."""
    shm_free: int
    """Free bytes in /dev/shm, or -1 if it does not exist."""
    disk_free: int
    """Free bytes in /var/tmp, or -1 if it does not exist."""
    mtus: dict[str, int]
    governors: list[str]
    page_size: int
    """Bytes in a page of memory."""
    huge_pages: str
    """Content of /sys/kernel/mm/transparent_hugepage/enabled."""
    load: float
    """Number of busy cores."""
    memlock: int
    """Bytes that a process may lock, or -1 for no limit."""
    open_files: int
    """Files that a process may open (hard limit), or -1 for no limit."""
    leftovers: list[str]
    """Processes and directories that earlier runs left behind, as `find_leftovers` of the probe describes them."""
    steal: float
    """Share of CPU time taken by other guests of the hypervisor, from 0 to 1."""
    ssh: dict[str, str]
    """Error message of an ssh login to each peer, by the peer's name in the hostfile. Empty if the login worked."""
    listens: bool
    """Whether the probe could listen on the agreed port. Otherwise other hosts could not connect to it."""
    tried: list[str]
    """Addresses of the peers to which a TCP connection was tried: of a large cluster not all other hosts."""
    connected: list[str]
    """Addresses of the peers that were reached."""


@dataclass(frozen=True)
class HostState:
    """A line of the hostfile and what was found out about its host."""

    host: Host
    address: str = ""
    """Address of the host, or empty if its name cannot be resolved."""
    facts: HostFacts | None = None
    health: Health | None = None
    failure: str = ""
    """Why the host could not be examined. Empty if it could."""
    kind: str = ""
    """Kind of the ssh error (`HostError.kind`). Empty for other errors."""
    skew: float = 0.0
    """Seconds by which the host's clock is ahead of (or, if negative, behind) this machine's clock, at least."""
    ranks: int = 0
    """Number of ranks planned on the host, or without a plan its slots in the hostfile. 0 if neither is known."""

    @property
    def name(self) -> str:
        """Name of the host in messages, with its own hostname if that differs, as in "10.0.0.2 (node2)"."""
        if self.facts is None or self.facts.hostname == self.host.name:
            return self.host.name
        return f"{self.host.name} ({self.facts.hostname})"


@dataclass(frozen=True)
class ClusterState:
    """Everything that the checks look at."""

    hosts: tuple[HostState, ...]
    """A state for each line of the hostfile, in its order."""
    python: str = ""
    """Path where every host should have the Python of the training environment. Empty if any Python will do."""
    links: tuple[Link, ...] = ()
    """Measured links between the hosts. Empty unless `cpuft doctor --bandwidth` measured them."""

    @property
    def answering(self) -> tuple[tuple[HostState, HostFacts, Health], ...]:
        """The hosts that could be examined, in the order of the hostfile, with their facts and health."""
        return tuple((h, h.facts, h.health) for h in self.hosts if h.facts and h.health)


Find = Callable[[ClusterState], Iterator[Finding]]
FindOnHost = Callable[[HostState, HostFacts, Health], str]


@dataclass(frozen=True)
class Check:
    """A check. `next_step` applies to its findings that have none of their own."""

    code: str
    title: str
    cause: str
    next_step: str
    find: Find


CHECKS: list[Check] = []
"""All checks, in the order of their codes."""


def _check(code: str, title: str, cause: str, next_step: str = "") -> Callable[[Find], Find]:
    """Return a decorator that registers a function as a check, and returns it unchanged."""

    def register(find: Find) -> Find:
        CHECKS.append(Check(code, title, cause, next_step, find))
        return find

    return register


def _check_each(
    code: str, title: str, cause: str, next_step: str = "", severe: bool = False, fix: tuple[str, ...] = ()
) -> Callable[[FindOnHost], FindOnHost]:
    """Return a decorator as `_check` does, for a function that returns evidence, or "", of each host that answers."""

    def register(find: FindOnHost) -> FindOnHost:
        def find_on_all(state: ClusterState) -> Iterator[Finding]:
            for one, facts, health in state.answering:
                if evidence := find(one, facts, health):
                    yield Finding(one.name, evidence, severe=severe, fix=fix)

        _check(code, title, cause, next_step)(find_on_all)
        return find

    return register


def find_all(state: ClusterState) -> list[Finding]:
    """Run all checks; return the findings by code, with the cause of the check, and its next step if they have none."""
    return [
        replace(one, code=check.code, cause=check.cause, next_step=one.next_step or check.next_step)
        for check in CHECKS
        for one in check.find(state)
    ]


# Names, ssh and the network


@_check(
    "CPUFT-001",
    "A name in the hostfile has no address.",
    "The name is misspelt, or neither DNS nor /etc/hosts on this machine knows it.",
    "Correct the name in the hostfile, or write the address of the host there.",
)
def _check_names(state: ClusterState) -> Iterator[Finding]:
    for one in state.hosts:
        if not one.address:
            yield Finding(one.host.name, f"The name cannot be resolved to an address ({one.failure}).")


def _report_failed(state: ClusterState, *kinds: str) -> Iterator[Finding]:
    for one in state.hosts:
        if one.address and one.failure and one.kind in kinds:
            yield Finding(one.host.name, one.failure)


@_check(
    "CPUFT-002",
    "No ssh server answers on a host.",
    "The host is off, disconnected or overloaded, its sshd does not run, or a firewall drops packets to its ssh port.",
    "Start the host, or find out why it does not answer with: ssh -v HOST",
)
def _check_reachable(state: ClusterState) -> Iterator[Finding]:
    return _report_failed(state, "", transport.UNREACHABLE, transport.TIMED_OUT)


@_check(
    "CPUFT-003",
    "The ssh host key of a host is unknown or has changed.",
    "This machine has never connected to the host, or the host was installed again, or another machine answers at its "
    "address.",
    "Compare the key with the output of ssh-keygen -lf on the host. Then replace the line of a changed key in "
    "known_hosts; for an unknown key, run ssh HOST once and answer yes, or cpuft provision hosts with "
    "--accept-host-keys.",
)
def _check_host_keys(state: ClusterState) -> Iterator[Finding]:
    return _report_failed(state, transport.KEY_CHANGED, transport.KEY_UNKNOWN)


@_check(
    "CPUFT-004",
    "A host refuses the ssh login.",
    "Your public key is not in authorized_keys on the host, the user name is wrong, or a start-up file of the login "
    "shell, such as ~/.bashrc, prints text or ends the shell in every login.",
    "Run cpuft provision hosts, which installs the key, name the user in the hostfile with user=NAME, or let the "
    "start-up file do this only when the shell is interactive.",
)
def _check_login(state: ClusterState) -> Iterator[Finding]:
    return _report_failed(state, transport.LOGIN_REFUSED, transport.NO_COMMANDS)


@_check(
    "CPUFT-005",
    "A host cannot log in to another host by ssh, which mpirun needs to start ranks.",
    "mpirun starts ranks by ssh from the head host. That host has no key for the login, or the other host's sshd reads "
    "another file than ~/.ssh/authorized_keys, or other users can write to the home folder there.",
    "Run cpuft provision hosts, which sets up ssh from the head host to all others. If it has done so, look at "
    "AuthorizedKeysFile, AllowUsers and Match in /etc/ssh/sshd_config on the other host.",
)
def _check_ssh_between(state: ClusterState) -> Iterator[Finding]:
    unreachable = {one.host.name for one in state.hosts if one.failure}
    for one, _, health in state.answering:
        for peer, message in health.ssh.items():
            if message and peer not in unreachable:
                yield Finding(one.name, f"ssh from this host to {peer} fails ({message[:160]}).")


@_check(
    "CPUFT-006",
    "A host resolves its own name to a loopback address.",
    "The installers of Debian and Ubuntu write a line with 127.0.1.1 into /etc/hosts. Libraries that look up their own "
    "host name then listen where no other host can connect.",
    "Write the network address of the host before its name in its /etc/hosts.",
)
def _check_own_name(state: ClusterState) -> Iterator[Finding]:
    for one, facts, health in state.answering:
        if health.own_address.startswith("127.") and len(state.hosts) > 1:
            yield warning(one.name, f"The host resolves its own name {facts.hostname} to {health.own_address}.")


@_check(
    "CPUFT-007",
    "Hosts cannot connect to each other's TCP ports.",
    "A firewall or security group between the hosts blocks ports, or there is no route.",
    "Open all TCP ports between the hosts of the cluster, and only between them.",
)
def _check_ports(state: ClusterState) -> Iterator[Finding]:
    listening = {one.address: one for one, _, health in state.answering if health.listens}
    for one, _, health in state.answering:
        missed = [peer for peer in health.tried if peer in listening and peer not in health.connected]
        if missed and health.listens:
            yield Finding(
                one.name, f"TCP connections to {', '.join(listening[peer].name for peer in missed)} are not possible."
            )


@_check(
    "CPUFT-008",
    "The hosts communicate over public addresses.",
    "Gradients and the rendezvous are neither encrypted nor protected by a password.",
    "Write private addresses into the hostfile, and close all ports but ssh to the internet.",
)
def _check_public_addresses(state: ClusterState) -> Iterator[Finding]:
    for one in state.hosts:
        with suppress(ValueError):  # behind a bastion, it may be a name that only the other hosts can resolve
            if ip_address(one.address).is_global:
                yield warning(one.name, f"The address of the host, {one.address}, is a public address.")


@_check(
    "CPUFT-009",
    "The route to the other hosts uses loopback, a container bridge or a VPN.",
    "The addresses in the hostfile do not belong to the network that connects the hosts.",
    "Write addresses of the cluster's own network into the hostfile, or name the interface with --iface.",
)
def _check_interfaces(state: ClusterState) -> Iterator[Finding]:
    for one, facts, _ in state.answering if len(state.answering) > 1 else ():
        try:
            choose_interface(facts, next(iter(facts.routes), ""))
        except CpuftError as error:
            yield Finding(one.name, str(error).split(": ")[0])


@_check(
    "CPUFT-010",
    "The MTU differs between hosts or is too small.",
    "Jumbo frames are enabled on some hosts only: small messages arrive, and large ones hang.",
    "Set the same MTU on all hosts: ip link set dev NAME mtu NUMBER",
)
def _check_mtu(state: ClusterState) -> Iterator[Finding]:
    sizes = {one.name: _find_mtu(facts, health.mtus) for one, facts, health in state.answering}
    common = max(sizes.values(), key=list(sizes.values()).count, default=0)
    for name, size in sizes.items():
        if len(sizes) > 1 and size and (size != common or size < _MIN_MTU):
            yield Finding(name, f"The MTU of the interface to the other hosts is {size}; most hosts have {common}.")


def _find_mtu(facts: HostFacts, mtus: dict[str, int]) -> int:
    source = next(iter(facts.routes.values()), "")
    name = next((name for name, address in facts.interfaces.items() if address == source), "")
    return mtus.get(name, 0)


@_check(
    "CPUFT-033",
    "A link carries less than half of what most links carry.",
    "The host is an instance of another size or in another placement group, or a cable or switch port is faulty. In "
    "every step, all ranks wait for the slowest link.",
    "Use another host instead, or remove one of the two from the hostfile.",
)
def _check_links(state: ClusterState) -> Iterator[Finding]:
    rates = [link.bits_per_second for link in state.links if not link.error]
    median = statistics.median(rates) if rates else 0.0
    names = {one.host.name: one.name for one in state.hosts}
    for link in state.links:
        if not link.error and link.bits_per_second < median / 2:
            yield warning(
                names[link.source],
                f"The link to {link.target} carries {link.bits_per_second / 1e9:.2f} Gbit/s; "
                f"the median of all links is {median / 1e9:.2f} Gbit/s.",
            )


# Consistency: the slowest host, and the one that differs, decide for all


def _find_different(state: ClusterState, value: Callable[[HostFacts, Health], V]) -> Iterator[tuple[HostState, V, V]]:
    """Yield each host whose value is not the most common one, with both; of equally common ones, the first counts."""
    values = [value(facts, health) for _, facts, health in state.answering]
    if not values:
        return
    common = max(values, key=values.count)
    for (one, _, _), own in zip(state.answering, values):
        if own != common:
            yield one, own, common


@_check(
    "CPUFT-011",
    "Two lines of the hostfile are the same host.",
    "Two names or addresses lead to one machine. Its ranks would share cores that the plan counts twice.",
    "Keep one line in the hostfile, and write slots=N there for several ranks.",
)
def _check_same_host(state: ClusterState) -> Iterator[Finding]:
    seen: dict[tuple[object, ...], HostState] = {}
    for one, facts, _ in state.answering:
        identity = (facts.boot_id, facts.hostname, tuple(sorted(facts.interfaces.items())))
        if identity in seen:
            yield Finding(one.name, f"This is the same host as {seen[identity].name}.")
        seen.setdefault(identity, one)


@_check_each(
    "CPUFT-012",
    "The clock of a host is wrong.",
    "No time service runs on the host. Logs cannot be compared, and certificates and time limits fail.",
    "Start a time service: timedatectl set-ntp true",
)
def _check_clocks(one: HostState, facts: HostFacts, health: Health) -> str:
    direction = "ahead of" if one.skew > 0 else "behind"
    told = f"The clock of the host is {abs(one.skew):.0f} s {direction} this machine's clock."
    return told if abs(one.skew) > _MAX_CLOCK_SKEW_SECONDS else ""


@_check(
    "CPUFT-013",
    "The Python of the training environment is missing, too old or of another version than on most hosts.",
    "The training environment is not at the same path on every host, or has an old Python, or was made on each host by "
    "itself.",
    "Run cpuft provision hosts, which installs the environment. cpuft needs Python 3.10 or newer.",
)
def _check_python(state: ClusterState) -> Iterator[Finding]:
    for one, facts, health in state.answering:
        version = tuple(int(part) for part in facts.python.split(".")[:2])
        is_missing = bool(state.python) and health.executable != state.python
        if is_missing or version < (3, 10):
            instead = f" instead of {state.python}" if is_missing else ""
            yield Finding(one.name, f"Python on the host is {health.executable} {facts.python}{instead}.")
    for one, own, common in _find_different(state, lambda facts, _: facts.python.rsplit(".", 1)[0]):
        yield Finding(one.name, f"The host has Python {own}; most hosts have {common}.")


@_check(
    "CPUFT-014",
    "Package versions differ between hosts.",
    "The hosts were updated independently. Ranks with different versions may compute or communicate differently.",
    "Install the same versions on all hosts: cpuft provision hosts",
)
def _check_packages(state: ClusterState) -> Iterator[Finding]:
    for one, own, common in _find_different(state, lambda _, health: health.packages):
        names = sorted(name for name in {*own, *common} if own.get(name) != common.get(name))
        versions = [f"{name} {own.get(name, 'missing')} (most hosts: {common.get(name, 'missing')})" for name in names]
        yield Finding(one.name, f"The host has {', '.join(versions)}.")


@_check(
    "CPUFT-015",
    "mpirun is missing, does not work or is another one than on most hosts.",
    "There is no MPI beside the Python of the training environment, and none in PATH, or the hosts have different "
    "ones, which cannot communicate with each other.",
    "Install the MPI that cpuft comes with: on other hosts by cpuft provision hosts, here by "
    f"{install_command('train', 'mpi', 'demo')}",
)
def _check_mpi(state: ClusterState) -> Iterator[Finding]:
    for one, _, health in state.answering:
        if not health.mpi or health.mpi.startswith("broken"):
            yield Finding(one.name, f"mpirun is {health.mpi or 'missing'}.")
    for one, own, common in _find_different(state, lambda _, health: health.mpi):
        if own and not own.startswith("broken") and common:
            yield Finding(one.name, f"mpirun on the host is {own!r}; most hosts have {common!r}.")


@_check(
    "CPUFT-016",
    "A host has another CPU than most hosts, or a hypervisor hides other flags of it.",
    "In every step, synchronous training waits for the slowest rank. Unless all hosts have bf16 in hardware, all ranks "
    "train in fp32.",
    "Use hosts of one kind, or remove this host from the hostfile.",
)
def _check_cpu(state: ClusterState) -> Iterator[Finding]:
    for one, own, common in _find_different(state, _describe_cpu):
        yield warning(one.name, f"The host has {own}; most hosts have {common}.")


def _describe_cpu(facts: HostFacts, health: Health) -> str:
    bf16 = "with" if bf16_hardware(facts.cpu_flags) else "without"
    return f"{facts.cpu_model} with {counted(len(facts.seen_cores), 'core')}, {bf16} bf16"


# Capacity: what a run needs on a host, and what slows it down


@_check(
    "CPUFT-019",
    "No host supports bf16 in hardware.",
    "Intel CPUs have bf16 since Cooper Lake and AMX since Sapphire Rapids. Compared with CPUs without bf16, training "
    "was 1.1 to 2 times as fast with AVX512_BF16, and 2.6 to 5 times as fast with AMX. Arm's Neoverse CPUs have bf16 "
    "since V1 and N2; no speed was measured there.",
    "Use newer hosts (on AWS: m7i, c7i, m8g, c8g or later), or continue in fp32.",
)
def _check_bf16(state: ClusterState) -> Iterator[Finding]:
    flags = [bf16_hardware(facts.cpu_flags) for _, facts, _ in state.answering]
    if flags and not any(flags):
        one, facts, _ = state.answering[0]
        yield warning(one.name, f"The CPU, {facts.cpu_model}, has {name_missing_bf16(facts.cpu_flags)}.")


@_check_each(
    "CPUFT-020",
    "The CPU has AMX, but the kernel does not let a process use it.",
    "AMX needs Linux 5.16 or newer. Some hypervisors and sandboxes refuse it as well.",
    "Use a newer kernel, or another type of instance.",
)
def _check_amx(one: HostState, facts: HostFacts, health: Health) -> str:
    is_refused = "amx_tile" in facts.cpu_flags and not health.amx_usable
    return f"The CPU has AMX, but kernel {facts.kernel} refuses permission to use it." if is_refused else ""


@_check_each(
    "CPUFT-021",
    "A host has too little memory for the planned ranks.",
    "When memory runs out, the kernel kills a rank, and the other ranks would wait for it.",
    "End other programs on the host, lower --ppn, or add memory.",
    severe=True,
)
def _check_memory(one: HostState, facts: HostFacts, health: Health) -> str:
    free, ranks = health.memory_available, max(1, one.ranks)
    told = f"{free // _MIB} MB of memory are free for {counted(ranks, 'rank')}; each rank needs at least 2048 MB."
    return told if free < ranks * _MIN_MEMORY_PER_RANK else ""


@_check_each(
    "CPUFT-022",
    "/dev/shm is too small.",
    "A container has a small /dev/shm unless docker run got --shm-size, or files of earlier runs fill it.",
    "Enlarge it: mount -o remount,size=1g /dev/shm",
    severe=True,
)
def _check_shared_memory(one: HostState, facts: HostFacts, health: Health) -> str:
    told = f"{max(0, health.shm_free) // _MIB} MB are free in /dev/shm; the ranks of one host need 24 MB."
    return told if health.shm_free < _MIN_SHM and one.ranks != 1 else ""


@_check(
    "CPUFT-034",
    "The limit of open files is too low.",
    "Every rank has connections to all others. Some libraries wait forever when they cannot open one.",
    "Raise the limit for this shell with ulimit -n, or permanently with nofile in /etc/security/limits.conf.",
)
def _check_open_files(state: ClusterState) -> Iterator[Finding]:
    ranks = sum(one.ranks or len(facts.cores) for one, facts, _ in state.answering)
    need = _MIN_OPEN_FILES + _OPEN_FILES_PER_RANK * ranks
    for one, _, health in state.answering:
        if ranks > 1 and 0 <= health.open_files < need:
            told = f"A process may open {health.open_files} files; with {ranks} ranks, each rank needs {need}."
            yield Finding(one.name, told)


@_check_each(
    "CPUFT-023",
    "The disk is full.",
    "Data, models and records of a run are stored in /var/tmp while it runs.",
    "Free space in /var/tmp; this lists the largest directories: du -xh /var/tmp | sort -h | tail",
    severe=True,
)
def _check_disk(one: HostState, facts: HostFacts, health: Health) -> str:
    told = f"{max(0, health.disk_free) // _MIB} MB are free in /var/tmp; a run needs 1024 MB."
    return told if health.disk_free < _MIN_DISK else ""


@_check_each(
    "CPUFT-024",
    "A host has more ranks than cores.",
    "Ranks that share a core wait for each other, so that a run becomes several times slower, not only half as fast.",
    "Lower slots=N in the hostfile, or --ppn.",
)
def _check_slots(one: HostState, facts: HostFacts, health: Health) -> str:
    cores = len(facts.cores)
    return f"{one.ranks} ranks are planned on {counted(cores, 'core')}." if one.ranks > cores else ""


@_check_each(
    "CPUFT-038",
    "A rank has cores on several NUMA nodes.",
    "Its threads read much of their memory over the slower link between the nodes.",
    "Start one rank for each NUMA node: leave out --np, or raise it, --ppn, slots=N in a hostfile or --ranks-per-host.",
)
def _check_numa_nodes(one: HostState, facts: HostFacts, health: Health) -> str:
    told = f"Planned on {facts.numa_nodes} NUMA nodes: {counted(one.ranks, 'rank')}."
    return told if one.ranks % facts.numa_nodes else ""


@_check_each(
    "CPUFT-025",
    "A control group allows less CPU time than the visible cores have.",
    "A container or cpuft provision local limits the CPU time. Ranks use only as many cores as the limit allows.",
    "Raise the limit (docker run --cpus), or expect less speed.",
)
def _check_quota(one: HostState, facts: HostFacts, health: Health) -> str:
    told = f"CPU time of {facts.cpu_quota:g} cores is allowed; {len(facts.seen_cores)} cores are visible."
    return told if 0 < facts.cpu_quota < len(facts.seen_cores) else ""


@_check(
    "CPUFT-026",
    "Other programs use the CPU of a host.",
    "Another job is running, or an earlier run left ranks behind. Both then run at far less than half their speed.",
    "Look at the processes with top, and end them or wait for them.",
)
def _check_load(state: ClusterState) -> Iterator[Finding]:
    machines = Counter(facts.boot_id for _, facts, _ in state.answering)
    for one, facts, health in state.answering:
        # Hosts that are simulated on one machine see the load of all of it, with these probes of the others.
        if machines[facts.boot_id] == 1 and health.load > max(1.0, 0.75 * len(facts.seen_cores)):
            yield warning(
                one.name, f"{health.load:.1f} of {len(facts.seen_cores)} cores are busy before the run starts."
            )


@_check_each(
    "CPUFT-027",
    "The hypervisor gives CPU time of the host to other guests.",
    "The hypervisor is overcommitted, or a burstable instance has used up its CPU credits.",
    "Use instances with dedicated cores.",
)
def _check_steal(one: HostState, facts: HostFacts, health: Health) -> str:
    told = f"{health.steal:.0%} of the CPU time is stolen by the hypervisor."
    return told if health.steal > _MAX_STEAL else ""


@_check_each(
    "CPUFT-028",
    "The frequency governor saves energy.",
    "Cores lower their clock while they wait for the network, and raise it late.",
    "Set the frequency governor to performance.",
    fix=("sh", "-c", f"for f in {GOVERNORS}; do echo performance >$f; done"),
)
def _check_governor(one: HostState, facts: HostFacts, health: Health) -> str:
    slow = [name for name in health.governors if name not in ("performance", "schedutil")]
    return f"The frequency governor is {', '.join(slow)}." if slow else ""


@_check_each(
    "CPUFT-029",
    "Transparent huge pages are off.",
    "Without huge pages, large tensors cost many page faults and TLB misses.",
    "Enable them: echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
    fix=("sh", "-c", "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled"),
)
def _check_huge_pages(one: HostState, facts: HostFacts, health: Health) -> str:
    setting = health.huge_pages
    return f"The setting for transparent huge pages is: {setting}" if "[never]" in setting else ""


@_check_each(
    "CPUFT-031",
    "A host has a fast fabric, but processes may not lock enough memory for it.",
    "The libfabric providers verbs, psm3 and efa register buffers, which locks them in memory.",
    "Write '* - memlock unlimited' into /etc/security/limits.conf.",
)
def _check_memlock(one: HostState, facts: HostFacts, health: Health) -> str:
    fast = [name for name in facts.interfaces if name.startswith(("ib", "hsn", "efa"))]
    told = f"A process may lock {health.memlock >> 10} kB, and the host has a fast fabric ({', '.join(fast)})."
    return told if fast and 0 <= health.memlock < 64 * _MIB else ""


@_check(
    "CPUFT-032",
    "Ranks or files of earlier runs are left on a host.",
    "A launch was killed, or lost its connection to the host.",
)
def _check_leftovers(state: ClusterState) -> Iterator[Finding]:
    for one, _, health in state.answering:
        if health.leftovers:
            pids = [match[1] for text in health.leftovers if (match := re.match(r"pid (\d+): ", text))]
            # The paths become part of a command, and anyone may make folders in /var/tmp: take the exact pattern only.
            paths = [text for text in health.leftovers if re.fullmatch(f"/var/tmp{RUN_FOLDER}", text)]
            kill = f"for pid in {' '.join(pids)}; do ! grep -qs cpuft /proc/$pid/cmdline || kill -KILL $pid; done"
            remove = f"rm -rf --one-file-system {' '.join(paths)}"
            script = "; ".join([kill] * bool(pids) + [remove] * bool(paths))
            keep = (
                "Continue runs with checkpoints or results by cpuft launch --resume, or remove their folders by hand."
            )
            has_unfetched = any(text.endswith(UNFETCHED) for text in health.leftovers)
            steps = [keep] * has_unfetched + [f"Run on that host: {script}"] * bool(script)
            yield Finding(
                one.name,
                f"{counted(len(health.leftovers), 'leftover')} of earlier runs, the first is: {health.leftovers[0]}",
                next_step=" ".join(steps),
                severe=bool(pids),
                fix=("sh", "-c", script) if script else (),
            )


@_check_each(
    "CPUFT-037",
    "A host has neither compiled kernels nor a C++ compiler to build them.",
    "All hosts then train in plain PyTorch, because all ranks must round alike: more slowly, on x86-64 2 to 3 times.",
    "Install cpuft from its wheel, or a compiler (Debian: apt-get install g++), or provision the host again from a "
    "machine that has either.",
)
def _check_kernels(one: HostState, facts: HostFacts, health: Health) -> str:
    return "" if health.kernels else "There is neither a C++ compiler (g++ or c++) nor a wheel with compiled kernels."


@_check(
    "CPUFT-039",
    "A host has a CPU of another architecture than most hosts.",
    "Some hosts are x86-64 and some are Arm. Their MPI libraries and their kernels do not work together.",
    "Make a hostfile or a cluster for each architecture.",
)
def _check_architecture(state: ClusterState) -> Iterator[Finding]:
    for one, own, common in _find_different(state, lambda facts, _: facts.machine):
        yield Finding(one.name, f"The host is {own}; most hosts are {common}.")


@_check_each(
    "CPUFT-040",
    "The kernel of a host has memory pages of another size than 4 KB.",
    "Some kernels for Arm have pages of 64 KB. Huge pages are then of 512 MB, so that memory for large tensors is "
    "wasted, and wheels whose allocator expects 4 KB end with an error. cpuft was not tried there.",
    "Install a kernel with pages of 4 KB (RHEL: kernel instead of kernel-64k).",
)
def _check_page_size(one: HostState, facts: HostFacts, health: Health) -> str:
    return f"A page of memory has {health.page_size // 1024} KB." if health.page_size != 4096 else ""


def find_kernel_builds(state: ClusterState) -> dict[str, str]:
    """Return the kernels' build ("from the wheel, for AVX2") by `HostState.name`, without hosts where it is unknown."""
    return {one.name: health.kernel_build for one, _, health in state.answering if health.kernel_build}


def format_kernel_builds(builds: dict[str, str]) -> str:
    """Return a line "kernels: from the wheel, for AVX2 (node1, node2)", with a newline, for each build; "" for none."""
    hosts_of: dict[str, list[str]] = {}
    for host, build in builds.items():
        hosts_of.setdefault(build, []).append(host)
    return "".join(f"kernels: {build} ({', '.join(hosts)})\n" for build, hosts in hosts_of.items())


CHECKS.sort(key=lambda check: check.code)
