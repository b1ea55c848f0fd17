"""The verbs of a cluster of servers: pin host keys, survey all side by side, plan with `hosts`, execute, look again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.cluster import Access, gather_facts
from cpuft.hosts.door import Door, attempt, side_by_side
from cpuft.hosts.hostfile import NAME, Host, format_hostfile
from cpuft.hosts.registry import FILE_NAME, Entry, check_name, format_entry, read_entry, refuse_other_kind, state_root
from cpuft.hosts.ssh import fingerprint, scan_host_key
from cpuft.loader import load, parse_json
from cpuft.options.clusters import HostsConfig
from cpuft.plan import Plan, Step, format_plan
from cpuft.provision.ownership import check_places, check_prefix, plan_removal, read_raw
from cpuft.provision.reconcile import lock, make_runner, reconcile, run_stages
from cpuft.provision.servers import planning
from cpuft.provision.servers.planning import ServerFacts
from cpuft.provision.sshfiles import Member, format_known_hosts, format_known_name, format_ssh_config
from cpuft.provision.wheels import Wheel, fetch_wheels, list_pins, read_wheels

Say = Callable[[str], None]
Ask = Callable[[str], bool]
_SURVEY_SECONDS = 120.0
"""Checksums of a gigabyte of wheels on a slow disk."""


class Servers:
    """The servers of one cluster, as the user named them, and where their files are on this machine."""

    def __init__(self, config: HostsConfig, environ: Mapping[str, str], hostfile: str = "") -> None:
        names = [name.strip() for name in config.hosts.split(",") if name.strip()]
        if not names or len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)):
            raise CpuftError(f"--hosts {config.hosts!r}: give different names or addresses, a comma between")
        check_name(config.name)
        check_prefix(config.prefix)
        # What is remembered must hold wherever the next command is typed.
        paths = {name: getattr(config, name) for name in ("key", "wheels", "pins") if getattr(config, name)}
        absolute = {name: str(Path(path).expanduser().absolute()) for name, path in paths.items()}
        self.config = replace(config, **absolute)  # type: ignore[arg-type]  # all of them are texts
        self.members = tuple(Member(name, name, config.user, config.port) for name in names)
        self.hosts = {name: Host(name) for name in names}
        self.directory = state_root(environ) / config.name
        self.door = Door(str(self.directory / "ssh_config"))
        self.known_hosts = self.directory / "known_hosts"
        self.wheels: tuple[Wheel, ...] = ()
        self.pins: tuple[str, ...] = ()
        self.hostfile = hostfile or str(Path("hostfiles", config.name).absolute())

    def pin_host_keys(self, ask: Ask) -> None:
        """Learn the keys of servers never seen before, each after `ask` has agreed; known ones are never replaced."""
        known = self._read_known()
        unknown = [member for member in self.members if format_known_name(member) not in known]
        scanned = side_by_side(lambda member: scan_host_key(Host(member.address, port=member.port)), unknown)
        for member, key in zip(unknown, scanned):
            if not ask(f"{member.address} shows the key {key.split()[0]} {fingerprint(key)}. Is that right?"):
                raise CpuftError(f"the key of {member.address} was not accepted: compare it there with ssh-keygen -l")
            known[format_known_name(member)] = key
        keys = tuple(known[format_known_name(member)] for member in self.members)
        key_path = str(Path(self.config.key).expanduser().absolute()) if self.config.key else ""
        # This one first: it carries our mark.
        write_text(Path(self.door.config), format_ssh_config(self.members, key_path, str(self.known_hosts)))
        write_text(self.known_hosts, format_known_hosts(self.members, keys))

    def _read_known(self) -> dict[str, str]:
        if not self.known_hosts.exists():
            return {}
        lines = self.known_hosts.read_text(encoding="utf-8").splitlines()
        return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if " " in line}

    def survey(self) -> tuple[ServerFacts, ...]:
        """Facts of every server. Raises CpuftError that names every one that failed."""
        return tuple(side_by_side(self.survey_one, self.members))

    def survey_one(self, member: Member) -> ServerFacts:
        """Facts of one server. Raises CpuftError when it cannot be asked."""
        source = Path(__file__).with_name("survey.sh").read_text(encoding="utf-8")
        words = ("sh", "-s", self.config.prefix, self.config.name)
        answer = self.door.run(self.hosts[member.address], words, source, _SURVEY_SECONDS)
        return planning.parse_survey(answer.output or answer.errors, member.address)

    def choose_wheels(self, facts: tuple[ServerFacts, ...], environ: Mapping[str, str], say: Say) -> None:
        """Decide what the servers install: --wheels, --pins, or else wheels that are downloaded here and pushed.

        Raises
        ------
        CpuftError: a server cannot take it, or the wheels or pins cannot be had.
        """
        self._refuse(facts)
        folder = Path(self.config.wheels) if self.config.wheels else None
        if not folder and not self.config.pins:
            folder = fetch_wheels(planning.find_python(self.members, facts), environ, say)
        self.wheels = read_wheels(self.directory / "wheels", folder)
        self.pins = (*self._read_pins(), self.wheels[0].pin) if self.config.pins else list_pins(self.wheels)
        self._refuse(facts)

    def _read_pins(self) -> tuple[str, ...]:
        try:
            lines = Path(self.config.pins).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CpuftError(f"--pins {self.config.pins} cannot be read ({error}): name a file of pins") from None
        pins = tuple(line.split("#")[0].strip() for line in lines if line.split("#")[0].strip())
        loose = [pin for pin in pins if "==" not in pin]
        if loose:
            raise CpuftError(f"--pins {self.config.pins}: {loose[0]!r} is not exact: write name==version")
        return pins

    def _refuse(self, facts: tuple[ServerFacts, ...]) -> None:
        # A wheel takes its own size, the same unpacked some three times over, and room to work.
        need_kb = sum(os.path.getsize(wheel.path) for wheel in self.wheels) * 4 // 1024 + (100 << 10)
        brings_pip = any(wheel.name.startswith("pip-") for wheel in self.wheels) or not (
            self.wheels or self.config.pins
        )
        problems = [
            planning.check_server(member.address, own, self.config, brings_pip, need_kb)
            for member, own in zip(self.members, facts)
        ]
        if any(problems):
            raise CpuftError("; ".join(problem for problem in problems if problem))

    def plan(self, facts: tuple[ServerFacts, ...]) -> Plan:
        """What is missing. Raises CpuftError that names every server that cannot be provisioned."""
        self._refuse(facts)
        known = self.known_hosts.read_text(encoding="utf-8")
        return planning.plan_hosts(self.config, self.members, facts, self.wheels, self.pins, known)

    def plan_down(self, facts: tuple[ServerFacts, ...]) -> Plan:
        """What is to be taken from the servers."""
        return planning.plan_hosts_down(self.config, self.members, facts)

    def plan_removal(self) -> tuple[Step, ...]:
        """What is to be taken from here."""
        files = {self.hostfile: read_raw(Path(self.hostfile))}
        return plan_removal(files, str(self.directory), self.hostfile, f"{self.hostfile}.lock")

    def entry(self) -> Entry:
        """What is remembered of the cluster."""
        python = f"{self.config.prefix}/env/bin/python"
        there = f"{planning.cluster_dir(self.config)}/ssh_config"
        options = {key: str(value) for key, value in asdict(self.config).items()}
        return Entry(self.config.name, "hosts", self.hostfile, self.door.config, python, {}, options, there)

    def read_hosts(self) -> dict[str, dict[str, object]]:
        """What the lock file keeps of each host."""
        found = gather_facts(tuple(self.hosts.values()), Access(self.door, self.entry().python))
        return {
            name: {"cpu": own.cpu_model, "cores": len(own.cores), "kernel": own.kernel, "python": own.python}
            for name, own in zip(self.hosts, found)
        }

    def write_lock(self) -> None:
        """Write the lock file beside the hostfile: pins, and CPU and kernel of every host."""
        text = json.dumps({"format": 1, "pins": sorted(self.pins), "hosts": self.read_hosts()}, indent=2) + "\n"
        write_text(Path(f"{self.hostfile}.lock"), text)


def make(config: HostsConfig, environ: Mapping[str, str], ask: Ask, say: Say) -> str:
    """Make the servers a cluster, or repair it; a sentence for the user."""
    servers = Servers(config, environ)
    refuse_other_kind(state_root(environ), config.name, "hosts")
    check_places(str(servers.directory), servers.hostfile)
    with lock(Path(f"{servers.directory}.lock")):
        servers.pin_host_keys(ask)
        found = servers.survey()
        servers.choose_wheels(found, environ, say)
        # Remembered before anything is done there, so that `down` finds what a killed run has left.
        write_text(servers.directory / FILE_NAME, format_entry(servers.entry()))
        run = make_runner(servers.door, tuple(servers.hosts.values()))
        reconcile(servers.survey, servers.plan, run, say, found)
        head = f"# Cluster {config.name}, made by cpuft provision.\n"
        write_text(Path(servers.hostfile), head + format_hostfile(tuple(Host(m.address) for m in servers.members)))
        servers.write_lock()
    return f"cluster {config.name}: {len(servers.members)} hosts; next: cpuft doctor --cluster {config.name}"


def show(config: HostsConfig, environ: Mapping[str, str], ask: Ask) -> str:
    """The first plan, as a script."""
    servers = Servers(config, environ)
    servers.pin_host_keys(ask)
    return format_plan(plan_again(servers, environ))


def recall(entry: Entry, environ: Mapping[str, str]) -> Servers:
    """The servers of a cluster that was made before."""
    from cpuft.options.flags import parse_arguments

    words = [f"--{key.replace('_', '-')}={value}" for key, value in entry.options.items()]
    return Servers(parse_arguments(HostsConfig, words), environ, entry.hostfile)


def plan_again(servers: Servers, environ: Mapping[str, str]) -> Plan:
    """What a new `cpuft provision hosts` would do now."""
    facts = servers.survey()
    servers.choose_wheels(facts, environ, lambda text: None)
    return servers.plan(facts)


def describe(name: str, environ: Mapping[str, str]) -> str:
    """A line a host: what it is and has now, or why it cannot be asked."""
    entry = read_entry(state_root(environ), name)
    servers = recall(entry, environ)

    found = attempt(servers.survey_one, servers.members)
    states = [f"down: {own}" if isinstance(own, CpuftError) else planning.describe_server(own) for own in found]
    lines = [f"  {member.address}  {text}\n" for member, text in zip(servers.members, states)]
    return f"cluster {entry.name} (hosts), hostfile {entry.hostfile}\n" + "".join(lines)


def list_drift(entry: Entry, environ: Mapping[str, str]) -> list[str]:
    """What has drifted, host by host: what a new run would do, and what differs from the lock file."""
    servers = recall(entry, environ)
    stages = plan_again(servers, environ).stages
    lines = [f"{step.host}: {step.why}" for stage in stages for step in stage]
    locked = read_lock(Path(f"{entry.hostfile}.lock"))
    for name, now in servers.read_hosts().items():
        was = locked.get(name, now)
        lines += [f"{name}: {key} was {was.get(key)} and is {now[key]}" for key in now if was.get(key) != now[key]]
    return lines


def read_lock(path: Path) -> dict[str, dict[str, Any]]:
    """What the lock file keeps of each host; nothing where there is none. Raises CpuftError for a damaged one."""
    if not path.exists():
        return {}
    try:
        values = load(dict[str, Any], parse_json(path.read_text(encoding="utf-8")))
        return load(dict[str, dict[str, Any]], values.get("hosts"), "hosts")
    except (OSError, ValueError) as error:
        raise CpuftError(f"{path} is damaged ({error}): remove it, and run cpuft provision hosts again") from None


def take_down(entry: Entry, environ: Mapping[str, str], say: Say) -> None:
    """Take away what was put on the servers, then what is remembered of them here."""
    servers = recall(entry, environ)
    with lock(Path(f"{servers.directory}.lock")):
        reconcile(servers.survey, servers.plan_down, make_runner(servers.door, tuple(servers.hosts.values())), say)
        run_stages(Plan((servers.plan_removal(),)), make_runner(), say)


def show_down(entry: Entry, environ: Mapping[str, str]) -> str:
    """What `take_down` would do, as a script."""
    servers = recall(entry, environ)
    return format_plan(Plan((*servers.plan_down(servers.survey()).stages, servers.plan_removal())))
