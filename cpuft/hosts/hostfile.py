"""Hostfiles, in the forms of MPI implementations, batch systems and cpuft: text to hosts and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cpuft.errors import CpuftError
from cpuft.files import read_given_text
from cpuft.serialization import LAST_PORT, find_control, is_count

NAME = re.compile(r"(?=[A-Za-z0-9].{0,252}$)[\w-]{1,63}(\.[\w-]{1,63})*(?<![_-])|(?=.*:)[0-9a-fA-F:]{2,39}", re.ASCII)
"""A host's name or address. Sockets raise errors for labels that are empty or longer than 63 letters."""
_KEYS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots", "port": "port", "user": "user"}
_RANGES = re.compile(r"([^\[\]]*)\[(R(?:,R)*)\](.*)".replace("R", "[0-9]{1,9}(?:-[0-9]{1,9})?"))
"""A name with numbers in brackets, as Slurm writes them: what is before the first brackets, in them, and after them."""
_MOST_EXPANDED = 9999
NEEDS_IPV4 = "is an IPv6 address, and ranks connect over IPv4: write the IPv4 address, or a name that has one"

_MPIJOB_VARIABLES = ("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE", "OMPI_MCA_orte_default_hostfile")
"""Environment variables in which Kubeflow's operator tells an MPIJob's launcher the path of its hostfile."""


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    """A name or an address (IPv4 or IPv6), as the user wrote it."""
    slots: int = 0
    """Most ranks on it; 0 when the line does not say."""
    user: str = ""
    """Login name; empty for ssh's own default."""
    port: int = 0
    """Port of its ssh server; 0 for ssh's own default."""
    max_slots: int = 0
    """Most ranks on it even if it has more cores, where `slots` is 0; 0 for no limit."""


def parse_hostfile(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """Return the hosts in the order of the text; the first is the head host.

    Each line is `[user@]host[:slots] [slots=N] [max_slots=N] [user=U] [port=P]`, or SGE's `host slots queue
    processors`; `#` begins a comment. `node[01-04,07]` is five hosts. The slots of a host on several lines add up.
    Without slots they are 0; but if a host is repeated without slots, as in the lists of PBS and LSF, each line of any
    host is one slot. Raises CpuftError, which begins with `source`: a line is not understood or contradicts another
    one, or there is no host.
    """
    hosts: dict[str, list[Host]] = {}
    lines_of: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split("#", 1)[0].split()
        where = f"{source}, line {number}"
        for host in _parse_words(words, where) if words else ():
            first = hosts.setdefault(host.name, [host])[0]
            if host.name not in lines_of:
                lines_of[host.name] = number
                continue
            if replace(first, slots=bool(first.slots)) != replace(host, slots=bool(host.slots)):
                raise CpuftError(
                    f"{where}: host {host.name} is on line {lines_of[host.name]} already: "
                    f"remove this line; for several ranks on one host, write for example {host.name} slots=2"
                )
            hosts[host.name].append(host)
    if not hosts:
        raise CpuftError(f"{source} names no host: write one name or address on each line, the head host first")
    is_list = any(len(same) > 1 and not same[0].slots for same in hosts.values())
    return tuple(
        replace(same[0], slots=sum(host.slots for host in same) or (len(same) if is_list else 0))
        for same in hosts.values()
    )


def _parse_words(words: list[str], where: str) -> list[Host]:
    # SGE's $PE_HOSTFILE; of two numbers, the second one belongs to another host, as in LSF's $LSB_MCPU_HOSTS.
    if len(words) == 4 and is_count(words[1]) and not is_count(words[3]) and not any("=" in word for word in words[:3]):
        words = [words[0], f"slots={words[1]}"]
    user, _, rest = words[0].rpartition("@")
    name, colon, count = rest.partition(":") if rest.count(":") == 1 else (rest, "", "")
    numbers = {"slots": _number(count, "slots", where) if colon else 0, "max_slots": 0, "port": 0}
    names = list(_expand(name, where))
    if not all(map(NAME.fullmatch, names)):
        if rest.count(":") > 1 and re.match(r"\[?[0-9a-fA-F:.]*([]%]|$)", rest):
            raise CpuftError(f"{where}: {words[0]!r} {NEEDS_IPV4}")
        raise CpuftError(f"{where}: {words[0]!r} is not a host name or address: write e.g. node1, node1:4 or 10.0.0.1")
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise CpuftError(f"{where}: {word!r} is not understood: write slots=N, user=NAME or port=N")
        if key == "user":
            user = value
        else:
            numbers[_KEYS[key]] = _number(value, key, where)
    if find_control(user) or user.startswith("-"):
        raise CpuftError(
            f"{where}: user {user[:60]!r} contains a control character or begins with a dash: write the login name"
        )
    slots, most = numbers["slots"], numbers["max_slots"]
    # cpuft never starts more ranks than slots, so that a larger max_slots means nothing beside them.
    slots, most = (min(slots, most or slots), 0) if slots else (0, most)
    return [Host(name, slots, user, numbers["port"], most) for name in names]


def _expand(name: str, where: str) -> Iterator[str]:
    found = _RANGES.fullmatch(name)
    if not found:
        yield name
        return
    before, ranges, after = found.groups()
    rests = list(_expand(after, where))
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or (high - low + 1) * len(rests) > _MOST_EXPANDED:
            raise CpuftError(f"{where}: {name[:60]!r} has a range of no or too many hosts: write e.g. node[01-04]")
        for number in range(low, high + 1):
            yield from (f"{before}{number:0{len(first)}}{rest}" for rest in rests)


def _number(text: str, what: str, where: str) -> int:
    most = LAST_PORT if what == "port" else 9999
    if not is_count(text, most=most):
        raise CpuftError(f"{where}: {what} is {text[:60]!r}: give a whole number from 1 to {most}")
    return int(text)


def format_hostfile(hosts: tuple[Host, ...]) -> str:
    """Return text that `parse_hostfile` reads back as the same hosts: a line `NAME [slots=N] ...` for each."""
    lines = []
    for host in hosts:
        given = [(key, getattr(host, key)) for key in ("slots", "max_slots", "user", "port")]
        lines.append(" ".join([host.name, *(f"{key}={value}" for key, value in given if value)]))
    return "".join(f"{line}\n" for line in lines)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile, the head host first. Raises CpuftError: it cannot be read or understood."""
    text = read_given_text(path, "--hostfile", "give a file with one host on each line")
    return parse_hostfile(text.removeprefix("\ufeff"), path)


def find_job_hostfile(environ: Mapping[str, str]) -> str:
    """Return the path of an MPIJob's hostfile, which may be missing, if this process is in the job's launcher
    (K_MPI_JOB_ROLE is "launcher"); "" in any other process.
    """
    if environ.get("K_MPI_JOB_ROLE") != "launcher":
        return ""
    return next((environ[name] for name in _MPIJOB_VARIABLES if environ.get(name)), "/etc/mpi/hostfile")
