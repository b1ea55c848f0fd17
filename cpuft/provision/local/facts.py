"""What a local cluster has on this machine now: gathered with iproute2, /proc and /sys; parsed by pure functions."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.provision.ownership import read_files, read_raw

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
