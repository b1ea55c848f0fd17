"""What a server has of a cluster's environment: said by survey.sh, and judged."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cpuft.config import is_count
from cpuft.errors import CpuftError
from cpuft.provision.options import HostsConfig

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
