"""ssh's configuration: what the user's says, what cpuft writes for a cluster, and the options of both ssh clients.

paramiko runs single commands on hosts (`cpuft.hosts.transport`). OpenSSH runs the steps of a plan, because people read
plans and run them by hand, and mpirun starts its proxies with it. Both take all their options from here.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host, format_hostfile
from cpuft.hosts.registry import Entry, format_entry
from cpuft.serialization import LAST_PORT, find_control, is_count

if TYPE_CHECKING:
    import paramiko

CONNECT_SECONDS = 10.0
"""paramiko's time limit for each of these: connection, key exchange, login."""
_CLIENT = """  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
  ServerAliveInterval 5
  ServerAliveCountMax 3
"""
COMMAND_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=3"),
    *("-o", "ServerAliveCountMax=2"),
)
"""Options of every ssh command in a plan. A host that was cut off is noticed within 9 s; the ranks that exchange data
with it notice within 7 s."""
_FOR_PEOPLE = {
    "remotecommand": "RemoteCommand=none",
    "requesttty": "RequestTTY=no",
    "sessiontype": "SessionType=default",
    "stdinnull": "StdinNull=no",
    "forkafterauthentication": "ForkAfterAuthentication=no",
    "controlmaster": "ControlMaster=no",
    "localforward": "ClearAllForwardings=yes",
    "remoteforward": "ClearAllForwardings=yes",
    "dynamicforward": "ClearAllForwardings=yes",
}
"""Options that suit a person at a terminal and break commands, and what replaces them where the configuration has them:
older clients do not know all."""
_SHARED_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_SSHD = "/usr/sbin/sshd"
_EXTRA_USERS = "/var/lib/extrausers/passwd"
"""The second file with users, in images made by ami/Containerfile; group 0 may write to it."""
_SERVER = {
    "PasswordAuthentication": "no",
    # Every rank and every query is a connection, and all hosts connect at once.
    "MaxStartups": "100:30:300",
    "MaxSessions": "100",
    # The sessions of a host that was cut off, and the ranks in them, end within 15 s.
    "ClientAliveInterval": "5",
    "ClientAliveCountMax": "3",
    "PidFile": "none",
}
_MOST_BASTIONS = 8
_MOST_INCLUDES = 16
"""How deep files may include each other, as in OpenSSH's client."""


@dataclass(frozen=True)
class Login:
    """How a host is reached by ssh, by the hostfile and the client configuration. Empty values are ssh's defaults."""

    address: str
    """Name or address to connect to (HostName)."""
    port: int
    user: str = ""
    identities: tuple[str, ...] = ()
    """Files of private keys."""
    known_hosts: tuple[str, ...] = ()
    """The user's files of host keys."""
    shared_known_hosts: tuple[str, ...] = ()
    """Files of host keys for all users."""
    alias: str = ""
    """HostKeyAlias: the name under which the host key is known, instead of address and port."""
    jumps: tuple[Host, ...] = ()
    """Bastions on the way, the first one first."""
    proxy: str = ""
    """ProxyCommand, whose standard streams are the connection."""
    replaced: tuple[str, ...] = ()
    """Values of ssh's -o that replace what the configuration says for people at a terminal."""


def ssh_command(host: Host, config: str, replaced: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the argv of OpenSSH's client that a shell line is appended to, to run it on a host. `config` is the path
    of a client configuration, empty for the user's own; `replaced` is `Login.replaced`.
    """
    argv: tuple[str, ...] = ("ssh", "-F", config) if config else ("ssh",)
    argv += COMMAND_OPTIONS + tuple(word for option in replaced for word in ("-o", option))
    argv += ("-l", host.user) if host.user else ()
    argv += ("-p", str(host.port)) if host.port else ()
    return (*argv, host.name)


def read_login(host: Host, config_path: str = "") -> Login:
    """Return how a host is reached, by the hostfile's user and port and otherwise by ssh's client configuration, which
    need not exist; "" is ~/.ssh/config. The user is "" if both name none. Raises CpuftError: the file cannot be read or
    has a wrong port or ProxyJump, or the user of this process is not in /etc/passwd.
    """
    import paramiko

    try:
        if sys.platform != "win32":
            find_user()
    except CpuftError as error:
        raise CpuftError(
            f"host {host.name} cannot be reached, because {error}, or name this machine localhost"
        ) from None
    path = os.path.expanduser(config_path or "~/.ssh/config")
    try:
        config = _read_config(path, os.stat(path).st_mtime_ns) if os.path.exists(path) else paramiko.SSHConfig()
        found: dict[str, Any] = dict(config.lookup(host.name))
    except (paramiko.SSHException, OSError, ValueError) as error:
        raise CpuftError(f"ssh's configuration {path} cannot be read ({error}): correct it") from None
    if not is_count(str(found.get("port", 22)), most=LAST_PORT):
        raise CpuftError(
            f"ssh's configuration {path}: port {found['port']!r:.60} of {host.name} is not a port number: correct it"
        )
    proxy = found.get("proxycommand") or ""
    return Login(
        address=str(found.get("hostname", host.name)),
        port=host.port or int(found.get("port", 22)),
        user=host.user or str(found.get("user", "")),
        identities=tuple(os.path.expanduser(name) for name in found.get("identityfile", ())),
        known_hosts=_split_paths(str(found.get("userknownhostsfile", ""))),
        shared_known_hosts=_split_paths(str(found.get("globalknownhostsfile", _SHARED_KNOWN_HOSTS))),
        alias=str(found.get("hostkeyalias", "")),
        jumps=parse_jumps(str(found.get("proxyjump", "")), f"ProxyJump of host {host.name}"),
        proxy="" if proxy == "none" else proxy,
        replaced=tuple(dict.fromkeys(option for name, option in _FOR_PEOPLE.items() if name in found)),
    )


def find_user() -> str:
    """Return the name of this user, without which ssh and sshd start nothing. A user without a name, as a container may
    have, gets the name cpuft where the image lets them (libnss-extrausers). Raises CpuftError: this user has none.
    """
    import pwd  # which Windows does not have

    uid = os.getuid()
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    with suppress(OSError), open(_EXTRA_USERS, "a", encoding="utf-8") as users:
        users.write(f"cpuft:x:{uid}:{uid}::/var/tmp:/bin/sh\n")
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    raise CpuftError(
        f"ssh needs an entry of the user in /etc/passwd, and user {uid} has none: add one, use a user that has one"
    )


def _split_paths(text: str) -> tuple[str, ...]:
    """Return the paths in a value, from whose ends paramiko has removed quotation marks if there was one at both."""
    first, words = text.find('"'), [text]
    if first >= 0 or not os.path.exists(os.path.expanduser(text)):
        whole = f'"{text}"' if first > 0 and not text[first - 1].isspace() else text
        words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|([^\s"]+)', whole)]
    return tuple(map(os.path.expanduser, words))


@lru_cache(maxsize=8)
def _read_config(path: str, changed: int) -> paramiko.SSHConfig:
    """Return a client configuration, parsed again only if the file has changed: that takes long for many hosts."""
    import paramiko

    config = paramiko.SSHConfig()
    config.parse(_read_lines(path))
    return config


def _read_lines(path: str, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a client configuration and of the files that it includes; paramiko ignores Include."""
    block = "Host *"
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, value = [*re.split(r"[\s=]+", line.strip(), maxsplit=1), ""][:2]
        block = line if key.lower() in ("host", "match") else block
        if key.lower() != "include" or depth >= _MOST_INCLUDES:
            yield line
            continue
        for pattern in shlex.split(value):
            found = glob.glob(os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern)))
            for included in filter(os.path.isfile, sorted(found)):  # ssh takes a folder for an empty file
                yield from _read_lines(included, depth + 1)
        yield block


def parse_jumps(text: str, where: str) -> tuple[Host, ...]:
    """Return the bastions in a value of ProxyJump or -J, () for "" and "none"; a bastion without user or port has "" or
    0 there. Raises CpuftError, which begins with `where`: the value has another form.
    """
    jumps = []
    for word in text.split(",") if text and text != "none" else ():
        user, _, place = word.strip().removeprefix("ssh://").rpartition("@")
        name, _, port = place.partition(":")
        if not name or len(word.split()) > 1 or (port and not is_count(port, most=LAST_PORT)):
            raise CpuftError(f"{where} {text!r:.200} names no host: write [user@]name[:port], separated by commas")
        jumps.append(Host(name, port=int(port or 0), user=user))
    return tuple(jumps)


def find_bastions(login: Login, config_path: str = "") -> list[tuple[Host, Login]]:
    """Return (bastion, how it is reached) for each bastion on the way to a host, first to last; as for ssh, only the
    first may need bastions itself. Raises CpuftError: ssh's configuration cannot be read, or there are more than eight.
    """
    found: list[tuple[Host, Login]] = []
    while login.jumps:
        found[:0] = [(jump, read_login(jump, config_path)) for jump in login.jumps]
        login = found[0][1]
        if len(found) > _MOST_BASTIONS:
            names = ", ".join(jump.name for jump, _ in found)
            raise CpuftError(
                f"the way leads through too many bastions ({names}): check ProxyJump in ssh's configuration"
            )
    return found


@dataclass(frozen=True)
class Member:
    """A host of a cluster in the cluster's ssh files."""

    name: str
    """Its host name, a second name for it in the client configuration."""
    address: str
    """Its address among the hosts of the cluster."""
    user: str = "root"
    """User to log in as; empty for ssh's own default."""
    port: int = 22
    key: str = ""
    """Its public host key as in a .pub file; empty while it is not known."""
    reached: str = ""
    """Its address from this machine, where that differs from the address among the hosts."""
    mark: str = ""
    """Comment in known_hosts that identifies the machine, where another machine may have its address tomorrow."""

    @property
    def known_name(self) -> str:
        """The name under which known_hosts has its key: the address, or "[ADDRESS]:PORT" if the port is not 22."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


Bastions = tuple[tuple[str, Login], ...]
"""Bastions on the way to all hosts of a cluster, the first one first: (name, how it is reached)."""


def format_ssh_config(members: Sequence[Member], key: str, known_hosts: str, bastions: Bastions = ()) -> str:
    """Return the text of a client configuration for all hosts of a cluster, by address and by name, through `bastions`.
    `key` is the path of the private key, "" for ssh's own keys; only host keys in the file `known_hosts` are accepted.
    Raises CpuftError: a value has a character that ssh_config cannot hold.
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
    """Return a bastion's part of the configuration: ssh does not read the user's own beside a cluster's."""
    lines = [f"Host {_quote('Host', name)}", f"  HostName {_quote('HostName', login.address)}", f"  Port {login.port}"]
    lines += [f"  User {_quote('User', login.user)}"] if login.user else []
    lines += [f"  IdentityFile {_quote('IdentityFile', path)}" for path in login.identities]
    known_hosts = " ".join(_quote("UserKnownHostsFile", path) for path in login.known_hosts)
    lines += [f"  UserKnownHostsFile {known_hosts}"] if known_hosts else []
    lines += [f"  HostKeyAlias {_quote('HostKeyAlias', login.alias)}"] if login.alias else []
    # ssh passes a ProxyCommand to a shell as it is: it may contain quotation marks, but only one line.
    lines += [f"  ProxyCommand {_check_line('ProxyCommand', login.proxy).replace('%', '%%')}"] if login.proxy else []
    return "\n".join(lines) + f"\n{_CLIENT}"


def format_shared_key_config(alias: str, key: str, known_hosts: str, port: int) -> str:
    """Return the text of an ssh_config for any host on this `port`, with the paths `key` of the client's private key
    and `known_hosts`. `alias` is the name under which `known_hosts` has the one host key of all hosts.
    """
    return (
        f"Host *\n  Port {port}\n  HostKeyAlias {alias}\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        f"  StrictHostKeyChecking yes\n  UpdateHostKeys no\n  BatchMode yes\n"
    )


def _check_line(option: str, value: str, refused: str = "") -> str:
    # Half of a surrogate pair stands for a byte of a file's name that is not UTF-8.
    odd = next((one for one in value if one in refused or "\ud800" <= one <= "\udfff" or find_control(one)), "")
    if odd:
        raise CpuftError(f"{option} {value[:80]!r} contains {odd!r}, which ssh_config cannot hold: remove it")
    return value


def _quote(option: str, value: str) -> str:
    """Return `value` as one word of ssh_config, in quotation marks where it has spaces or could begin a comment."""
    _check_line(option, value, '"')
    if sys.platform == "win32" and os.path.isabs(value):
        value = value.replace("\\", "/")  # which ssh would take for an escape
    return f'"{value}"' if " " in value or value.startswith("#") else value


def format_known_hosts(members: Sequence[Member]) -> str:
    """Return a line `KNOWN_NAME TYPE KEY [MARK]` for each member with a known host key, newlines included."""
    lines = [(one.known_name, *one.key.split()[:2], one.mark) for one in members if one.key]
    return "".join(f"{' '.join(words).rstrip()}\n" for words in lines)


def format_inside(
    members: Sequence[Member],
    folder: str,
    python: str,
    notice: str = "",
    renewal: str = "",
    shares_files: bool = False,
) -> dict[str, str]:
    """Return file name -> text of known_hosts, ssh_config, hostfile and cluster.json, with which a host of a cluster
    reaches all of its hosts, the head host first. They belong into `folder`, whose name is the cluster's, beside its
    key `id_ed25519`. The other parameters are as in `Entry`, seen from the hosts. Raises CpuftError: a value has a
    character that ssh_config cannot hold.
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


def sshd_command(host_key: str, port: int, *arguments: str, **options: str) -> tuple[str, ...]:
    """Return the argv that starts an ssh server in a container, in the foreground, with its messages on stderr.
    `host_key` is a path, `arguments` are further words; `options` of sshd_config win over those that cpuft gives.
    """
    # sshd uses PAM as root only.
    own = {} if not os.geteuid() else {"UsePAM": "no"}
    given = [f"-o{name}={value}" for name, value in (_SERVER | own | options).items()]
    return (_SSHD, "-D", "-e", *arguments, "-p", str(port), "-h", host_key, *given)


def prepare_sshd() -> None:
    """Make what sshd needs in a container: a name of the user (`find_user`), and as root the folder /run/sshd. Raises
    CpuftError: there is no /usr/sbin/sshd, or the user gets no name.
    """
    if not os.path.exists(_SSHD):
        raise CpuftError(f"there is no {_SSHD}: use a container image that has openssh-server")
    find_user()
    if not os.geteuid():
        os.makedirs("/run/sshd", exist_ok=True)  # where sshd locks up its unprivileged process


def format_sshd_config(address: str, directory: str, own_home: bool) -> str:
    """Return the text of sshd_config for a simulated host that listens on `address`, whose keys are in the folder
    `directory`. With a home of its own, the host accepts the keys in its ~/.ssh/authorized_keys, too.
    """
    text = Path(__file__).with_name("sshd_config.in").read_text(encoding="utf-8")
    return text.format(address=address, directory=directory, also=" .ssh/authorized_keys" if own_home else "")


def format_hosts(members: tuple[Member, ...]) -> str:
    """Return the text of an /etc/hosts with a line `ADDRESS NAME` for each member, after those of localhost."""
    # No host's name may be a loopback address there, because gloo would bind to that.
    return "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in members)
