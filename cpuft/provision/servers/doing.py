"""A cluster of servers: how they are asked, over ssh, side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.execute import open_memory
from cpuft.hosts.hostfile import NAME, Host
from cpuft.hosts.registry import Entry
from cpuft.hosts.ssh_files import Bastions, Member, format_known_hosts, format_ssh_config
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
from cpuft.plan import Plan
from cpuft.provision.options import HostsConfig
from cpuft.provision.ownership import check_prefix, read_files, read_raw
from cpuft.provision.provider import Ask, Provider
from cpuft.provision.servers import planning
from cpuft.provision.servers.facts import ServerFacts, describe_server, find_python, parse_survey
from cpuft.provision.servers.planning import Facts
from cpuft.provision.wheels import add_own, gather_supply, list_pins, parse_pins

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
        self.size = f"{len(names)} hosts"
        self.keys = self._read_keys()
        """Of the servers, by ssh's names for them."""

    def _read_keys(self) -> dict[str, str]:
        lines = read_raw(self.directory / "known_hosts").splitlines()
        return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if " " in line}

    def learn(self, ask: Ask) -> None:
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
        planning.refuse(self.config, facts)
        wanted = "" if self.config.pins else find_python({member.address: own.python for member, own in facts.servers})
        supply = gather_supply(self.directory / "wheels", self.config.wheels, wanted, self.environ)
        pins = add_own(self._read_pins(), supply.wheels[0]) if self.config.pins else list_pins(supply.wheels)
        return replace(facts, supply=supply, pins=pins)

    def gather_left(self) -> Facts:
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
        source = Path(__file__).with_name("survey.sh").read_text(encoding="utf-8")
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
        return planning.plan_servers(self.config, facts)

    def plan_down(self, facts: Facts) -> Plan:
        """What is left, on the servers and here."""
        return planning.plan_servers_down(self.config, facts)

    def describe_hosts(self) -> list[str]:
        """What a server is and has now, or why it cannot be asked."""
        found = attempt(partial(self._survey, self._kept_door()), self.members)
        states = [f"down: {own}" if isinstance(own, CpuftError) else describe_server(own) for own in found]
        return [f"{member.address}  {text}" for member, text in zip(self.members, states)]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
