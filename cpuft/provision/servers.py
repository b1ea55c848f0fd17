"""Clusters of existing servers over ssh, on which the shell scripts `servers_*.sh` beside this file run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from cpuft.errors import CpuftError, last_line
from cpuft.execute import open_memory_file, path_of
from cpuft.files import REMOVE, hash_text, read_given_text, read_raw
from cpuft.hardware import ARCHITECTURES
from cpuft.hosts.cluster import WORK_ROOT
from cpuft.hosts.hostfile import NAME, NEEDS_IPV4, Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.hosts.ssh_config import (
    Bastions,
    Login,
    Member,
    find_bastions,
    format_inside,
    format_known_hosts,
    format_ssh_config,
    parse_jumps,
)
from cpuft.hosts.transport import SshTransport, Transport, fingerprint, map_hosts, scan_host_key, try_hosts
from cpuft.plans import Plan, Step
from cpuft.provision.base import Ask, Provider
from cpuft.provision.cluster_files import (
    check_prefix,
    plan_file,
    plan_files,
    plan_key,
    plan_removal,
    read_files,
)
from cpuft.provision.options import HostsConfig
from cpuft.provision.wheels import INSTALL, Supply, add_own, gather_supply, list_pins, make_stamp, parse_pins
from cpuft.serialization import is_count

_MIN_PYTHON = (3, 10)
_PARALLEL_PUSHES = 4
"""Wheels that are sent to a host at the same time. From ten new connections on, sshd drops some (MaxStartups)."""
_PARALLEL_LOGINS = 8
"""Sessions with the head host at the same time, for the same reason."""
_SURVEY_SECONDS = 120.0
"""Enough for the hashes of a gigabyte of wheels on a slow disk."""
_HERE = Path(__file__)
_SURVEY = _HERE.with_name("servers_survey.sh").read_text(encoding="utf-8")
_RECEIVE = "set -eu\n" + _HERE.with_name("servers_receive.sh").read_text(encoding="utf-8")
_KEYS = _HERE.with_name("servers_keys.sh").read_text(encoding="utf-8")
_DOWN = f"set -eu\n{REMOVE}{_KEYS}" + _HERE.with_name("servers_down.sh").read_text(encoding="utf-8")
_AUTHORIZE = f"set -eu\n{_KEYS}authorize"
_KEY_LINE = re.compile(r"(?!.* AAAA.* AAAA)(?:[^#].*\s)?(ssh-ed25519 [^ ]* (cpuft-[a-z0-9]+))")
"""A cluster's key in authorized_keys, perhaps after options of the user's; its groups are the key and its comment."""


@dataclass(frozen=True)
class ServerFacts:
    """What servers_survey.sh found on one server."""

    os: str = ""
    """Name and version of the distribution: "debian 12"."""
    kernel: str = ""
    python: str = ""
    """Such as "3.11.2"; empty if python3 is missing."""
    stamp: str = ""
    """Stamp of the installed environment; empty if there is none, or an incomplete one."""
    foreign: str = ""
    """Why the prefix cannot be used, such as a folder that cpuft did not make; empty if it can."""
    key: str = ""
    """The cluster's public key as in a .pub file, on a head host; empty if there is none."""
    free_kb: int = 0
    """At the prefix, in KiB."""
    ensurepip: bool = False
    """Whether python3 can make an environment with pip."""
    writable: bool = False
    """Whether the user may write to the prefix, or to the nearest folder above it that exists."""
    marked: bool = False
    """Whether cpuft installed something below the prefix, or began to."""
    wheels: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each wheel in the prefix's folder `wheels`, by file name."""
    sums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each of the cluster's ssh files on the server, by file name; "" for a missing file."""
    authorized: tuple[str, ...] = ()
    """Lines of the user's authorized_keys."""
    machine: str = "x86_64"
    """Architecture, as in uname -m."""
    musl: bool = False
    """Whether its C library is musl, for which torch has no wheels."""


def parse_survey(text: str, host: str) -> ServerFacts:
    """Parse lines "key value" of servers_survey.sh; missing keys give "" or False. CpuftError: no `os` or `free_kb`."""
    lines = [(key, value.strip()) for key, _, value in (line.partition(" ") for line in text.split("\n"))]
    found = dict(lines)
    if "os" not in found or not is_count(found.get("free_kb", ""), least=0):
        raise CpuftError(
            f"host {host} could not be examined (its answer: {text.strip()[-200:]!r}): is it a Linux host with sh?"
        )
    texts = {name: found.get(name, "") for name in ("os", "kernel", "machine", "python", "stamp", "foreign", "key")}
    return ServerFacts(
        **texts,
        free_kb=int(found["free_kb"]),
        musl="musl" in found,
        ensurepip="ensurepip" in found,
        writable="writable" in found,
        marked="marked" in found,
        wheels={value.partition(" ")[0]: value.partition(" ")[2] for key, value in lines if key == "wheel"},
        sums={key.removeprefix("sum_"): value for key, value in lines if key.startswith("sum_")},
        authorized=tuple(value for key, value in lines if key == "authorized"),
    )


def check_server(host: str, facts: ServerFacts, config: HostsConfig, has_pip: bool, need_kb: int) -> str:
    """Return "HOST: REASON", mostly with advice, for the first reason why a server cannot be provisioned, else "".
    `has_pip` says that pip will be sent, and `need_kb` how many KiB a server without an environment needs.
    """
    if facts.machine not in ARCHITECTURES:
        return f"{host}: its CPU is {facts.machine or 'unknown'}, and cpuft needs {' or '.join(ARCHITECTURES)}"
    if facts.musl:
        return f"{host}: its C library is musl, and torch needs glibc: use Debian, Ubuntu or another system with glibc"
    version = tuple(int(part) for part in re.findall(r"\d+", facts.python)[:2])
    if version < _MIN_PYTHON:
        found = f"Python is {facts.python}" if facts.python else "Python is missing"
        return f"{host}: {found}, and cpuft needs 3.10 or newer: apt-get install python3"
    if not facts.writable:
        return f"{host}: {config.prefix} cannot be written: log in as root, or give another --prefix"
    if facts.foreign:
        return f"{host}: {facts.foreign}: move it away, or give another --prefix"
    if not facts.ensurepip and not has_pip:
        return f"{host}: there is no pip: apt-get install python3-venv, or leave out --pins and --wheels"
    if not facts.stamp and facts.free_kb < need_kb:
        free, need = facts.free_kb >> 10, need_kb >> 10
        return f"{host}: {config.prefix} has {free} MB of free space and needs {need} MB: make room there"
    return ""


def describe_server(facts: ServerFacts) -> str:
    """Return `up, debian 12, x86_64, kernel 6.1.0, Python 3.11.2, environment 0123abcd, 40 GB free`, perhaps with
    `Python missing` and `no environment`.
    """
    environment = f"environment {facts.stamp[:8]}" if facts.stamp else "no environment"
    python, free = facts.python or "missing", f"{facts.free_kb >> 20} GB free"
    return ", ".join(["up", facts.os, facts.machine, f"kernel {facts.kernel}", f"Python {python}", environment, free])


def find_common(what: str, found: dict[str, str], advice: str) -> str:
    """Return the value that all servers (one or more) have, such as "3.11"; CpuftError with `advice` if they differ."""
    first, *others = dict.fromkeys(found.values())
    if others:
        listed = ", ".join(f"{name} has {value or 'none'}" for name, value in found.items())
        raise CpuftError(f"servers of one cluster need the same {what}, and {listed}: {advice}")
    return first


@dataclass(frozen=True)
class ClusterFacts:
    """What planning a cluster of servers needs to know."""

    servers: tuple[tuple[Member, ServerFacts], ...]
    """The head host comes first."""
    files: Mapping[str, str]
    """Texts of the cluster's files on this machine, by path."""
    entry: Entry
    """The record that the cluster should have on this machine."""
    command_prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The ssh command for each server, by address: argv to which a shell line is appended."""
    bastions: Bastions = ()
    """Those between this machine and the servers, the first one first."""
    supply: Supply = Supply(())
    pins: tuple[str, ...] = ()
    """name==version of each package that the servers install, perhaps with `--hash=` options."""
    can_lose_head: bool = False
    """Whether every server must be able to replace the head host."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What ssh said where the head host could not log in although nothing is missing, by address of the server."""

    @property
    def directory(self) -> str:
        """Directory of the cluster's files on this machine; only the hostfile is elsewhere."""
        return Path(self.entry.ssh_config).parent.as_posix()

    @property
    def head_hosts(self) -> tuple[tuple[Member, ServerFacts], ...]:
        """The servers that log in to all others: the head host, or all servers if each may have to replace it."""
        return self.servers if self.can_lose_head else self.servers[:1]

    @property
    def members(self) -> tuple[Member, ...]:
        """The servers as ssh sees them, the head host first."""
        return tuple(member for member, _ in self.servers)

    @property
    def stamp(self) -> str:
        """Stamp of the environment that the servers should have."""
        return make_stamp(self.pins, self.supply.wheels)


def _check_servers(config: HostsConfig, facts: ClusterFacts) -> None:
    wheels = facts.supply.wheels
    # Each wheel takes its own size and about three times that when unpacked; 100 MB are for work files.
    need_kb = sum(wheel.size for wheel in wheels) * 4 // 1024 + (100 << 10)
    has_pip = any(wheel.name.startswith("pip-") for wheel in wheels) or not (wheels or config.pins)
    has_pip |= not facts.supply.complete
    problems = [check_server(member.address, own, config, has_pip, need_kb) for member, own in facts.servers]
    if any(problems):
        raise CpuftError("; ".join(problem for problem in problems if problem))


def _check_logins(config: HostsConfig, facts: ClusterFacts) -> None:
    if not facts.refused:
        return
    head, folder = facts.members[0].address, _cluster_dir(config)
    refusing, message = next(iter(facts.refused.items()))
    raise CpuftError(
        f"no rank can start on {', '.join(facts.refused)}, because the head host {head} cannot log in there "
        f"({message[-200:]}): see the reason on {head} with `ssh -v -F {folder}/ssh_config {refusing}`. sshd refuses "
        f"the key if AuthorizedKeysFile in /etc/ssh/sshd_config names another file than ~/.ssh/authorized_keys (append "
        f"{folder}/id_ed25519.pub of {head} to that file), if other users can write to the home folder, or if "
        "AllowUsers leaves this user out. Then run the same command again"
    )


def plan_servers(config: HostsConfig, facts: ClusterFacts) -> Plan:
    """Plan what is missing on the servers and on this machine, up to the download of wheels if these are missing.

    Raises CpuftError when a server cannot be provisioned, or when the head host cannot log in to a complete one.
    """
    _check_servers(config, facts)
    _check_logins(config, facts)
    stages = [_plan_entry(config, facts), list(facts.supply.missing)]
    notes = [
        f"{one.address} shows the host key {one.key.split()[0]} {fingerprint(one.key)}: cpuft asks if that is right"
        for one in facts.members
        if facts.entry.kind == "hosts"
        and format_known_hosts([one]) not in facts.files.get(f"{facts.directory}/known_hosts", "")
    ]
    if facts.supply.complete:
        hosts = format_hostfile(tuple(Host(one.address) for one in facts.members))
        hostfile = {facts.entry.hostfile: f"# Cluster {config.name}, made by cpuft provision.\n{hosts}"}
        stages += [*_plan_hosts(config, facts), plan_files(hostfile, facts.files, "write the hostfile")]
    else:
        notes.append("The steps on the servers can be shown when the wheels are downloaded.")
    return Plan(tuple(tuple(stage) for stage in stages if stage), tuple(notes), facts.command_prefixes)


def _plan_entry(config: HostsConfig, facts: ClusterFacts) -> list[Step]:
    """Plan the registry entry and ssh files. They come first, so that `down` finds what a killed run left behind."""
    base, members = facts.directory, facts.members
    texts = {
        f"{base}/{FILE_NAME}": format_entry(facts.entry),
        f"{base}/ssh_config": format_ssh_config(members, config.key, f"{base}/known_hosts", facts.bastions),
        f"{base}/known_hosts": format_known_hosts(members),
    }
    return plan_files(texts, facts.files, "register the cluster and the host keys of its hosts")


def _cluster_dir(config: HostsConfig) -> str:
    return f"{config.prefix}/clusters/{config.name}"


def _key_comment(config: HostsConfig) -> str:
    """Return the comment of the cluster's keys, by which `down` finds the lines of all of them, also of lost keys."""
    return f"cpuft-{config.name}"


def _plan_hosts(config: HostsConfig, facts: ClusterFacts) -> list[list[Step]]:
    """Return the stages that do what is missing on the servers; empty inner lists for what is not.

    A head host's key never leaves that host; a new one can log in after the next plan, which knows its public half.
    """
    keys = [own.key for _, own in facts.head_hosts if own.key]
    command = ("sh", "-c", f"set -eu\n{INSTALL}", "install", config.prefix, facts.stamp, *facts.pins)
    install = [
        Step(f"install the environment at {config.prefix}/env", command, host=member.address)
        for member, found in facts.servers
        if found.stamp != facts.stamp
    ]
    login = [
        Step("let the head host log in", ("sh", "-c", _AUTHORIZE), host=member.address, stdin="".join(new))
        for member, found in facts.servers
        if (new := [f"{key}\n" for key in keys if key not in _list_keys(found)])
    ]
    key, why = f"{_cluster_dir(config)}/id_ed25519", "generate the cluster's own key"
    heads = [member.address for member, own in facts.head_hosts if not own.key]
    make_keys = [plan_key(key, why, _key_comment(config), host=address) for address in heads]
    return [make_keys, *_plan_wheels(config, facts), install, login, _plan_ssh_files(config, facts)]


def _plan_wheels(config: HostsConfig, facts: ClusterFacts) -> list[list[Step]]:
    missing = {
        wheel: [
            member.address
            for member, own in facts.servers
            if own.stamp != facts.stamp and own.wheels.get(wheel.name) != wheel.sha256
        ]
        for wheel in facts.supply.wheels
    }
    size = sum(wheel.size * len(addresses) for wheel, addresses in missing.items()) / 1e6
    part = f"push wheels to the hosts, {size:.0f} MB in all"
    stages: list[list[Step]] = []
    for number, wheel in enumerate(facts.supply.wheels):
        stages += [[]] if number % _PARALLEL_PUSHES == 0 else []
        command = ("sh", "-c", _RECEIVE, "receive", f"{config.prefix}/wheels/{wheel.name}", wheel.sha256)
        stages[-1] += [
            Step(f"push {wheel.name}", command, host=address, stdin_file=wheel.path, part=part)
            for address in missing[wheel]
        ]
    return stages


def _plan_ssh_files(config: HostsConfig, facts: ClusterFacts) -> list[Step]:
    folder = _cluster_dir(config)
    texts = format_inside(facts.members, folder, facts.entry.python, facts.entry.notice, facts.entry.renewal)
    return [
        plan_file(f"{folder}/{name}", text, "configure how the head host reaches the hosts", host=member.address)
        for member, own in facts.head_hosts
        for name, text in texts.items()
        if own.sums.get(name) != hash_text(text)
    ]


def plan_servers_down(config: HostsConfig, facts: ClusterFacts) -> Plan:
    """Plan the removal of key and, unless another cluster uses them, environment and inputs from servers, then of the
    files here.
    """
    comment = _key_comment(config)
    command = ("sh", "-c", _DOWN, "remove", config.prefix, config.name, comment, WORK_ROOT)
    steps = tuple(
        Step("remove the key, and the environment unless another cluster uses it", command, host=member.address)
        for member, own in facts.servers
        if own.marked or own.stamp or own.key or comment in _list_keys(own).values()
    )
    stages = (steps, plan_removal(facts.files, facts.directory, facts.entry.hostfile))
    return Plan(tuple(stage for stage in stages if stage), command_prefixes=facts.command_prefixes)


def _list_keys(server: ServerFacts) -> dict[str, str]:
    """Return the clusters' keys that may log in on a server, each with its comment."""
    return {match[1]: match[2] for match in map(_KEY_LINE.fullmatch, server.authorized) if match}


class Servers(Provider[HostsConfig, ClusterFacts]):
    """A cluster of existing servers over ssh. CpuftError: --hosts (not empty, no name twice) or --prefix is invalid."""

    kind = "hosts"
    here: str | None = None
    """Of the transports to the servers (`Transport.here`)."""
    can_lose_head = False
    """Whether every server must be able to replace the head host."""

    def __init__(self, config: HostsConfig, environ: Mapping[str, str], entry: Entry | None = None) -> None:
        # The registry stores the options, and later commands may run in another working directory.
        key, wheels, pins = map(_absolute, (config.key, config.wheels, config.pins))
        super().__init__(replace(config, key=key, wheels=wheels, pins=pins), environ, entry)
        check_prefix(config.prefix)
        names = _split_hosts(config.hosts)
        if not names or len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)):
            raise CpuftError(f"--hosts {config.hosts!r}: give different names or addresses, separated by commas")
        if six := [name for name in names if ":" in name]:
            raise CpuftError(f"--hosts: {six[0]} {NEEDS_IPV4}")
        self.members = tuple(Member(name, name, config.user, config.port) for name in names)
        self.summary = f"{len(names)} hosts"
        lines = read_raw(self.directory / "known_hosts").splitlines()
        self.keys = dict(line.split(" ", 1) for line in lines if " " in line)

    def check(self) -> None:
        """Check what every kind does, and raise CpuftError if --hosts lacks a recorded host or --prefix has changed."""
        super().check()
        before = entry.options if (entry := self.find_record()) else {}
        # The new record would replace the one by which `down` finds what is installed there.
        given, prefix = _split_hosts(self.config.hosts), before.get("prefix", self.config.prefix)
        if missing := ", ".join(name for name in _split_hosts(before.get("hosts", "")) if name not in given):
            what, give = f"has {missing}, which --hosts leaves out", f"add {missing} to --hosts"
        elif prefix != self.config.prefix:
            what, give = f"was made with --prefix {prefix}", f"give --prefix {prefix} again"
        else:
            return
        raise CpuftError(
            f"cluster {self.name} {what}: {give}, or remove the cluster first with `cpuft provision down {self.name}`, "
            "or choose another --name"
        )

    def confirm(self, ask: Ask) -> None:
        """Fetch the unknown host keys of servers, and ask whether each is right unless --accept-host-keys is given.

        A plan writes accepted keys. Raises CpuftError: a server shows no key, or the user refuses one.
        """
        unknown, refused = [member for member in self.members if member.known_name not in self.keys], list[str]()
        with self._temporary_transport(self._find_bastions()) as transport:
            shown = map_hosts(lambda member: scan_host_key(Host(member.address), transport.config), unknown)
        for member, key in zip(unknown, shown):
            shows = f"{key.split()[0]} {fingerprint(key)}"
            question = f"{member.address} shows the host key {shows}. Is that right?"
            if not self.config.accept_host_keys and not ask(question):
                refused.append(f"{member.address} ({shows})")
        if refused:
            raise CpuftError(
                f"the host key of {', '.join(refused)} is unknown and was not accepted: compare it with what "
                "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on the host, then answer yes, or give "
                "--accept-host-keys"
            )
        self.keys |= {member.known_name: key for member, key in zip(unknown, shown)}

    def _find_bastions(self) -> Bastions:
        found = find_bastions(Login("", 22, jumps=parse_jumps(self.config.jump, "--jump")))
        both = {jump.name for jump, _ in found} & {member.name for member in self.members}
        if both:
            raise CpuftError(f"--jump {both.pop()} is also in --hosts: give the hosts by their addresses behind it")
        return tuple((jump.name, login) for jump, login in found)

    @contextmanager
    def _temporary_transport(self, bastions: Bastions) -> Iterator[Transport]:
        """Provide a transport to the servers whose ssh configuration is in memory, so that nothing is written."""
        with open_memory_file() as config, open_memory_file() as known:
            text = format_ssh_config(self.members, self.config.key, path_of(known), bastions)
            for file, content in ((config, text), (known, format_known_hosts(self._list_members()))):
                file.write(content.encode())
                file.flush()
            yield SshTransport(path_of(config), here=self.here)

    def _make_transport(self) -> SshTransport:
        return SshTransport((self.directory / "ssh_config").as_posix(), here=self.here)

    def _list_members(self) -> tuple[Member, ...]:
        return tuple(replace(member, key=self.keys.get(member.known_name, "")) for member in self.members)

    def gather(self) -> ClusterFacts:
        """Examine the servers, and the files and wheels here. CpuftError: a server or the wheels cannot be used."""
        bastions = self._find_bastions()
        with self._temporary_transport(bastions) as transport:
            facts = replace(self._examine(transport), bastions=bastions)
        _check_servers(self.config, facts)
        pythons = {member.address: ".".join(own.python.split(".")[:2]) for member, own in facts.servers}
        machines = {member.address: own.machine for member, own in facts.servers}
        python = "" if self.config.pins else find_common("Python", pythons, "install one on all of them")
        machine = find_common("architecture", machines, "make a cluster of each")
        supply = gather_supply(self.directory / "wheels", self.config.wheels, python, self.environ, machine)
        pins = list_pins(supply.wheels)
        if given := self.config.pins:
            text = read_given_text(given, "--pins", "give a file with one name==version per line")
            pins = add_own(parse_pins(text, given), supply.wheels[0])
        facts = replace(facts, supply=supply, pins=pins)
        if supply.complete and not any(_plan_hosts(self.config, facts)):
            with self._temporary_transport(bastions) as transport:
                return replace(facts, refused=self._try_logins(transport))
        return facts

    def _try_logins(self, transport: Transport) -> dict[str, str]:
        """Return the last line of ssh where the head host cannot log in as mpirun does, by address."""
        head, *others = [member.address for member in self.members]
        ssh = ("ssh", "-F", f"{_cluster_dir(self.config)}/ssh_config")

        def log_in(address: str) -> str:
            answer = transport.run(Host(head), (*ssh, address, "true"), seconds=_SURVEY_SECONDS)
            return last_line(answer.text, "ssh said nothing") if answer.exit_code else ""

        said = zip(others, map_hosts(log_in, others, _PARALLEL_LOGINS))
        return {address: message for address, message in said if message}

    def gather_remains(self) -> ClusterFacts:
        """Examine the servers, or none if the cluster's directory is missing. CpuftError: one cannot be examined."""
        if self.directory.exists():
            return self._examine(self._make_transport())
        return ClusterFacts((), {}, self._make_entry())

    def _examine(self, transport: Transport) -> ClusterFacts:
        surveys = map_hosts(partial(self._survey, transport), self.members)
        files = read_files(self.directory, Path(self.hostfile))
        # The plan must use the configuration that will be in the cluster's directory, not one in memory.
        permanent = {transport.config: (self.directory / "ssh_config").as_posix()}
        command_prefixes = {
            member.address: tuple(permanent.get(word, word) for word in transport.command_prefix(Host(member.address)))
            for member in self.members
        }
        servers, entry = tuple(zip(self._list_members(), surveys)), self._make_entry()
        return ClusterFacts(servers, files, entry, command_prefixes, can_lose_head=self.can_lose_head)

    def _make_entry(self) -> Entry:
        # --accept-host-keys applies to one run only.
        options = {key: str(value) for key, value in asdict(replace(self.config, accept_host_keys=False)).items()}
        here, there = (self.directory / "ssh_config").as_posix(), f"{_cluster_dir(self.config)}/ssh_config"
        python = f"{self.config.prefix}/env/bin/python"
        return Entry(self.name, self.kind, self.hostfile, here, python, {}, options, there)

    def _survey(self, transport: Transport, member: Member) -> ServerFacts:
        argv = ("sh", "-s", self.config.prefix, self.config.name)
        answer = transport.run(Host(member.address), argv, _SURVEY, _SURVEY_SECONDS)
        return parse_survey(answer.output or answer.errors, member.address)

    def plan(self, facts: ClusterFacts) -> Plan:
        """Plan what is missing; without wheels, up to their download. CpuftError if a server cannot be provisioned."""
        return plan_servers(self.config, facts)

    def plan_down(self, facts: ClusterFacts) -> Plan:
        """Plan the removal of what is left here and on the servers, but of an environment that another cluster uses."""
        return plan_servers_down(self.config, facts)

    def describe_hosts(self) -> list[str]:
        """Return `ADDRESS  STATE` for each server, in order; STATE begins with `up` or `down`."""
        found = try_hosts(partial(self._survey, self._make_transport()), self.members)
        states = [f"down: {own}" if isinstance(own, CpuftError) else describe_server(own) for own in found]
        return [f"{member.address}  {text}" for member, text in zip(self.members, states)]


def _split_hosts(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _absolute(path: str) -> str:
    return Path(path).expanduser().absolute().as_posix() if path else ""
