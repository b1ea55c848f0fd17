"""Simulated clusters: network namespaces of this machine as hosts, or only a hostfile of this machine."""

from __future__ import annotations

import json
import math
import os
import pwd
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import cpuft
from cpuft import execute
from cpuft.config import parse_bits
from cpuft.errors import CpuftError
from cpuft.files import cache_path, hash_text
from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, check_name, format_entry
from cpuft.hosts.ssh_files import (
    KEYGEN,
    Member,
    format_hosts,
    format_inside,
    format_known_hosts,
    format_ssh_config,
    format_sshd_config,
)
from cpuft.plan import Plan, Setting, Step
from cpuft.provision.base import Provider
from cpuft.provision.cluster_files import (
    KEY_MARK,
    check_hostfile,
    is_ours,
    plan_files,
    plan_removal,
    read_files,
    read_raw,
)
from cpuft.provision.image import check_image, read_stamp
from cpuft.provision.options import LocalConfig

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "sshd": "openssh-server"}
"""Programs that a local cluster needs, and the Debian package of each."""

_BOOT_SECONDS = 10.0


@dataclass(frozen=True)
class NodeFacts:
    """One host of the cluster as it is now."""

    running: bool = False
    answers: bool = False
    """Its sshd answers, or cannot because the host is paused or cut off."""
    paused: bool = False
    cut: bool = False
    quota: str = ""
    """Microseconds of CPU time, and in how many; empty for no limit."""
    rate_bits: int = 0
    """Bits a second of its link; 0 for no limit."""
    booted: str = ""
    """Fingerprint of the settings it was started with."""
    processes: int = 0


@dataclass(frozen=True)
class MachineFacts:
    """What planning a local cluster needs to know of this machine."""

    groups: tuple[str, ...]
    """Directories of the control group controllers that limit and freeze a host."""
    network: str
    """Of the bridge when it is there, else the first private one that nothing here uses."""
    bridge: bool
    nodes: dict[int, NodeFacts]
    files: dict[str, str]
    """Texts of the cluster's files, by path; private keys only as a mark that they exist."""
    cpus: tuple[int, ...] = (0,)
    """Hardware threads that hosts share out among them."""


def check_machine(as_root: bool) -> None:
    """Raises CpuftError when this machine or user cannot make network namespaces."""
    if not as_root:
        raise CpuftError("network namespaces need root: run it with sudo, or say --without-root for a hostfile only")
    missing = sorted({f"{name} (package {PROGRAMS[name]})" for name in PROGRAMS if not execute.find_program(name)})
    if missing:
        raise CpuftError(f"this machine lacks {', '.join(missing)}: install what is missing, or say --without-root")


def gather_machine(name: str, directory: Path, hostfile: Path) -> MachineFacts:
    """Facts of the local cluster `name`, whose files are in `directory`."""
    bridge = f"cpuft-{name}"
    addresses = parse_networks(_ip("address"))
    network = addresses.get(bridge) or choose_network(
        [*addresses.values(), *parse_routes(_ip("route", "show", "table", "all"))]
    )
    links = {link["ifname"]: link for link in json.loads(_ip("link"))}
    groups = find_groups()
    nodes = {
        index: _gather_node(directory / f"nodes/{index}", name, network, links, groups)
        for index in find_nodes(directory, bridge, set(links), groups)
    }
    files, cpus = read_files(directory, hostfile), tuple(sorted(os.sched_getaffinity(0)))
    return MachineFacts(groups, network, bridge in links, nodes, files, cpus)


def find_nodes(directory: Path, bridge: str, links: set[str], groups: tuple[str, ...]) -> list[int]:
    """Numbers of all hosts of which anything is there: files, a link or a control group."""
    names = [path.parent.name for path in directory.glob("nodes/*/booted")]
    names += [link.removeprefix(f"{bridge}-") for link in links if link.startswith(f"{bridge}-")]
    names += [path.name for group in groups for path in Path(group, bridge).glob("*") if path.is_dir()]
    return sorted({int(name) for name in names if name.isdecimal()})


def _ip(*words: str) -> str:
    answer = execute.run_quietly((execute.find_program("ip"), "-json", "-4", *words), seconds=10)
    if answer.exit_code:
        raise CpuftError(f"ip {' '.join(words)} failed ({answer.said.strip()[:200]}): check that iproute2 works here")
    return answer.output or "[]"


def parse_networks(text: str) -> dict[str, str]:
    """The first IPv4 network of each interface, from `ip -json address`."""
    networks = {}
    for link in json.loads(text):
        for info in link.get("addr_info", [])[:1]:
            network = IPv4Network((info["local"], info["prefixlen"]), strict=False)
            networks[str(link["ifname"])] = str(network)
    return networks


def parse_routes(text: str) -> list[str]:
    """IPv4 networks that have a route, from `ip -json route`; the default route is none."""
    targets = (str(route["dst"]) for route in json.loads(text))
    return [target for target in targets if target[0].isdecimal()]


def choose_network(taken: list[str]) -> str:
    """A private /24 that overlaps none of `taken`."""
    used = [IPv4Network(network, strict=False) for network in taken]
    for number in range(77, 255):
        candidate = IPv4Network(f"10.{number}.0.0/24")
        if not any(candidate.overlaps(network) for network in used):
            return str(candidate)
    raise CpuftError("all of 10.77.0.0 to 10.254.0.0 is in use here: take away clusters with cpuft provision down")


def find_groups(root: str = "/sys/fs/cgroup") -> tuple[str, ...]:
    """Control group directories: the one of v2, or those of v1's cpu and freezer; none where nothing may be written.

    On a hybrid machine v2 is mounted too, but v1 holds the cpu controller.
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
    running = _is_holder(_read(path / "pid"))
    paused = running and any(_read(Path(group) / "cgroup.freeze") == "1" for group in own)
    paused |= running and any(_read(Path(group) / "freezer.state").startswith("FR") for group in own)
    cut = link in links and "UP" not in links[link]["flags"]
    address = str(IPv4Network(network)[index])
    shaping = execute.run_quietly((execute.find_program("tc"), "-json", "qdisc", "show", "dev", link), seconds=10)
    return NodeFacts(
        running=running and link in links,
        answers=running and link in links and (paused or cut or wait_for_ssh(address, _BOOT_SECONDS)),
        paused=paused,
        cut=cut,
        quota=_read_quota(own),
        rate_bits=0 if shaping.exit_code else parse_rate(shaping.output),
        booted=_read(path / "booted"),
        processes=max((len(_read(Path(group) / "cgroup.procs").split()) for group in own), default=0),
    )


def _read(path: Path) -> str:
    return read_raw(path).strip()


def _is_holder(pid: str) -> bool:
    """Whether the process of that number is a host's: numbers are used again after a reboot."""
    words = _read(Path("/proc") / (pid or "none") / "cmdline").split("\0")
    return words[0] == "unshare" and "boot" in words


def _read_quota(groups: list[str]) -> str:
    for group in map(Path, groups):
        text = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        if text[0].isdecimal():
            return text
    return ""


def parse_rate(text: str) -> int:
    """Bits a second that a token bucket lets through, from `tc -json qdisc`; 0 without one."""
    for discipline in json.loads(text or "[]"):
        if discipline.get("kind") == "tbf":
            return int(discipline["options"]["rate"]) * 8
    return 0


def wait_for_ssh(address: str, seconds: float) -> bool:
    """Whether an ssh server greets at `address` within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address, 22), timeout=1.0) as connection:
                if connection.recv(4) == b"SSH-":
                    return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


SCRIPT = str(Path(__file__).with_name("simulated_node.sh"))
FAULTS = {"kill": "crash", "pause": "pause", "resume": "resume", "cut": "cut", "join": "join"}
"""Words of `cpuft provision local WORD NODE`, and node.sh's own."""

_LINK_NAME = 15
"""Characters of an interface's name: IFNAMSIZ of linux/if.h, less the closing 0."""


@dataclass(frozen=True)
class Layout:
    """Where a local cluster keeps its files, and which Python its hosts run."""

    directory: str
    hostfile: str
    python: str
    settings: dict[str, str]
    there: str = ""
    """Folder of the cluster's files on the disks of its hosts; empty where they have none, or no environment."""
    image: str = ""
    """Fingerprint of the image's contents."""


def check_config(config: LocalConfig) -> None:
    """Raises CpuftError for a name, a rate or a number of hosts that cannot be."""
    link = f"cpuft-{check_name(config.name)}-{config.nodes}"
    _check_nodes(config.nodes)
    if len(link) > _LINK_NAME:
        most = len(config.name) - len(link) + _LINK_NAME
        raise CpuftError(f"--name {config.name!r}: interface names are short: with so many hosts use {most} at most")
    parse_bits(config.net)
    if re.search(r"[\s,:\\]", str(Path(config.image).absolute())):
        raise CpuftError(f"--image {config.image}: overlay mounts take no comma, colon or space in a path: move it")
    if not re.fullmatch(r"[0-9]{1,9}[kmg]?", config.shm):
        raise CpuftError(f"--shm {config.shm[:60]!r} is no size: write e.g. 256m or 1g")


def _check_nodes(nodes: int) -> None:
    if nodes > 99:
        raise CpuftError(f"--nodes {nodes}: one machine holds 99 hosts at most: lower it")


def plan_members(config: LocalConfig, network: str) -> tuple[Member, ...]:
    """Hosts with their names and addresses, the master first. Raises CpuftError for more than a machine holds."""
    _check_nodes(config.nodes)
    addresses = IPv4Network(network)
    return tuple(Member(f"{config.name}-{index}", str(addresses[index])) for index in range(1, config.nodes + 1))


def plan_local(config: LocalConfig, facts: MachineFacts, layout: Layout) -> Plan:
    """What is missing of the cluster; keys first, because files are made from them."""
    if config.cores_per_node and not facts.groups:
        raise CpuftError("control groups cannot be written here, so there is no CPU limit: leave out --cores-per-node")
    keys = _plan_keys(config, facts, layout)
    # Remembered before anything is made, so that `down` finds what a killed run has left.
    texts = _plan_entry(config, layout) if keys else plan_texts(config, facts, layout)
    check_hostfile(layout.hostfile, facts.files.get(layout.hostfile, ""))
    stages = [plan_files(texts, facts.files, "write the cluster's ssh files and hostfile"), keys]
    down = partial(plan_node_step, config, facts, layout, action="down", why="take away hosts beyond --nodes")
    stages += [_plan_bridge(config, facts), [down(index=index) for index in facts.nodes if index > config.nodes]]
    if not keys:
        stages.append(_plan_nodes(config, facts, layout))
    return Plan(tuple(tuple(stage) for stage in stages if stage))


def _plan_keys(config: LocalConfig, facts: MachineFacts, layout: Layout) -> list[Step]:
    wanted = {f"{layout.directory}/id_ed25519": "make the cluster's own login key"}
    for index in range(1, config.nodes + 1):
        wanted[f"{layout.directory}/nodes/{index}/host_key"] = "make host keys for this cluster"
    return [
        Step(why, ("sh", "-c", KEYGEN, "keygen", path, KEY_MARK))
        for path, why in wanted.items()
        if not (facts.files.get(path) and facts.files.get(f"{path}.pub"))
    ]


def make_entry(config: LocalConfig, layout: Layout) -> Entry:
    """What is remembered of the cluster."""
    options = {key: str(value) for key, value in vars(config).items()}
    there = f"{layout.there}/ssh_config" if layout.there else ""
    own = f"{layout.directory}/ssh_config"
    shares = not config.image
    return Entry(config.name, "local", layout.hostfile, own, layout.python, layout.settings, options, there, shares)


def plan_texts(config: LocalConfig, facts: MachineFacts, layout: Layout) -> dict[str, str]:
    """Every file of the cluster that is not a key, by path."""
    base = layout.directory
    members = tuple(
        replace(member, key=facts.files[f"{base}/nodes/{index}/host_key.pub"])
        for index, member in enumerate(plan_members(config, facts.network), start=1)
    )
    hosts = tuple(Host(member.address) for member in members)
    head = f"# Cluster {config.name}, made by cpuft provision; cpuft provision down {config.name} takes it away.\n"
    texts = _plan_entry(config, layout) | {
        f"{base}/authorized_keys": facts.files[f"{base}/id_ed25519.pub"],
        f"{base}/hosts": format_hosts(members),
        f"{base}/known_hosts": format_known_hosts(members),
        f"{base}/ssh_config": format_ssh_config(members, f"{base}/id_ed25519", f"{base}/known_hosts"),
        layout.hostfile: head + format_hostfile(hosts),
    }
    if layout.there:
        inside = format_inside(members, layout.there, layout.python)
        texts |= {f"{base}/there/{name}": text for name, text in inside.items()}
    for index, member in enumerate(members, start=1):
        texts[f"{base}/nodes/{index}/sshd_config"] = format_sshd_config(
            member.address, "/run/cpuft", bool(config.image)
        )
    return texts


def _plan_entry(config: LocalConfig, layout: Layout) -> dict[str, str]:
    return {f"{layout.directory}/{FILE_NAME}": format_entry(make_entry(config, layout))}


def _plan_bridge(config: LocalConfig, facts: MachineFacts) -> list[Step]:
    if facts.bridge:
        return []
    bridge, gateway = f"cpuft-{config.name}", f"{IPv4Network(facts.network)[254]}/24"
    script = 'ip link add dev "$1" type bridge && ip address add "$2" dev "$1" && ip link set dev "$1" up'
    steps = [Step(f"connect the hosts by a bridge at {gateway}", ("sh", "-c", script, "bridge", bridge, gateway))]
    for group in facts.groups:
        # cgroup v2 gives controllers to a directory's children only when told so, level by level.
        script = (
            'mkdir -p "$1/$2"; [ ! -e "$1/cgroup.subtree_control" ] || '
            'for d in "$1" "$1/$2"; do echo +cpu >"$d/cgroup.subtree_control"; done'
        )
        steps.append(Step("make a control group", ("sh", "-c", script, "group", group, bridge)))
    return steps


def _plan_nodes(config: LocalConfig, facts: MachineFacts, layout: Layout) -> list[Step]:
    steps = []
    for index in range(1, config.nodes + 1):
        node = facts.nodes.get(index, NodeFacts())
        action, why = _missing(config, node, _fingerprint(config, facts, layout, index))
        if action:
            steps.append(plan_node_step(config, facts, layout, index, action, why))
    return steps


def _missing(config: LocalConfig, node: NodeFacts, fingerprint: str) -> tuple[str, str]:
    """node.sh's action that brings a host nearer to what is wanted, and why; two empty texts when it is there."""
    if node.paused:
        return "resume", "let paused hosts go on"
    if node.running and node.cut:
        return "join", "plug in hosts that were cut off"
    if not node.running or not node.answers or node.booted != fingerprint:
        return "up", "start hosts: namespaces, address, control group, link rate, sshd"
    if node.quota != _quota(config) or node.rate_bits != parse_bits(config.net):
        return "limit", "set CPU and link limits"
    return "", ""


def _quota(config: LocalConfig) -> str:
    """Microseconds of CPU time, and in how many of them; empty for no limit.

    A host that has had its share waits for the period's end, and the others for it: of the kernel's 100 ms, a step's
    length or more, that is a cost which hosts of their own do not have. The kernel takes no quota below 1 ms.
    """
    period = 10_000 if config.cores_per_node >= 0.1 else 100_000
    return f"{int(config.cores_per_node * period)} {period}" if config.cores_per_node else ""


def plan_cpus(config: LocalConfig, facts: MachineFacts, index: int) -> tuple[int, ...]:
    """The hardware threads of host `index` (from 1): as many as it has cores, in turn, at least one.

    Hosts on each other's threads slow down far more than by half, since waiting OpenMP threads and MPI spin.
    """
    count = len(facts.cpus)
    share = config.cores_per_node or count / config.nodes
    first = int((index - 1) * share)
    return tuple(sorted({facts.cpus[(first + at) % count] for at in range(max(1, math.ceil(share)))}))


def _fingerprint(config: LocalConfig, facts: MachineFacts, layout: Layout, index: int) -> str:
    """Of all that a host reads only when it starts."""
    texts = plan_texts(config, facts, layout)
    base = layout.directory
    parts = [texts[f"{base}/hosts"], texts[f"{base}/nodes/{index}/sshd_config"], texts[f"{base}/authorized_keys"]]
    parts += [str(plan_cpus(config, facts, index))]
    parts += [facts.network, config.shm, config.image, layout.image, facts.files[f"{base}/nodes/{index}/host_key.pub"]]
    parts += [text for path, text in texts.items() if path.startswith(f"{base}/there/")]
    return hash_text("\0".join(parts), 16)


def format_mac(network: str, index: int) -> str:
    """A locally administered hardware address made from the host's IPv4 address."""
    return ":".join(["02", "00", *(f"{byte:02x}" for byte in IPv4Network(network)[index].packed)])


def plan_node_step(config: LocalConfig, facts: MachineFacts, layout: Layout, index: int, action: str, why: str) -> Step:
    """One call of node.sh for one host."""
    groups = " ".join(f"{group}/cpuft-{config.name}/{index}" for group in facts.groups)
    booted = _fingerprint(config, facts, layout, index) if action == "up" else ""
    values = {
        "NODE": (f"{config.name}-{index}", "its hostname"),
        "NODE_DIR": (f"{layout.directory}/nodes/{index}", "its own files"),
        "NODE_HOSTS": (f"{layout.directory}/hosts", "its /etc/hosts"),
        "NODE_KEYS": (f"{layout.directory}/authorized_keys", "who may log in"),
        "NODE_ADDRESS": (f"{IPv4Network(facts.network)[index]}/24", "its address"),
        "NODE_MAC": (format_mac(facts.network, index), "its network card's number"),
        "NODE_LINK": (f"cpuft-{config.name}-{index}", "this machine's end of its cable"),
        "NODE_BRIDGE": (f"cpuft-{config.name}", "what the cable is plugged into"),
        "NODE_CGROUPS": (groups, "its CPU limit, and how it is paused"),
        "NODE_CPUS": (",".join(map(str, plan_cpus(config, facts, index))), "the hardware threads it runs on"),
        "NODE_QUOTA": (_quota(config), "µs of CPU time, in so many; empty for no limit"),
        "NODE_RATE": (config.net, "its link's rate; empty for no limit"),
        "NODE_SHM": (config.shm, "size of its /dev/shm"),
        "NODE_IMAGE": (config.image, "its root filesystem; empty for this machine's own"),
        "NODE_CONTENTS": (layout.image, "fingerprint of that: a disk written over another image is of no use"),
        "NODE_CLUSTER": (layout.directory, "the cluster's files"),
        "NODE_THERE": (layout.there, "where they go on its own disk, so that it can launch; empty for nowhere"),
        "NODE_BOOTED": (booted, "to see what has changed"),
    }
    settings = tuple(Setting(name, value, reason) for name, (value, reason) in values.items())
    return Step(why, ("sh", SCRIPT, action), settings)


def plan_fault(config: LocalConfig, facts: MachineFacts, layout: Layout, word: str, node: str) -> Plan:
    """Make a fault, or take it back. `node` is a number, a name or an address. Raises CpuftError for an unknown one."""
    members = plan_members(config, facts.network)
    for index, member in enumerate(members, start=1):
        if node in (str(index), member.name, member.address):
            step = plan_node_step(config, facts, layout, index, FAULTS[word], f"{word} {member.name}")
            return Plan(((step,),))
    raise CpuftError(f"cluster {config.name} has no host {node!r}: choose one of {', '.join(m.name for m in members)}")


def plan_local_down(config: LocalConfig, facts: MachineFacts, layout: Layout) -> Plan:
    """Take away all that the cluster has on this machine, its files last so that a second try finds the rest."""
    downs = [
        plan_node_step(config, facts, layout, index, "down", "end the hosts' processes, links and control groups")
        for index in sorted(facts.nodes)
    ]
    unplug = Step("take away the bridge", ("ip", "link", "delete", "dev", f"cpuft-{config.name}"))
    rest = [unplug] if facts.bridge else []
    for group in facts.groups:
        path = f"{group}/cpuft-{config.name}"
        rest.append(Step("take away the control groups", ("sh", "-c", '[ ! -d "$1" ] || rmdir "$1"', "rmdir", path)))
    ours = is_ours(facts.files, layout.directory)
    removal = plan_removal(facts.files, layout.directory, layout.hostfile) if ours else ()
    stages = (tuple(downs), tuple(rest), removal) if ours or facts.bridge or downs else ()
    return Plan(tuple(stage for stage in stages if stage))


class Local(Provider[LocalConfig, MachineFacts]):
    """Network namespaces of this machine, as hosts."""

    kind = "local"
    options = LocalConfig

    def __init__(self, config: LocalConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        # What is remembered must hold wherever the next command is typed.
        config = replace(config, image=os.path.abspath(config.image)) if config.image else config
        super().__init__(config, environ, entry)
        self.summary = f"{config.nodes} hosts"
        self.layout = self._lay_out()
        if entry:
            self.layout = replace(self.layout, python=entry.python or self.layout.python, settings=entry.settings)

    def _lay_out(self) -> Layout:
        """Without an image the hosts see this machine's files and run this very cpuft; with one, the image's."""
        directory, hostfile, image = str(self.directory), self.hostfile, self.config.image
        if not image:
            settings = {"PYTHONPATH": str(Path(cpuft.__file__).parents[1])}
            # A login to a host has the home of the user database: who runs with another home keeps their own cache.
            if cache_path(self.environ) != cache_path({"HOME": pwd.getpwuid(os.geteuid()).pw_dir}):
                settings["XDG_CACHE_HOME"] = str(cache_path(self.environ).parent)
            return Layout(directory, hostfile, sys.executable, settings)
        stamp = read_stamp(Path(image))
        python = str(stamp.get("python", ""))
        there = f"{Path(python).parents[2]}/clusters/{self.name}" if python else ""
        return Layout(directory, hostfile, python or "python3", {}, there, str(stamp.get("contents", "")))

    @classmethod
    def find_unrecorded(cls, name: str, environ: Mapping[str, str], region: str) -> Local | None:
        """Return a cluster of which something is left on this machine; None when nothing is, or with a region."""
        found = None if region else cls(LocalConfig(name=name), environ)
        return found if found and found.show_down().stages else None

    def check(self) -> None:
        """Also what this machine cannot do."""
        check_config(self.config)
        check_image(self.config.image)
        check_machine(os.geteuid() == 0)
        super().check()

    def gather(self) -> MachineFacts:
        """What the cluster has on this machine."""
        return gather_machine(self.name, self.directory, Path(self.hostfile))

    def plan(self, facts: MachineFacts) -> Plan:
        """What is missing."""
        return plan_local(self.config, facts, self.layout)

    def plan_down(self, facts: MachineFacts) -> Plan:
        """What is left."""
        return plan_local_down(self.config, facts, self.layout)

    def plan_fault(self, word: str, node: str) -> Plan:
        """Crash, pause or cut off a host, or take that back."""
        return plan_fault(self.config, self.gather(), self.layout, word, node)

    def describe_hosts(self) -> list[str]:
        """A host's name, address and what it is doing."""
        facts = self.gather()
        members = plan_members(self.config, facts.network)
        return [f"{one.name}  {one.address}  {_state(facts, index)}" for index, one in enumerate(members, start=1)]


def _state(facts: MachineFacts, index: int) -> str:
    node = facts.nodes.get(index)
    if node is None or not node.running:
        return "down"
    words = ["paused"] if node.paused else []
    words += ["cut off"] if node.cut else []
    return ", ".join(words or ["up" if node.answers else "sshd does not answer"]) + f", {node.processes} processes"


Files = dict[str, str]
"""Texts by path."""


class Plain(Provider[LocalConfig, Files]):
    """This machine, with a slot for each host that was asked for."""

    kind = "plain"
    options = LocalConfig

    def __init__(self, config: LocalConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        super().__init__(config, environ, entry)
        self.summary = f"this machine with {config.nodes} slots"

    def check(self) -> None:
        """Also the wishes."""
        check_config(self.config)
        super().check()

    def gather(self) -> Files:
        """The cluster's files."""
        return read_files(self.directory, Path(self.hostfile))

    def plan(self, facts: Files) -> Plan:
        """The files that differ."""
        options = {key: str(value) for key, value in asdict(self.config).items()}
        hosts = (Host("localhost", self.config.nodes),)
        texts = {
            f"{self.directory}/{FILE_NAME}": format_entry(Entry(self.name, self.kind, self.hostfile, options=options)),
            self.hostfile: f"# Cluster {self.name}, made by cpuft provision.\n{format_hostfile(hosts)}",
        }
        steps = plan_files(texts, facts, "write the hostfile, and remember it")
        return Plan(tuple((step,) for step in steps))

    def plan_down(self, facts: Files) -> Plan:
        """Its files."""
        directory = str(self.directory)
        return Plan((plan_removal(facts, directory, self.hostfile),) if is_ours(facts, directory) else ())

    def describe_hosts(self) -> list[str]:
        """This machine tells nothing more."""
        return []
