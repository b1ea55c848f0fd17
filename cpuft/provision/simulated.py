"""Simulated clusters, whose hosts are network namespaces of this machine that simulated_node.sh starts and removes."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import cpuft
from cpuft import execute
from cpuft.errors import CpuftError, refuse_other_systems
from cpuft.files import cache_path, hash_text, read_raw
from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, check_name, format_entry
from cpuft.hosts.ssh_config import (
    Member,
    format_hosts,
    format_inside,
    format_known_hosts,
    format_ssh_config,
    format_sshd_config,
)
from cpuft.hosts.topology import parse_lscpu
from cpuft.network_speed import parse_bit_rate
from cpuft.plans import Plan, Setting, Step
from cpuft.provision.base import Provider
from cpuft.provision.cluster_files import plan_files, plan_key, plan_removal, read_files
from cpuft.provision.image import check_image, read_stamp
from cpuft.provision.options import LocalConfig

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "sshd": "openssh-server"}
"""The Debian package of each program."""
SCRIPT = str(Path(__file__).with_name("simulated_node.sh"))
FAULTS = {"kill": "crash", "pause": "pause", "resume": "resume", "cut": "cut", "join": "join"}
"""Action of simulated_node.sh for each fault of `cpuft provision local FAULT NODE`."""
_MAX_LINK_NAME = 15
"""Characters in the name of a network interface: IFNAMSIZ of linux/if.h without the closing 0."""
_BOOT_SECONDS = 10.0


@dataclass(frozen=True)
class NodeFacts:
    """The present state of one simulated host."""

    running: bool = False
    """Whether its first process and its network link exist."""
    answers: bool = False
    """Whether its sshd answers, or cannot answer because the host is paused or disconnected."""
    paused: bool = False
    cut: bool = False
    """Whether its network link is down."""
    booted: str = ""
    """Hash of the settings with which it was started."""
    processes: int = 0
    """0 also if the host has no control group."""


@dataclass(frozen=True)
class MachineFacts:
    """What planning a simulated cluster needs to know of this machine."""

    groups: tuple[str, ...]
    """Directories of the control group controllers that limit and freeze a host."""
    network: str
    """Network of the cluster's bridge if that has an address, else the first private network that nothing here uses."""
    bridge: bool
    nodes: dict[int, NodeFacts]
    """By the numbers of the hosts, from 1."""
    files: dict[str, str]
    """Texts by path, as `read_files` returns them."""
    entry: Entry
    """The record that the cluster should have."""
    image: str = ""
    """`contents` of the image's stamp; empty without an image."""
    cpus: tuple[int, ...] = (0,)
    """Hardware threads that the hosts share; those of one core are neighbours."""
    cores: tuple[int, ...] = ()
    """The first hardware thread of each core."""

    @property
    def directory(self) -> str:
        """Directory of the cluster's files; only the hostfile is elsewhere."""
        return str(Path(self.entry.ssh_config).parent)

    @property
    def there(self) -> str:
        """Folder of the cluster's files on the hosts' own disks; empty if they have no disks or no environment."""
        return self.entry.ssh_config_there.rpartition("/")[0]


def _find_nodes(directory: Path, bridge: str, links: set[str], groups: tuple[str, ...]) -> list[int]:
    """Return the numbers of all hosts of which a file, a network link or a control group is left, sorted."""
    names = [path.parent.name for path in directory.glob("nodes/*/booted")]
    names += [link.removeprefix(f"{bridge}-") for link in links if link.startswith(f"{bridge}-")]
    names += [path.name for group in groups for path in Path(group, bridge).glob("*") if path.is_dir()]
    return sorted({int(name) for name in names if name.isdecimal()})


def _run_ip(*argv: str) -> str:
    answer = execute.run_command((execute.find_program("ip") or "ip", "-json", "-4", *argv), seconds=10)
    if answer.exit_code:
        raise CpuftError(f"ip {' '.join(argv)} failed ({answer.text.strip()[:200]}): check that iproute2 works here")
    return answer.output or "[]"


def parse_networks(text: str) -> dict[str, str]:
    """Return the first IPv4 network of each interface with one, {"eth0": "10.0.0.0/24"}, from `ip -json -4 address`."""
    return {
        str(link["ifname"]): str(IPv4Network((info["local"], info["prefixlen"]), strict=False))
        for link in json.loads(text)
        for info in link.get("addr_info", [])[:1]
    }


def parse_routes(text: str) -> list[str]:
    """Return the targets but "default" in the output of `ip -json -4 route`, such as "10.0.0.0/24" and "10.0.0.7"."""
    targets = (str(route["dst"]) for route in json.loads(text))
    return [target for target in targets if target[0].isdecimal()]


def choose_network(used: list[str]) -> str:
    """Return the first of 10.77.0.0/24 to 10.254.0.0/24 that overlaps no network of `used`; CpuftError without one."""
    networks = [IPv4Network(network, strict=False) for network in used]
    for number in range(77, 255):
        candidate = IPv4Network(f"10.{number}.0.0/24")
        if not any(candidate.overlaps(network) for network in networks):
            return str(candidate)
    raise CpuftError("all networks from 10.77.0.0 to 10.254.0.0 are in use: remove clusters with cpuft provision down")


def find_groups(root: str = "/sys/fs/cgroup") -> tuple[str, ...]:
    """Return the control group directories in which hosts can be limited and frozen; () if there are none.

    That is (`root`,) for cgroup v2 with the cpu controller, else those of `root`/cpu and `root`/freezer (v1) that are
    writable.
    """
    if "cpu" in _read(Path(root, "cgroup.controllers")).split():
        return (root,)
    found = (path for path in (f"{root}/cpu", f"{root}/freezer") if os.path.isdir(path))
    return tuple(path for path in found if os.access(path, os.W_OK) and os.path.exists(f"{path}/cgroup.procs"))


def _gather_node(
    path: Path, name: str, network: str, links: dict[str, dict[str, Any]], groups: tuple[str, ...]
) -> NodeFacts:
    index = int(path.name)
    link = f"cpuft-{name}-{index}"
    own = [f"{group}/cpuft-{name}/{index}" for group in groups]
    running = _is_first_process(_read(path / "pid"))
    paused = running and any(_read(Path(group) / "cgroup.freeze") == "1" for group in own)
    paused |= running and any(_read(Path(group) / "freezer.state").startswith("FR") for group in own)
    cut = link in links and "UP" not in links[link]["flags"]
    address = str(IPv4Network(network)[index])
    return NodeFacts(
        running=running and link in links,
        answers=running and link in links and (paused or cut or _wait_for_ssh(address, _BOOT_SECONDS)),
        paused=paused,
        cut=cut,
        booted=_read(path / "booted"),
        processes=max((len(_read(Path(group) / "cgroup.procs").split()) for group in own), default=0),
    )


def _read(path: Path) -> str:
    return read_raw(path).strip()


def _is_first_process(pid: str) -> bool:
    """Return whether the process is the first of a simulated host: numbers are reused after a reboot."""
    argv = _read(Path("/proc") / (pid or "none") / "cmdline").split("\0")
    return argv[0] == "unshare" and "boot" in argv


def _wait_for_ssh(address: str, seconds: float) -> bool:
    """Return whether an ssh server answers on port 22 of `address` within `seconds`; at least one attempt is made."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError), socket.create_connection((address, 22), timeout=1.0) as connection:
            if connection.recv(4) == b"SSH-":
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def check_config(config: LocalConfig) -> None:
    """Raise CpuftError if --name is not valid, or too long for the interface cpuft-NAME-NODES (15 characters), --net is
    no rate, --shm no size such as 256m, or if the path of --image, which need not exist, has a space, comma, colon or
    backslash.
    """
    link = f"cpuft-{check_name(config.name)}-{config.nodes}"
    if len(link) > _MAX_LINK_NAME:
        most = len(config.name) - len(link) + _MAX_LINK_NAME
        raise CpuftError(f"--name {config.name!r} is too long for {config.nodes} hosts: use at most {most} characters")
    parse_bit_rate(config.net)
    if re.search(r"[\s,:\\]", str(Path(config.image).absolute())):
        raise CpuftError(f"--image {config.image}: overlay mounts allow no comma, colon, backslash or space: move it")
    if not re.fullmatch(r"[1-9][0-9]{0,8}[kmg]?", config.shm):
        raise CpuftError(f"--shm {config.shm[:60]!r} is no size: write e.g. 256m or 1g")


def _plan_members(config: LocalConfig, network: str) -> tuple[Member, ...]:
    """Return the hosts, the head host first, without their keys. Host N is `NAME-N` at the Nth address of `network`."""
    addresses = IPv4Network(network)
    return tuple(Member(f"{config.name}-{index}", str(addresses[index])) for index in range(1, config.nodes + 1))


def plan_cluster(config: LocalConfig, facts: MachineFacts) -> Plan:
    """Plan what is missing of the cluster, and the removal of hosts beyond --nodes. While keys are missing, no host is
    planned, and of the files only the registry entry and the keys.

    Raises CpuftError: --cores-per-node is given, and no control group can be written.
    """
    if config.cores_per_node and not facts.groups:
        raise CpuftError("control groups cannot be written here, so CPU time cannot be limited: omit --cores-per-node")
    keys = _plan_keys(config, facts)
    # The registry entry comes before everything else, so that `down` finds what a killed run left behind.
    texts = _format_own_entry(facts) if keys else plan_texts(config, facts)
    stages = [plan_files(texts, facts.files, "write the cluster's ssh files and hostfile"), keys]
    extra, why = (index for index in facts.nodes if index > config.nodes), "remove hosts beyond --nodes"
    downs = [_plan_node_step(config, facts, index, "down", why) for index in extra]
    stages += [_plan_bridge(config, facts), downs, [] if keys else _plan_nodes(config, facts)]
    return Plan(tuple(tuple(stage) for stage in stages if stage))


def _plan_keys(config: LocalConfig, facts: MachineFacts) -> list[Step]:
    base, why = facts.directory, "generate the host keys of the cluster"
    wanted = {f"{base}/nodes/{index}/host_key": why for index in range(1, config.nodes + 1)}
    wanted = {f"{base}/id_ed25519": "generate the cluster's own login key"} | wanted
    return [
        plan_key(path, why)
        for path, why in wanted.items()
        if not (facts.files.get(path) and facts.files.get(f"{path}.pub"))
    ]


def plan_texts(config: LocalConfig, facts: MachineFacts) -> dict[str, str]:
    """Return the texts of all files of the cluster except keys, by path; KeyError if `facts.files` lacks a key."""
    base = facts.directory
    members = tuple(
        replace(member, key=facts.files[f"{base}/nodes/{index}/host_key.pub"])
        for index, member in enumerate(_plan_members(config, facts.network), start=1)
    )
    hosts = tuple(Host(member.address) for member in members)
    head = f"# Cluster {config.name}, made by cpuft provision; cpuft provision down {config.name} removes it.\n"
    texts = _format_own_entry(facts) | {
        f"{base}/authorized_keys": facts.files[f"{base}/id_ed25519.pub"],
        f"{base}/hosts": format_hosts(members),
        f"{base}/known_hosts": format_known_hosts(members),
        f"{base}/ssh_config": format_ssh_config(members, f"{base}/id_ed25519", f"{base}/known_hosts"),
        facts.entry.hostfile: head + format_hostfile(hosts),
    }
    if facts.there:
        inside = format_inside(members, facts.there, facts.entry.python)
        texts |= {f"{base}/there/{name}": text for name, text in inside.items()}
    for index, one in enumerate(members, start=1):
        texts[f"{base}/nodes/{index}/sshd_config"] = format_sshd_config(one.address, "/run/cpuft", bool(config.image))
    return texts


def _format_own_entry(facts: MachineFacts) -> dict[str, str]:
    return {f"{facts.directory}/{FILE_NAME}": format_entry(facts.entry)}


def _plan_bridge(config: LocalConfig, facts: MachineFacts) -> list[Step]:
    if facts.bridge:
        return []
    bridge, gateway = f"cpuft-{config.name}", f"{IPv4Network(facts.network)[254]}/24"
    commands = f"link add {bridge} type bridge\naddress add {gateway} dev {bridge}\nlink set {bridge} up\n"
    steps = [Step(f"connect the hosts by a bridge at {gateway}", ("ip", "-batch", "-"), stdin=commands)]
    for group in facts.groups:
        # In cgroup v2, each level must enable a controller for the level below.
        script = (
            'mkdir -p "$1/$2"; [ ! -e "$1/cgroup.subtree_control" ] || '
            'for d in "$1" "$1/$2"; do echo +cpu >"$d/cgroup.subtree_control"; done'
        )
        steps.append(Step("make a control group", ("sh", "-c", script, "group", group, bridge)))
    return steps


def _plan_nodes(config: LocalConfig, facts: MachineFacts) -> list[Step]:
    steps = []
    for index in range(1, config.nodes + 1):
        node = facts.nodes.get(index, NodeFacts())
        action, why = _choose_action(node, _hash_boot_settings(config, facts, index))
        if action:
            steps.append(_plan_node_step(config, facts, index, action, why))
    return steps


def _choose_action(node: NodeFacts, boot_hash: str) -> tuple[str, str]:
    """Return the action of simulated_node.sh that repairs a host, and its reason; both empty if the host is right."""
    if node.paused:
        return "resume", "resume paused hosts"
    if node.running and node.cut:
        return "join", "connect hosts that were disconnected from the network"
    if not node.running or not node.answers or node.booted != boot_hash:
        return "up", "start hosts: namespaces, address, control group, link rate, sshd"
    return "", ""


def _format_quota(config: LocalConfig) -> str:
    """Return the CPU time limit of a host in the form of cpu.max; empty for no limit."""
    # A host that has used its quota waits until the period ends, and the others wait for it. The default of 100 ms is
    # longer than a training step, a cost that real hosts do not have.
    period = 10_000 if config.cores_per_node >= 0.1 else 100_000
    return f"{int(config.cores_per_node * period)} {period}" if config.cores_per_node else ""


def plan_cpus(config: LocalConfig, facts: MachineFacts, index: int) -> tuple[int, ...]:
    """Return the hardware threads of host `index` (from 1), ascending: --cores-per-node or an equal share, rounded up.

    With --cores-per-node, each of these threads has a core of its own if there are enough.
    """
    size = max(1, math.ceil(config.cores_per_node or len(facts.cpus) / config.nodes))
    # Hosts that share a core slow each other down by far more than half: waiting OpenMP threads and MPI spin.
    cpus = facts.cores if config.cores_per_node and config.nodes * size <= len(facts.cores) else facts.cpus
    first = (index - 1) * len(cpus) // config.nodes
    return tuple(sorted({cpus[(first + at) % len(cpus)] for at in range(size)}))


def _hash_boot_settings(config: LocalConfig, facts: MachineFacts, index: int) -> str:
    """Return a hash of everything that a host reads only when it starts."""
    texts = plan_texts(config, facts)
    base = facts.directory
    parts = [texts[f"{base}/hosts"], texts[f"{base}/nodes/{index}/sshd_config"], texts[f"{base}/authorized_keys"]]
    parts += [str(plan_cpus(config, facts, index)), _format_quota(config), config.net]
    parts += [facts.network, config.shm, config.image, facts.image, facts.files[f"{base}/nodes/{index}/host_key.pub"]]
    parts += [text for path, text in texts.items() if path.startswith(f"{base}/there/")]
    return hash_text("\0".join(parts), 16)


def _plan_node_step(config: LocalConfig, facts: MachineFacts, index: int, action: str, why: str) -> Step:
    """Return the step on this machine that runs an action of simulated_node.sh for one host.
    The first of its settings must be the host's name: `Provider.drift` shows it.
    """
    groups = " ".join(f"{group}/cpuft-{config.name}/{index}" for group in facts.groups)
    booted = _hash_boot_settings(config, facts, index) if action == "up" else ""
    address = IPv4Network(facts.network)[index]
    mac = bytes([2, 0, *address.packed]).hex(":")  # locally administered
    values = {
        "NODE": (f"{config.name}-{index}", "hostname"),
        "NODE_DIR": (f"{facts.directory}/nodes/{index}", "directory of the host's own files"),
        "NODE_HOSTS": (f"{facts.directory}/hosts", "its /etc/hosts"),
        "NODE_KEYS": (f"{facts.directory}/authorized_keys", "public keys that may log in"),
        "NODE_ADDRESS": (f"{address}/24", "its address"),
        "NODE_MAC": (mac, "MAC address of its network interface"),
        "NODE_LINK": (f"cpuft-{config.name}-{index}", "this machine's end of its network link"),
        "NODE_BRIDGE": (f"cpuft-{config.name}", "bridge to which the link is connected"),
        "NODE_CGROUPS": (groups, "control groups that limit its CPU time and pause it"),
        "NODE_CPUS": (",".join(map(str, plan_cpus(config, facts, index))), "hardware threads that it runs on"),
        "NODE_QUOTA": (_format_quota(config), "CPU time in µs, and the period; empty for no limit"),
        "NODE_RATE": (config.net, "rate of its network link; empty for no limit"),
        "NODE_SHM": (config.shm, "size of its /dev/shm"),
        "NODE_IMAGE": (config.image, "its root filesystem; empty for this machine's own"),
        "NODE_CONTENTS": (facts.image, "the image's build; a disk that was written over another one is discarded"),
        "NODE_CLUSTER": (facts.directory, "directory of the cluster's files"),
        "NODE_THERE": (facts.there, "where the host keeps the cluster's files, to launch runs; empty for nowhere"),
        "NODE_BOOTED": (booted, "hash of all settings that it reads only at its start"),
    }
    settings = tuple(Setting(name, value, reason) for name, (value, reason) in values.items())
    return Step(why, ("sh", SCRIPT, action), settings)


def plan_fault(config: LocalConfig, facts: MachineFacts, fault: str, node: str) -> Plan:
    """Plan "kill", "pause", "resume", "cut" or "join" for the host with number (from 1), name or address `node`.

    Raises CpuftError: there is no such host, or it does not run.
    """
    members = _plan_members(config, facts.network)
    for index, member in enumerate(members, start=1):
        if node in (str(index), member.name, member.address):
            if not facts.nodes.get(index, NodeFacts()).running:
                repair = f"cpuft provision local --name {config.name}"
                raise CpuftError(f"{member.name} does not run: {repair} with the options of the cluster starts it")
            step = _plan_node_step(config, facts, index, FAULTS[fault], f"{fault} {member.name}")
            return Plan(((step,),))
    raise CpuftError(f"cluster {config.name} has no host {node!r}: choose one of {', '.join(m.name for m in members)}")


def plan_cluster_down(config: LocalConfig, facts: MachineFacts) -> Plan:
    """Plan the removal of all that the cluster has here; an empty plan if nothing is left."""
    downs = [
        _plan_node_step(config, facts, index, "down", "end the hosts' processes, links and control groups")
        for index in sorted(facts.nodes)
    ]
    delete = ("ip", "link", "delete", "dev", f"cpuft-{config.name}")
    rest = [Step("remove the bridge", delete)] if facts.bridge else []
    for group in facts.groups:
        path = f"{group}/cpuft-{config.name}"
        rest.append(Step("remove the control groups", ("sh", "-c", '[ ! -d "$1" ] || rmdir "$1"', "rmdir", path)))
    # The files go last, so that a second try can continue.
    removal = plan_removal(facts.files, facts.directory, facts.entry.hostfile)
    stages = (tuple(downs), tuple(rest), removal) if removal or facts.bridge or downs else ()
    return Plan(tuple(stage for stage in stages if stage))


class SimulatedCluster(Provider[LocalConfig, MachineFacts]):
    """A cluster whose hosts are network namespaces of this machine; CpuftError on other systems than Linux."""

    kind = "local"

    def __init__(self, config: LocalConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        refuse_other_systems("a simulated cluster", "provision hosts or aws makes a real one from here")
        # The registry stores the options, and later commands may run in another working directory.
        config = replace(config, image=os.path.abspath(config.image)) if config.image else config
        super().__init__(config, environ, entry)
        self.summary = f"{config.nodes} hosts"
        stamp = read_stamp(Path(config.image)) if config.image else {}
        self._image = str(stamp.get("contents", ""))
        self.entry = self._make_entry(str(stamp.get("python", "")))
        if entry:
            self.entry = replace(self.entry, python=entry.python or self.entry.python, settings=entry.settings)

    def _make_entry(self, image_python: str) -> Entry:
        """Return the record. Without an image, the hosts see this machine's files and run this cpuft."""
        import pwd  # which Windows does not have

        options = {key: str(value) for key, value in vars(self.config).items()}
        entry = Entry(self.name, self.kind, self.hostfile, f"{self.directory}/ssh_config", options=options)
        if self.config.image:
            there = f"{Path(image_python).parents[2]}/clusters/{self.name}/ssh_config" if image_python else ""
            return replace(entry, python=image_python or "python3", ssh_config_there=there)
        settings = {"PYTHONPATH": str(Path(cpuft.__file__).parents[1])}
        # An ssh login sets HOME from the user database. A user with another HOME must keep their own cache.
        cache = cache_path(self.environ)
        if cache != cache_path({"HOME": pwd.getpwuid(os.geteuid()).pw_dir}) and cache.name == "cpuft":
            settings["XDG_CACHE_HOME"] = str(cache.parent)
        return replace(entry, python=sys.executable, settings=settings, shares_files=True)

    def check(self) -> None:
        """Check options, image, programs, root and the cluster's name and files; CpuftError if one is wrong."""
        check_config(self.config)
        check_image(self.config.image)
        if os.geteuid() != 0:
            raise CpuftError("network namespaces need root: use sudo, or start ranks by cpuft launch without a cluster")
        missing = [f"{name} (package {of})" for name, of in _PROGRAMS.items() if not execute.find_program(name)]
        if missing:
            raise CpuftError(f"programs are missing on this machine, install them: {', '.join(missing)}")
        super().check()

    def gather(self) -> MachineFacts:
        """Return what exists; a silent host is given 10 s. CpuftError: `ip` fails, or no network is free."""
        bridge = f"cpuft-{self.name}"
        addresses = parse_networks(_run_ip("address"))
        used = [*addresses.values(), *parse_routes(_run_ip("route", "show", "table", "all"))]
        network = addresses.get(bridge) or choose_network(used)
        links = {link["ifname"]: link for link in json.loads(_run_ip("link"))}
        groups = find_groups()
        nodes = {
            index: _gather_node(self.directory / f"nodes/{index}", self.name, network, links, groups)
            for index in _find_nodes(self.directory, bridge, set(links), groups)
        }
        lscpu = execute.run_command(("lscpu", "-p=CPU,CORE,SOCKET,NODE"), seconds=10).output
        threads = [core.threads for core in parse_lscpu(lscpu, tuple(sorted(os.sched_getaffinity(0))))]
        cpus, cores = tuple(cpu for core in threads for cpu in core), tuple(core[0] for core in threads)
        files = read_files(self.directory, Path(self.hostfile))
        return MachineFacts(groups, network, bridge in links, nodes, files, self.entry, self._image, cpus, cores)

    def plan(self, facts: MachineFacts) -> Plan:
        """Plan what is missing; while keys are missing, without the hosts. CpuftError: CPU time cannot be limited."""
        return plan_cluster(self.config, facts)

    def plan_down(self, facts: MachineFacts) -> Plan:
        """Plan the removal of everything that is left."""
        return plan_cluster_down(self.config, facts)

    def describe_hosts(self) -> list[str]:
        """Return `NAME  ADDRESS  STATE` for each host; STATE is `down`, or `up, N processes`.

        Faults stand in place of `up`: `paused`, `cut off`, `paused, cut off` or `sshd does not answer`.
        """
        facts = self.gather()
        members = _plan_members(self.config, facts.network)
        return [
            f"{one.name}  {one.address}  {_describe_node(facts.nodes.get(index))}"
            for index, one in enumerate(members, start=1)
        ]


def _describe_node(node: NodeFacts | None) -> str:
    if node is None or not node.running:
        return "down"
    faults = ["paused"] * node.paused + ["cut off"] * node.cut
    return ", ".join(faults or ["up" if node.answers else "sshd does not answer"]) + f", {node.processes} processes"
