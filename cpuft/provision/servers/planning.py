"""A cluster of servers over ssh, planned: pure functions of what they have and what is asked for."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from cpuft.errors import CpuftError
from cpuft.files import REMOVE
from cpuft.hosts.cluster import WORK_ROOT
from cpuft.options.clusters import HostsConfig
from cpuft.options.fields import is_count
from cpuft.plan import Plan, Step
from cpuft.provision.reconcile import plan_file
from cpuft.provision.sshfiles import Member, format_inside
from cpuft.provision.wheels import INSTALL, Wheel, make_stamp

_LEAST_PYTHON = (3, 10)
_RECEIVE = """set -eu
mkdir -p "${1%/*}"
: >>"${1%/*/*}/install.lock"
cat >"$1.part.$$"
echo "$2  $1.part.$$" | sha256sum --check --quiet
mv -f "$1.part.$$" "$1"
"""
_KEYGEN = """set -eu
umask 077
mkdir -p "$(dirname "$1")"
rm -f "$1" "$1.pub"
ssh-keygen -q -t ed25519 -N "" -C "$2" -f "$1"
"""
_DOWN = f"""set -eu
{REMOVE}
prefix=$1
if [ -f "$prefix/install.lock" ] || [ -f "$prefix/env/stamp" ]; then
    remove "$prefix" "$prefix/env" "$prefix/wheels" "$prefix/install.lock"
fi
remove "$prefix" "$prefix/clusters/$2"
rmdir "$prefix/clusters" 2>/dev/null || true
case "$prefix" in /*/*) rmdir "$prefix" 2>/dev/null || true ;; esac
for folder in "$4"/cpuft-*; do
    [ -O "$folder" ] && [ ! -L "$folder" ] || continue
    case "$folder" in */cpuft-inputs) remove "$4" "$folder" ;; *) remove "$4" "$folder/inputs" ;; esac
    rmdir "$folder" 2>/dev/null || true
done
file=$HOME/.ssh/authorized_keys
[ -e "$file" ] || exit 0
grep -v " $3\\$" "$file" >"$file.new" || [ $? = 1 ]
cat "$file.new" >"$file"
rm "$file.new"
"""
_AUTHORIZE = 'umask 077; mkdir -p "$HOME/.ssh"; echo "$1" >>"$HOME/.ssh/authorized_keys"'


@dataclass(frozen=True)
class ServerFacts:
    """What `survey.sh` said of one server."""

    os: str = ""
    kernel: str = ""
    arch: str = ""
    python: str = ""
    ensurepip: bool = False
    writable: bool = False
    free_kb: int = 0
    stamp: str = ""
    """Of the environment that is installed; empty when none is, or when it is half done."""
    marked: bool = False
    """Whether cpuft has put, or begun to put, something below the prefix."""
    foreign: str = ""
    """What is in the way at the prefix, and why."""
    wheels: dict[str, str] = field(default_factory=dict)
    """File name -> SHA-256."""
    sums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the cluster's ssh files there."""
    key: str = ""
    """Public key of the cluster, on the master."""
    authorized: tuple[str, ...] = ()


def parse_survey(text: str, host: str) -> ServerFacts:
    """Facts from survey.sh's lines. Raises CpuftError when they are not that."""
    values: dict[str, str] = {}
    wheels: dict[str, str] = {}
    sums: dict[str, str] = {}
    authorized: list[str] = []
    for line in text.split("\n"):
        key, _, value = line.partition(" ")
        if key == "wheel":
            name, _, digest = value.partition(" ")
            wheels[name] = digest
        elif key.startswith("sum_"):
            sums[key.removeprefix("sum_")] = value
        elif key == "authorized":
            authorized.append(value.strip())
        else:
            values[key] = value.strip()
    if "os" not in values or not is_count(values.get("free_kb", ""), least=0):
        raise CpuftError(f"host {host} did not survey itself (it said {text.strip()[-200:]!r}): is it a Linux with sh?")
    return ServerFacts(
        values["os"],
        values.get("kernel", ""),
        values.get("arch", ""),
        values.get("python", ""),
        "ensurepip" in values,
        "writable" in values,
        int(values["free_kb"]),
        values.get("stamp", ""),
        "marked" in values,
        values.get("foreign", ""),
        wheels,
        sums,
        values.get("key", ""),
        tuple(authorized),
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


def find_python(members: tuple[Member, ...], facts: tuple[ServerFacts, ...]) -> str:
    """The Python that all servers have, "3.11". Raises CpuftError when they differ: one environment needs one."""
    versions = {member.address: ".".join(own.python.split(".")[:2]) for member, own in zip(members, facts)}
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{name} has {version or 'none'}" for name, version in versions.items())
        raise CpuftError(f"servers of one cluster need the same Python, and {told}: install one on all of them")
    return versions[members[0].address]


def plan_hosts(
    config: HostsConfig,
    members: tuple[Member, ...],
    facts: tuple[ServerFacts, ...],
    wheels: tuple[Wheel, ...],
    pins: tuple[str, ...],
    known_hosts: str,
) -> Plan:
    """What is missing on the servers.

    Parameters
    ----------
    members, facts: of each server, the master first.
    wheels: files that every server gets; `pins`: what it installs, name==version.
    known_hosts: text with the host keys of all servers.
    """
    stamp = make_stamp(pins, wheels)
    stages = [
        _plan_key(config, members[0], facts[0]),
        _plan_wheels(config, members, facts, wheels, stamp),
        _plan_environment(config, members, facts, pins, stamp),
        _plan_login(members, facts),
        _plan_master_files(config, members, facts[0], known_hosts),
    ]
    return Plan(tuple(tuple(stage) for stage in stages if stage))


def cluster_dir(config: HostsConfig) -> str:
    """Where the master keeps the cluster's key and ssh configuration."""
    return f"{config.prefix}/clusters/{config.name}"


def _key_mark(config: HostsConfig) -> str:
    """The comment of the cluster's keys, by which all lines of it are found again, lost ones too."""
    return f"cpuft-{config.name}"


def _plan_key(config: HostsConfig, master: Member, facts: ServerFacts) -> list[Step]:
    """The cluster's key is made on the master and never leaves it."""
    if facts.key:
        return []
    path = f"{cluster_dir(config)}/id_ed25519"
    return [
        Step(
            "make the cluster's own key", ("sh", "-c", _KEYGEN, "keygen", path, _key_mark(config)), host=master.address
        )
    ]


def _plan_wheels(
    config: HostsConfig,
    members: tuple[Member, ...],
    facts: tuple[ServerFacts, ...],
    wheels: tuple[Wheel, ...],
    stamp: str,
) -> list[Step]:
    """Files for the hosts that will install; one that came with its environment in its image needs none."""
    return [
        Step(
            f"push {wheel.name}",
            ("sh", "-c", _RECEIVE, "receive", f"{config.prefix}/wheels/{wheel.name}", wheel.sha256),
            host=member.address,
            stdin_file=wheel.path,
        )
        for wheel in wheels
        for member, own in zip(members, facts)
        if own.stamp != stamp and own.wheels.get(wheel.name) != wheel.sha256
    ]


def _plan_environment(
    config: HostsConfig,
    members: tuple[Member, ...],
    facts: tuple[ServerFacts, ...],
    pins: tuple[str, ...],
    stamp: str,
) -> list[Step]:
    command = ("sh", "-c", f"set -eu\n{INSTALL}", "install", config.prefix, stamp, *pins)
    return [
        Step(f"install the environment at {config.prefix}/env", command, host=member.address)
        for member, own in zip(members, facts)
        if own.stamp != stamp
    ]


def _plan_login(members: tuple[Member, ...], facts: tuple[ServerFacts, ...]) -> list[Step]:
    key = facts[0].key
    return [
        Step("let the master log in", ("sh", "-c", _AUTHORIZE, "authorize", key), host=member.address)
        for member, own in zip(members, facts)
        if key and key not in own.authorized
    ]


def _plan_master_files(
    config: HostsConfig, members: tuple[Member, ...], facts: ServerFacts, known_hosts: str
) -> list[Step]:
    folder = cluster_dir(config)
    texts = format_inside(members, folder, f"{config.prefix}/env/bin/python", known_hosts)
    return [
        plan_file(f"{folder}/{name}", text, "tell the master how to reach the hosts", host=members[0].address)
        for name, text in texts.items()
        if facts.sums.get(name) != hashlib.sha256(text.encode()).hexdigest()
    ]


def plan_hosts_down(config: HostsConfig, members: tuple[Member, ...], facts: tuple[ServerFacts, ...]) -> Plan:
    """Take away what was put on the servers: the environment, the wheels, the key and its line."""
    mark = _key_mark(config)
    command = ("sh", "-c", _DOWN, "remove", config.prefix, config.name, mark, WORK_ROOT)
    steps = tuple(
        Step("take away the environment and the key", command, host=member.address)
        for member, own in zip(members, facts)
        if own.marked or own.stamp or own.key or any(line.endswith(f" {mark}") for line in own.authorized)
    )
    return Plan((steps,)) if steps else Plan()
