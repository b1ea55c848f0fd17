"""Servers that are reached over ssh: what they have, what they lack, and making them a cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpuft.config import is_count
from cpuft.errors import CpuftError, counted
from cpuft.execute import open_memory
from cpuft.files import REMOVE, hash_text
from cpuft.hosts.cluster import WORK_ROOT
from cpuft.hosts.hostfile import NAME, Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.hosts.ssh_files import KEYGEN, Bastions, Member, format_inside, format_known_hosts, format_ssh_config
from cpuft.hosts.transport import (
    Login,
    Transport,
    attempt,
    find_bastions,
    fingerprint,
    parse_jumps,
    scan_host_key,
    side_by_side,
)
from cpuft.plan import Plan, Step
from cpuft.provision.base import Ask, Provider
from cpuft.provision.cluster_files import (
    check_prefix,
    is_ours,
    plan_file,
    plan_files,
    plan_removal,
    read_files,
    read_raw,
)
from cpuft.provision.options import HostsConfig
from cpuft.provision.wheels import INSTALL, Supply, add_own, gather_supply, list_pins, make_stamp, parse_pins
from cpuft.serialization import load, parse_json

_LEAST_PYTHON = (3, 10)


@dataclass(frozen=True)
class ServerFacts:
    """What `survey.sh` said of one server."""

    os: str = ""
    kernel: str = ""
    cpu: str = ""
    python: str = ""
    stamp: str = ""
    """Of the environment that is installed; empty when none is, or when it is half done."""
    foreign: str = ""
    """What is in the way at the prefix, and why."""
    key: str = ""
    """Public key of the cluster, on the master."""
    cores: int = 0
    free_kb: int = 0
    ensurepip: bool = False
    writable: bool = False
    marked: bool = False
    """Whether cpuft has put, or begun to put, something below the prefix."""
    wheels: dict[str, str] = field(default_factory=dict)
    """File name -> SHA-256."""
    sums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the cluster's ssh files there."""
    authorized: tuple[str, ...] = ()
    host_keys: tuple[str, ...] = ()
    """Public keys in /etc/ssh, comments and all."""


def parse_survey(text: str, host: str) -> ServerFacts:
    """Facts from survey.sh's lines. Raises CpuftError when they are not that."""
    lines = [(key, value.strip()) for key, _, value in (line.partition(" ") for line in text.split("\n"))]
    said = dict(lines)
    if "os" not in said or not is_count(said.get("free_kb", ""), least=0):
        raise CpuftError(f"host {host} did not survey itself (it said {text.strip()[-200:]!r}): is it a Linux with sh?")
    texts = {name: said.get(name, "") for name in ("os", "kernel", "cpu", "python", "stamp", "foreign", "key")}
    return ServerFacts(
        **texts,
        cores=int(said["cores"]) if is_count(said.get("cores", "")) else 0,
        free_kb=int(said["free_kb"]),
        ensurepip="ensurepip" in said,
        writable="writable" in said,
        marked="marked" in said,
        wheels={value.partition(" ")[0]: value.partition(" ")[2] for key, value in lines if key == "wheel"},
        sums={key.removeprefix("sum_"): value for key, value in lines if key.startswith("sum_")},
        authorized=tuple(value for key, value in lines if key == "authorized"),
        host_keys=tuple(value for key, value in lines if key == "hostkey"),
    )


def check_server(host: str, facts: ServerFacts, config: HostsConfig, brings_pip: bool, need_kb: int) -> str:
    """What stops this server from being provisioned, with the next move; empty when nothing does."""
    version = tuple(int(part) for part in re.findall(r"\d+", facts.python)[:2])
    if version < _LEAST_PYTHON:
        return f"{host}: Python is {facts.python or 'missing'}, 3.10 is the oldest that does: apt-get install python3"
    if not facts.writable:
        return f"{host}: {config.prefix} cannot be written: log in as root, or name a --prefix of your own"
    if facts.foreign:
        return f"{host}: {facts.foreign}: move it away, or name another --prefix"
    if not facts.ensurepip and not brings_pip:
        return f"{host}: there is no pip: apt-get install python3-venv, or leave out --pins and --wheels"
    if not facts.stamp and facts.free_kb < need_kb:
        return f"{host}: {facts.free_kb >> 10} MB are free for {config.prefix}, it needs {need_kb >> 10} MB: make room"
    return ""


def describe_server(facts: ServerFacts) -> str:
    """What a server is and has, in a line."""
    words = ["up", facts.os, f"kernel {facts.kernel}", f"Python {facts.python or 'missing'}"]
    words += [f"environment {facts.stamp[:8]}" if facts.stamp else "no environment", f"{facts.free_kb >> 20} GB free"]
    return ", ".join(words)


def find_python(pythons: dict[str, str]) -> str:
    """The Python that all servers have, "3.11". Raises CpuftError when they differ: one environment needs one."""
    versions = {name: ".".join(python.split(".")[:2]) for name, python in pythons.items()}
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{name} has {version or 'none'}" for name, version in versions.items())
        raise CpuftError(f"servers of one cluster need the same Python, and {told}: install one on all of them")
    return next(iter(versions.values()))


_PUSHES = 4
"""Wheels that go to a host side by side: sshd drops new connections at random from the tenth on (MaxStartups)."""
_HERE = Path(__file__)
_RECEIVE = "set -eu\n" + _HERE.with_name("servers_receive.sh").read_text(encoding="utf-8")
_DOWN = f"set -eu\n{REMOVE}" + _HERE.with_name("servers_down.sh").read_text(encoding="utf-8")
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


_SURVEY_SECONDS = 120.0
"""Checksums of a gigabyte of wheels on a slow disk."""


class Servers(Provider[HostsConfig, Facts]):
    """Hosts that are there already, and are reached over ssh."""

    kind = "hosts"
    options = HostsConfig
    elsewhere = False
    """Whether none of the hosts can be this machine."""

    def __init__(self, config: HostsConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        # What is remembered must hold wherever the next command is typed.
        key, wheels, pins = map(_absolute, (config.key, config.wheels, config.pins))
        super().__init__(replace(config, key=key, wheels=wheels, pins=pins), environ, entry)
        check_prefix(config.prefix)
        names = [name.strip() for name in config.hosts.split(",") if name.strip()]
        if not names or len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)):
            raise CpuftError(f"--hosts {config.hosts!r}: give different names or addresses, a comma between")
        self.members = tuple(Member(name, name, config.user, config.port) for name in names)
        self.summary = f"{len(names)} hosts"
        self.keys = self._read_keys()
        """Of the servers, by ssh's names for them."""

    def _read_keys(self) -> dict[str, str]:
        lines = read_raw(self.directory / "known_hosts").splitlines()
        return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if " " in line}

    def confirm(self, ask: Ask) -> None:
        """The keys of servers never seen before, each after `ask` has agreed; known ones are never replaced."""
        unknown = [member for member in self.members if member.known_name not in self.keys]
        with self._door(self._find_bastions()) as transport:
            shown = side_by_side(lambda member: scan_host_key(Host(member.address), transport.config), unknown)
        for member, key in zip(unknown, shown):
            question = f"{member.address} shows the key {key.split()[0]} {fingerprint(key)}. Is that right?"
            if not self.config.accept_host_keys and not ask(question):
                raise CpuftError(f"the key of {member.address} was not accepted: compare it there with ssh-keygen -l")
            self.keys[member.known_name] = key

    def _find_bastions(self) -> Bastions:
        """As this user's own ssh reaches them now."""
        found = find_bastions(Login("", 22, jumps=parse_jumps(self.config.jump, "--jump")))
        twice = {jump.name for jump, _ in found} & {member.name for member in self.members}
        if twice:
            raise CpuftError(f"--jump {twice.pop()} is one of --hosts: name the hosts by their addresses behind it")
        return tuple((jump.name, login) for jump, login in found)

    @contextmanager
    def _door(self, bastions: Bastions) -> Iterator[Transport]:
        """The way to the servers as it will be, by files on no disk: looking leaves nothing."""
        with open_memory() as config, open_memory() as known:
            place = f"/proc/{os.getpid()}/fd"
            text = format_ssh_config(self.members, self.config.key, f"{place}/{known.fileno()}", bastions)
            for file, content in ((config, text), (known, format_known_hosts(self._keyed()))):
                file.write(content.encode())
                file.flush()
            yield Transport(f"{place}/{config.fileno()}", self.elsewhere)

    def _kept_door(self) -> Transport:
        return Transport(str(self.directory / "ssh_config"), self.elsewhere)

    def _keyed(self) -> tuple[Member, ...]:
        return tuple(replace(member, key=self.keys.get(member.known_name, "")) for member in self.members)

    def gather(self) -> Facts:
        """What the servers and this machine have. Raises CpuftError that names every server that failed."""
        bastions = self._find_bastions()
        with self._door(bastions) as transport:
            facts = replace(self._look(transport), bastions=bastions)
        refuse(self.config, facts)
        wanted = "" if self.config.pins else find_python({member.address: own.python for member, own in facts.servers})
        supply = gather_supply(self.directory / "wheels", self.config.wheels, wanted, self.environ)
        pins = add_own(self._read_pins(), supply.wheels[0]) if self.config.pins else list_pins(supply.wheels)
        return replace(facts, supply=supply, pins=pins)

    def gather_remains(self) -> Facts:
        """What the servers have, by the way that is kept, as long as there is one."""
        if self.directory.exists():
            return self._look(self._kept_door())
        return Facts((), {}, str(self.directory), self.hostfile)

    def _look(self, transport: Transport) -> Facts:
        surveys = side_by_side(partial(self._survey, transport), self.members)
        lock = Path(f"{self.hostfile}.lock")
        files = read_files(self.directory, Path(self.hostfile)) | ({str(lock): read_raw(lock)} if lock.exists() else {})
        # A plan goes by the configuration that is kept.
        kept = {transport.config: str(self.directory / "ssh_config")}
        ways = {
            member.address: tuple(kept.get(word, word) for word in transport.way(Host(member.address)))
            for member in self.members
        }
        return Facts(tuple(zip(self._keyed(), surveys)), files, str(self.directory), self.hostfile, ways)

    def _survey(self, transport: Transport, member: Member) -> ServerFacts:
        """Facts of one server. Raises CpuftError when it cannot be asked."""
        source = Path(__file__).with_name("servers_survey.sh").read_text(encoding="utf-8")
        words = ("sh", "-s", self.config.prefix, self.config.name)
        answer = transport.run(Host(member.address), words, source, _SURVEY_SECONDS)
        return parse_survey(answer.output or answer.errors, member.address)

    def _read_pins(self) -> tuple[str, ...]:
        try:
            text = Path(self.config.pins).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CpuftError(f"there is no file {self.config.pins}, which --pins names: name a file of pins") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CpuftError(f"--pins {self.config.pins} cannot be read ({error}): name a file of pins") from None
        return parse_pins(text, self.config.pins)

    def plan(self, facts: Facts) -> Plan:
        """What is missing."""
        return plan_servers(self.config, facts)

    def plan_down(self, facts: Facts) -> Plan:
        """What is left, on the servers and here."""
        return plan_servers_down(self.config, facts)

    def describe_hosts(self) -> list[str]:
        """What a server is and has now, or why it cannot be asked."""
        found = attempt(partial(self._survey, self._kept_door()), self.members)
        states = [f"down: {own}" if isinstance(own, CpuftError) else describe_server(own) for own in found]
        return [f"{member.address}  {text}" for member, text in zip(self.members, states)]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
