"""A cluster of servers over ssh, planned: pure functions of what there is and what is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted
from cpuft.files import REMOVE, hash_text
from cpuft.hosts.cluster import WORK_ROOT
from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.hosts.ssh_files import KEYGEN, Bastions, Member, format_inside, format_known_hosts, format_ssh_config
from cpuft.hosts.transport import fingerprint
from cpuft.plan import Plan, Step
from cpuft.provision.options import HostsConfig
from cpuft.provision.ownership import is_ours, plan_removal
from cpuft.provision.reconcile import plan_file, plan_files
from cpuft.provision.servers.facts import ServerFacts, check_server
from cpuft.provision.wheels import INSTALL, Supply, make_stamp
from cpuft.serialization import load, parse_json

_PUSHES = 4
"""Wheels that go to a host side by side: sshd drops new connections at random from the tenth on (MaxStartups)."""
_HERE = Path(__file__).parent
_RECEIVE = "set -eu\n" + (_HERE / "receive.sh").read_text(encoding="utf-8")
_DOWN = f"set -eu\n{REMOVE}" + (_HERE / "down.sh").read_text(encoding="utf-8")
_AUTHORIZE = 'umask 077; mkdir -p "$HOME/.ssh"; cat >>"$HOME/.ssh/authorized_keys"'


@dataclass(frozen=True)
class Facts:
    """What planning a cluster of servers needs to know."""

    servers: tuple[tuple[Member, ServerFacts], ...]
    """The master first."""
    files: Mapping[str, str]
    """Texts of the cluster's files on this machine, by path."""
    directory: str
    """Of these files, but for the hostfile and the lock file beside that."""
    hostfile: str
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """As a plan has them."""
    bastions: Bastions = ()
    supply: Supply = Supply(())
    pins: tuple[str, ...] = ()
    """What the servers install, name==version."""
    kind: str = "hosts"
    """Of the cluster's entry."""
    options: Mapping[str, str] | None = None
    """What the entry says that was asked for, where that is more than the servers' configuration."""
    notice: str = ""
    renewal: str = ""
    """Both as in the entry."""
    until: int = 0
    """When the servers' lease ends, as in the entry."""
    may_lose_master: bool = False
    """Whether every server is to be able to take the master's place."""

    @property
    def masters(self) -> tuple[tuple[Member, ServerFacts], ...]:
        """The servers that log in to all others."""
        return self.servers if self.may_lose_master else self.servers[:1]

    @property
    def members(self) -> tuple[Member, ...]:
        """The servers as ssh sees them."""
        return tuple(member for member, _ in self.servers)

    @property
    def stamp(self) -> str:
        """Of the environment that is wanted."""
        return make_stamp(self.pins, self.supply.wheels)


def refuse(config: HostsConfig, facts: Facts) -> None:
    """Raises CpuftError that names every server that cannot be provisioned."""
    wheels = facts.supply.wheels
    # A wheel takes its own size, the same unpacked some three times over, and room to work.
    need_kb = sum(wheel.size for wheel in wheels) * 4 // 1024 + (100 << 10)
    brings_pip = any(wheel.name.startswith("pip-") for wheel in wheels) or not (wheels or config.pins)
    brings_pip |= not facts.supply.complete
    problems = [check_server(member.address, own, config, brings_pip, need_kb) for member, own in facts.servers]
    if any(problems):
        raise CpuftError("; ".join(problem for problem in problems if problem))


def plan_servers(config: HostsConfig, facts: Facts) -> Plan:
    """What is missing, on the servers and here. Raises CpuftError as `refuse`."""
    refuse(config, facts)
    stages = [*_plan_remembering(config, facts), list(facts.supply.missing)]
    notes = [
        f"{one.address} shows the key {one.key.split()[0]} {fingerprint(one.key)}: cpuft asks whether that is right"
        for one in facts.members
        if facts.kind == "hosts"
        and format_known_hosts([one]) not in facts.files.get(f"{facts.directory}/known_hosts", "")
    ]
    if facts.supply.complete:
        stages += [*plan_hosts(config, facts), _plan_results(config, facts)]
    else:
        notes.append("what goes to the servers is known when the wheels are here")
    return Plan(tuple(tuple(stage) for stage in stages if stage), tuple(notes), facts.ways)


def _plan_remembering(config: HostsConfig, facts: Facts) -> list[list[Step]]:
    """The entry first: by that `down` finds what a killed run has left."""
    base, members = facts.directory, facts.members
    python, there = f"{config.prefix}/env/bin/python", f"{cluster_dir(config)}/ssh_config"
    # Whether new keys are taken unasked is a matter of one run.
    options = {key: str(value) for key, value in asdict(replace(config, accept_host_keys=False)).items()}
    options = dict(facts.options) if facts.options else options
    entry = Entry(config.name, facts.kind, facts.hostfile, f"{base}/ssh_config", python, {}, options, there)
    entry = replace(entry, notice=facts.notice, renewal=facts.renewal, until=facts.until)
    texts = {
        f"{base}/{FILE_NAME}": format_entry(entry),
        f"{base}/ssh_config": format_ssh_config(members, config.key, f"{base}/known_hosts", facts.bastions),
        f"{base}/known_hosts": format_known_hosts(members),
    }
    return [[step] for step in plan_files(texts, facts.files, "remember the cluster, and the keys of its hosts")]


def _plan_results(config: HostsConfig, facts: Facts) -> list[Step]:
    """The hostfile, and beside it the lock file: what was installed, and on what."""
    now: dict[str, dict[str, object]] = {
        member.address: {"cpu": own.cpu, "cores": own.cores, "kernel": own.kernel, "python": own.python}
        for member, own in facts.servers
    }
    lock = json.dumps({"format": 1, "pins": sorted(facts.pins), "hosts": now}, indent=2) + "\n"
    path = f"{facts.hostfile}.lock"
    was = parse_lock(facts.files.get(path, ""), path)
    changes = [
        f"{name}'s {key} was {was[name].get(key)} and is {value}"
        for name in was.keys() & now.keys()
        for key, value in now[name].items()
        if was[name].get(key) != value
    ]
    hosts = format_hostfile(tuple(Host(member.address) for member in facts.members))
    hostfile = {facts.hostfile: f"# Cluster {config.name}, made by cpuft provision.\n{hosts}"}
    steps = plan_files(hostfile, facts.files, "write the hostfile")
    return steps + plan_files({path: lock}, facts.files, "; ".join(["write the lock file", *sorted(changes)]))


def parse_lock(text: str, path: str) -> dict[str, dict[str, Any]]:
    """What a lock file keeps of each host; nothing of an empty text. Raises CpuftError for a damaged one."""
    try:
        values = load(dict[str, Any], parse_json(text)) if text else {"hosts": {}}
        return load(dict[str, dict[str, Any]], values.get("hosts"), "hosts")
    except ValueError as error:
        raise CpuftError(f"{path} is damaged ({error}): remove it, and run cpuft provision hosts again") from None


def cluster_dir(config: HostsConfig) -> str:
    """Where the master keeps the cluster's key and ssh configuration."""
    return f"{config.prefix}/clusters/{config.name}"


def _key_mark(config: HostsConfig) -> str:
    """The comment of the cluster's keys, by which all lines of it are found again, lost ones too."""
    return f"cpuft-{config.name}"


def plan_hosts(config: HostsConfig, facts: Facts) -> list[list[Step]]:
    """What is missing on the servers. A master's key is made there and never leaves it."""
    keys = [own.key for _, own in facts.masters if own.key]
    keygen = ("sh", "-c", KEYGEN, "keygen", f"{cluster_dir(config)}/id_ed25519", _key_mark(config))
    command = ("sh", "-c", f"set -eu\n{INSTALL}", "install", config.prefix, facts.stamp, *facts.pins)
    install = [
        Step(f"install the environment at {config.prefix}/env", command, host=member.address)
        for member, found in facts.servers
        if found.stamp != facts.stamp
    ]
    login = [
        Step("let the master log in", ("sh", "-c", _AUTHORIZE), host=member.address, stdin="".join(new))
        for member, found in facts.servers
        if (new := [f"{key}\n" for key in keys if key not in found.authorized])
    ]
    why = "make the cluster's own key"
    make_keys = [Step(why, keygen, host=member.address) for member, own in facts.masters if not own.key]
    return [make_keys, *_plan_wheels(config, facts), install, login, _plan_master(config, facts)]


def _plan_wheels(config: HostsConfig, facts: Facts) -> list[list[Step]]:
    """Files for the hosts that will install, some at a time; one that came with its environment needs none."""
    missing = {
        wheel: [
            member.address
            for member, own in facts.servers
            if own.stamp != facts.stamp and own.wheels.get(wheel.name) != wheel.sha256
        ]
        for wheel in facts.supply.wheels
    }
    hosts = {address for addresses in missing.values() for address in addresses}
    files = counted(sum(map(bool, missing.values())), "file")
    size = sum(wheel.size * len(addresses) for wheel, addresses in missing.items()) / 1e6
    part = f"push {files} to {counted(len(hosts), 'host')}, {size:.0f} MB in all"
    stages: list[list[Step]] = []
    for number, wheel in enumerate(facts.supply.wheels):
        stages += [[]] if number % _PUSHES == 0 else []
        words = ("sh", "-c", _RECEIVE, "receive", f"{config.prefix}/wheels/{wheel.name}", wheel.sha256)
        stages[-1] += [
            Step(f"push {wheel.name}", words, host=address, stdin_file=wheel.path, part=part)
            for address in missing[wheel]
        ]
    return stages


def _plan_master(config: HostsConfig, facts: Facts) -> list[Step]:
    folder = cluster_dir(config)
    python = f"{config.prefix}/env/bin/python"
    texts = format_inside(facts.members, folder, python, facts.notice, facts.renewal)
    return [
        plan_file(f"{folder}/{name}", text, "tell the master how to reach the hosts", host=member.address)
        for member, own in facts.masters
        for name, text in texts.items()
        if own.sums.get(name) != hash_text(text)
    ]


def plan_servers_down(config: HostsConfig, facts: Facts) -> Plan:
    """What is to be taken from the servers (the environment, the wheels, the key and its line), and then from here."""
    mark = _key_mark(config)
    command = ("sh", "-c", _DOWN, "remove", config.prefix, config.name, mark, WORK_ROOT)
    steps = tuple(
        Step("take away the environment and the key", command, host=member.address)
        for member, own in facts.servers
        if own.marked or own.stamp or own.key or any(line.endswith(f" {mark}") for line in own.authorized)
    )
    removal = plan_removal(facts.files, facts.directory, facts.hostfile, f"{facts.hostfile}.lock")
    stages = (steps, removal if is_ours(facts.files, facts.directory) else ())
    return Plan(tuple(stage for stage in stages if stage), ways=facts.ways)
