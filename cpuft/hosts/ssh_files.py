"""Texts of the ssh files of a cluster: who may log in, whose host keys are known, how to reach each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import Entry, format_entry
from cpuft.hosts.transport import Login
from cpuft.serialization import find_control

_CLIENT = """  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
  ServerAliveInterval 5
  ServerAliveCountMax 3
"""

KEYGEN = "set -eu\n" + Path(__file__).with_name("keygen.sh").read_text(encoding="utf-8")
"""Shell script that makes a key pair. Arguments: path, comment."""


@dataclass(frozen=True)
class Member:
    """A host of a cluster as ssh sees it."""

    name: str
    address: str
    user: str = "root"
    port: int = 22
    key: str = ""
    """Its public key, as in a .pub file; empty while it is not known. A line for each, where it has several."""
    reached: str = ""
    """Its address for this machine, where that is another one than for the hosts themselves."""
    mark: str = ""
    """Which machine it is whose key that is, where its address may be another one's tomorrow."""

    @property
    def known_name(self) -> str:
        """The name under which ssh keeps its key: with its port in brackets when that is not 22."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


Bastions = tuple[tuple[str, Login], ...]
"""On the way to all hosts of a cluster, the first one first: each by its name, as it was resolved."""


def format_ssh_config(members: Sequence[Member], key: str, known_hosts: str, bastions: Bastions = ()) -> str:
    """A client configuration for all hosts, by address and by name; used by ssh, mpirun and paramiko alike.

    Raises CpuftError: a value has a control character or a quotation mark, which would begin another option.
    """
    parts = ["# Made by cpuft provision: how to reach the hosts of this cluster."]
    parts += [_format_bastion(name, login) for name, login in bastions]
    jump = ",".join(name for name, _ in bastions)
    for member in members:
        names = " ".join(_quote("Host", name) for name in dict.fromkeys((member.address, member.name)))
        address = _quote("HostName", member.reached or member.address)
        part = f"Host {names}\n  HostName {address}\n  Port {member.port}\n"
        part += f"  HostKeyAlias {_quote('HostKeyAlias', member.known_name)}\n" if member.reached else ""
        part += f"  UserKnownHostsFile {_quote('UserKnownHostsFile', known_hosts)}\n"
        part += f"  GlobalKnownHostsFile /dev/null\n{_CLIENT}"
        part += f"  User {_quote('User', member.user)}\n" if member.user else ""
        part += f"  IdentityFile {_quote('IdentityFile', key)}\n  IdentitiesOnly yes\n" if key else ""
        part += f"  ProxyJump {_quote('ProxyJump', jump)}\n" if jump else ""
        parts.append(part)
    return "\n".join(parts)


def _format_bastion(name: str, login: Login) -> str:
    """What the user's own configuration says of a bastion: ssh does not read that beside a cluster's."""
    lines = [f"Host {_quote('Host', name)}", f"  HostName {_quote('HostName', login.address)}", f"  Port {login.port}"]
    lines += [f"  User {_quote('User', login.user)}"] if login.user else []
    lines += [f"  IdentityFile {_quote('IdentityFile', path)}" for path in login.identities]
    known_hosts = " ".join(_quote("UserKnownHostsFile", path) for path in login.known_hosts)
    lines += [f"  UserKnownHostsFile {known_hosts}"] if known_hosts else []
    lines += [f"  HostKeyAlias {_quote('HostKeyAlias', login.alias)}"] if login.alias else []
    # ssh gives a ProxyCommand to a shell as it is: it has quotation marks of its own, but only one line.
    lines += [f"  ProxyCommand {_check_line('ProxyCommand', login.proxy).replace('%', '%%')}"] if login.proxy else []
    return "\n".join(lines) + f"\n{_CLIENT}"


def _check_line(option: str, value: str) -> str:
    """`value`. Raises CpuftError when it has a control character, which would end its line."""
    if odd := find_control(value):
        raise CpuftError(
            f"{option} {value[:80]!r} contains the control character {odd!r}, which ssh_config cannot hold: remove it"
        )
    return value


def _quote(option: str, value: str) -> str:
    """`value` as one word of ssh_config, in quotation marks where it has white space or could begin a comment."""
    if '"' in _check_line(option, value):
        raise CpuftError(f"{option} {value[:80]!r} contains a quotation mark, which ssh_config cannot hold: remove it")
    return f'"{value}"' if " " in value or value.startswith("#") else value


def format_known_hosts(members: Sequence[Member]) -> str:
    """known_hosts lines of those whose key is known."""
    lines = [(one.known_name, *key.split()[:2], one.mark) for one in members for key in one.key.splitlines()]
    return "".join(f"{' '.join(words).rstrip()}\n" for words in lines)


def format_inside(
    members: Sequence[Member],
    folder: str,
    python: str,
    notice: str = "",
    renewal: str = "",
    shares_files: bool = False,
) -> dict[str, str]:
    """Files by which a host of a cluster reaches all of it, for a folder of its own disk beside the cluster's key.

    `notice`, `renewal` and `shares_files` are as in the cluster's entry.
    """
    name, members = folder.rpartition("/")[2], [replace(member, reached="") for member in members]
    config = f"{folder}/ssh_config"
    place, there = (name, "inside", f"{folder}/hostfile", config, python), "" if shares_files else config
    entry = Entry(*place, ssh_config_there=there, shares_files=shares_files, notice=notice, renewal=renewal)
    return {
        "known_hosts": format_known_hosts(members),
        "ssh_config": format_ssh_config(members, f"{folder}/id_ed25519", f"{folder}/known_hosts"),
        "hostfile": format_hostfile(tuple(Host(member.address) for member in members)),
        "cluster.json": format_entry(entry),
    }


def format_sshd_config(address: str, directory: str, own_home: bool) -> str:
    """Server configuration of one host of a local cluster; its keys lie in `directory`.

    `own_home`: the host has a home of its own, so that keys put there are meant for it and not for this machine.
    """
    text = Path(__file__).with_name("sshd_config.in").read_text(encoding="utf-8")
    return text.format(address=address, directory=directory, also=" .ssh/authorized_keys" if own_home else "")


def format_hosts(members: tuple[Member, ...]) -> str:
    """An /etc/hosts in which no host's name is a loopback address: gloo would bind to that."""
    return "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in members)
