"""The hosts of a run: which ones, how many ranks on each, and what they say of themselves."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cpuft import execute, facts, mpi, ssh
from cpuft.config import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.hostfile import Host, read_hostfile
from cpuft.topology import HostFacts, parse_facts

LOCAL = Host("localhost")


@dataclass(frozen=True)
class Assignment:
    """A host and how many ranks run on it."""

    host: Host
    ranks: int


@dataclass(frozen=True)
class Cluster:
    """All that planning a launch needs to know of the world outside."""

    assignments: tuple[Assignment, ...]
    facts: tuple[HostFacts, ...]
    flavour: mpi.Flavour
    ssh_options: tuple[str, ...] = ()
    as_root: bool = False

    @property
    def rank_hosts(self) -> tuple[str, ...]:
        """The host of each rank, as the hostfile names it."""
        return tuple(a.host.name for a in self.assignments for _ in range(a.ranks))


def read_hosts(config: LaunchConfig) -> tuple[Host, ...]:
    """Hosts of the hostfile, or this machine alone."""
    return read_hostfile(config.hostfile) if config.hostfile else (LOCAL,)


def assign_ranks(hosts: tuple[Host, ...], np: int, ppn: int, cores: Mapping[str, int]) -> tuple[Assignment, ...]:
    """Ranks host by host, in the order of the hostfile, `ppn` on each (0: as even as can be).

    A host's slots bound its ranks; `cores` bounds those of a host whose line gives no slots, where it is known.

    Raises
    ------
    CpuftError: more ranks than slots.
    """
    slots = {host.name: host.slots or cores.get(host.name, 0) for host in hosts}
    share = ppn or max(1, -(-np // len(hosts)))
    assignments, left = [], np
    for host in hosts:
        count = min(share, left)
        if slots[host.name] and count > slots[host.name]:
            if ppn or len(hosts) == 1:
                raise CpuftError(_too_many(count, host, slots[host.name]))
            count = slots[host.name]
        if count:
            assignments.append(Assignment(host, count))
        left -= count
    if not left:
        return tuple(assignments)
    if not ppn and all(slots.values()) and sum(slots.values()) >= np:
        return _fill(hosts, np, slots)
    room = sum(min(share, slots[host.name] or share) for host in hosts)
    raise CpuftError(
        f"{np} ranks do not fit: {len(hosts)} hosts have {room} slots"
        f"{f' at --ppn {ppn}' if ppn else ''}: lower --np, or add hosts or slots=N to the hostfile"
    )


def _fill(hosts: tuple[Host, ...], np: int, slots: Mapping[str, int]) -> tuple[Assignment, ...]:
    """Hosts of unequal size: all slots of a host before the next, the last takes the rest."""
    assignments, left = [], np
    for host in hosts:
        count = min(slots[host.name], left)
        assignments += [Assignment(host, count)] if count else []
        left -= count
    return tuple(assignments)


def _too_many(ranks: int, host: Host, slots: int) -> str:
    what = "slots" if host.slots else "cores"
    return f"{ranks} ranks on {host.name}, which has {slots} {what}: lower --np, or say slots={ranks} in a hostfile"


def gather_cluster(config: LaunchConfig) -> Cluster:
    """Ask all hosts that the run needs, side by side, and find mpirun.

    Raises
    ------
    CpuftError: naming every host that did not answer, with what it said.
    """
    flavour = find_flavour(config.mpirun)
    hosts = read_hosts(config)
    _refuse_same_address(hosts)
    limit = min(len(hosts), config.np)
    wanted = hosts[:limit] if not any(host.slots for host in hosts) and not config.ppn else hosts
    found = dict(zip([host.name for host in wanted], gather_facts(wanted, config.ssh_config)))
    _refuse_same_machine(wanted, found)
    cores = {name: len(host_facts.cores) for name, host_facts in found.items()}
    assignments = assign_ranks(wanted, config.np, config.ppn, cores)
    used = tuple(found[assignment.host.name] for assignment in assignments)
    options = _ssh_options(config)
    return Cluster(assignments, used, flavour, options, os.geteuid() == 0)


def _ssh_options(config: LaunchConfig) -> tuple[str, ...]:
    return ("-F", config.ssh_config) if config.ssh_config else ()


def _refuse_same_address(hosts: tuple[Host, ...]) -> None:
    """The hosts that a small run leaves out are checked, too: the next one will need them."""
    seen: dict[str, str] = {}
    for host in hosts:
        address = _resolve(host)
        if address in seen:
            raise CpuftError(_same_host(seen[address], host.name))
        seen[address] = host.name


def _same_host(first: str, second: str) -> str:
    return f"{first} and {second} are the same host: keep one line, and say slots=N for several ranks"


def _refuse_same_machine(hosts: tuple[Host, ...], found: Mapping[str, HostFacts]) -> None:
    """Two names of one host would put two hosts' ranks on the same cores."""
    seen: dict[tuple[object, ...], str] = {}
    for host in hosts:
        host_facts = found[host.name]
        identity = (host_facts.boot_id, host_facts.hostname, tuple(sorted(host_facts.interfaces.items())))
        if identity in seen:
            raise CpuftError(_same_host(seen[identity], host.name))
        seen[identity] = host.name


def find_flavour(wanted: str) -> mpi.Flavour:
    """The mpirun to use: the named one, else this environment's, else PATH's. Raises CpuftError when there is none.

    Intel MPI's and MPICH's `mpirun` is a shell script that looks for mpiexec.hydra on PATH and passes no signals on:
    where the program itself is beside it, that is used.
    """
    own = os.path.join(os.path.dirname(sys.executable), "mpirun")
    found = shutil.which(wanted or own) or (None if wanted else shutil.which("mpirun"))
    if found is None:
        raise CpuftError(
            f"there is no mpirun{f' at {wanted}' if wanted else ''}: pip install 'cpuft[train]' brings Intel MPI's, "
            f"or name yours with --mpirun"
        )
    program = os.path.join(os.path.dirname(found), "mpiexec.hydra")
    path = program if os.path.exists(program) and "ompi" not in os.path.realpath(found) else found
    return mpi.parse_flavour(path, execute.run_quietly((path, "--version"), seconds=30).output)


def gather_facts(hosts: tuple[Host, ...], ssh_config: str = "") -> tuple[HostFacts, ...]:
    """Facts of every host, asked side by side. Raises CpuftError that names every host that failed."""
    own = facts.read_interfaces()
    addresses = [_resolve(host) for host in hosts]
    first_other = addresses[1] if len(hosts) > 1 else addresses[0]
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        answers = [
            pool.submit(_gather_one, host, address in own.values(), addresses[0] if index else first_other, ssh_config)
            for index, (host, address) in enumerate(zip(hosts, addresses))
        ]
    failures = [str(answer.exception()) for answer in answers if isinstance(answer.exception(), CpuftError)]
    if failures:
        raise CpuftError("; ".join(failures))
    return tuple(answer.result() for answer in answers)


def _gather_one(host: Host, is_local: bool, target: str, ssh_config: str) -> HostFacts:
    targets = [target]
    if is_local:
        command = (sys.executable, facts.__file__, *targets)
        return parse_facts(execute.run_quietly(command, seconds=30).output, host.name)
    source = Path(facts.__file__).read_text(encoding="utf-8")
    answer = ssh.run(host, "python3 - " + " ".join(targets), stdin=source, config_path=ssh_config)
    return parse_facts(answer.output or answer.errors, host.name)


def _resolve(host: Host) -> str:
    try:
        return socket.gethostbyname(host.name)
    except OSError as error:
        raise CpuftError(
            f"host {host.name} has no address ({error}): check its spelling in the hostfile, or write its address"
        ) from None
