"""Texts of the ssh files of a cluster: who may log in, whose host keys are known, how to reach each host."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import Entry, format_entry

_CLIENT = """
  Port {port}
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
  ServerAliveInterval 5
  ServerAliveCountMax 3
"""

_SERVER = """# Key-only login, on the cluster's own address, with a host key made for this cluster.
ListenAddress {address}:22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys{also}
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
# Root's account may be locked, which sshd takes as "no login at all" when PAM decides.
UsePAM no
UseDNS no
PrintMotd no
PidFile none
# Every rank and every fact is a connection, and all hosts connect at once.
MaxStartups 100:30:300
MaxSessions 100
# A host that was cut off: its sessions, and the ranks in them, end within 15 s.
ClientAliveInterval 5
ClientAliveCountMax 3
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Member:
    """A host of a cluster as ssh sees it."""

    name: str
    address: str
    user: str = "root"
    port: int = 22


def format_ssh_config(members: tuple[Member, ...], key: str, known_hosts: str) -> str:
    """A client configuration for all hosts, by address and by name; used by ssh, mpirun and paramiko alike."""
    parts = ["# Made by cpuft provision: how to reach the hosts of this cluster."]
    for member in members:
        names = " ".join(dict.fromkeys((member.address, member.name)))
        client = _CLIENT.format(port=member.port, known_hosts=known_hosts)
        client += f"  User {member.user}\n" if member.user else ""
        client += f"  IdentityFile {key}\n  IdentitiesOnly yes\n" if key else ""
        parts.append(f"Host {names}\n  HostName {member.address}{client}")
    return "\n".join(parts)


def format_known_hosts(members: tuple[Member, ...], public_keys: tuple[str, ...]) -> str:
    """known_hosts lines; `public_keys` in the order of `members`, as in a .pub file."""
    return "".join(
        f"{format_known_name(member)} {' '.join(key.split()[:2])}\n" for member, key in zip(members, public_keys)
    )


def format_inside(members: tuple[Member, ...], folder: str, python: str, known_hosts: str) -> dict[str, str]:
    """Files by which a host of a cluster reaches all of it, for a folder of its own disk beside the cluster's key."""
    name = folder.rpartition("/")[2]
    config = f"{folder}/ssh_config"
    entry = Entry(name, "inside", f"{folder}/hostfile", config, python, ssh_config_there=config)
    return {
        "known_hosts": known_hosts,
        "ssh_config": format_ssh_config(members, f"{folder}/id_ed25519", f"{folder}/known_hosts"),
        "hostfile": format_hostfile(tuple(Host(member.address) for member in members)),
        "cluster.json": format_entry(entry),
    }


def format_known_name(member: Member) -> str:
    """The name under which ssh keeps a host's key: with its port in brackets when that is not 22."""
    return member.address if member.port == 22 else f"[{member.address}]:{member.port}"


def format_sshd_config(address: str, directory: str, own_home: bool) -> str:
    """Server configuration of one host of a local cluster; its keys lie in `directory`.

    `own_home`: the host has a home of its own, so that keys put there are meant for it and not for this machine.
    """
    return _SERVER.format(address=address, directory=directory, also=" .ssh/authorized_keys" if own_home else "")


def format_hosts(members: tuple[Member, ...]) -> str:
    """An /etc/hosts in which no host's name is a loopback address: gloo would bind to that."""
    return "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in members)
