"""A cluster of network namespaces on this machine, planned: pure functions of what is there and what is asked for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

from cpuft.config import parse_bits
from cpuft.errors import CpuftError
from cpuft.files import hash_text
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
from cpuft.provision.local.facts import MachineFacts, NodeFacts
from cpuft.provision.options import LocalConfig
from cpuft.provision.ownership import KEY_MARK, check_hostfile, is_ours, plan_removal
from cpuft.provision.reconcile import plan_files

SCRIPT = str(Path(__file__).with_name("node.sh"))
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


def plan_down(config: LocalConfig, facts: MachineFacts, layout: Layout) -> Plan:
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
