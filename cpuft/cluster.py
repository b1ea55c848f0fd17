"""The hosts of a run: which ones, how many ranks on each, and what they say of themselves."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cpuft import execute, facts, mpi, registry, ssh
from cpuft.config import LaunchConfig
from cpuft.errors import CpuftError, counted
from cpuft.hostfile import Host, read_hostfile
from cpuft.topology import HostFacts, parse_facts
from cpuft.words import WITHOUT_FOLDER

LOCAL = Host("localhost")
WORK_ROOT = "/var/tmp"
"""Where hosts with disks of their own keep, in a folder of each user's, what was sent for runs, and runs' own files."""
_FROM_STDIN = f"{WITHOUT_FOLDER}; exec(sys.stdin.read())"


@dataclass(frozen=True)
class Assignment:
    """A host and how many ranks run on it."""

    host: Host
    ranks: int


@dataclass(frozen=True)
class Reach:
    """How the hosts are reached, and what runs there."""

    ssh_config: str = ""
    """Client configuration; empty for the user's own."""
    python: str = sys.executable
    """Python of the training environment, the same path on every host."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables of cpuft's own commands on the hosts."""
    shares_files: bool = False
    """Whether the hosts see this machine's files under the same paths."""
    ssh_config_there: str = ""
    """The client configuration on the master's own disk, for mpirun; empty where it sees `ssh_config`."""

    @property
    def mpirun_options(self) -> tuple[str, ...]:
        """ssh's options on the hosts themselves."""
        path = self.ssh_config_there or self.ssh_config
        return ("-F", path) if path else ()


@dataclass(frozen=True)
class Cluster:
    """All that planning a launch needs to know of the world outside."""

    assignments: tuple[Assignment, ...]
    facts: tuple[HostFacts, ...]
    flavour: mpi.Flavour
    ssh_options: tuple[str, ...] = ()
    as_root: bool = False
    reach: Reach = Reach()
    away: bool = False
    """Whether the master is another machine: mpirun then runs there, and results are fetched."""
    uid: int = 0
    """Of this user on the master."""

    @property
    def python(self) -> str:
        """Python of the training environment on the hosts."""
        return self.reach.python

    @property
    def folder(self) -> str:
        """This user's folder on hosts with disks of their own, the same path on all; `files.PRIVATE` makes it."""
        return f"{WORK_ROOT}/cpuft-{self.uid}"

    @property
    def inputs(self) -> str:
        """Where what was sent for runs is kept, by checksum."""
        return f"{self.folder}/inputs"

    def work_dir(self, run_dir: str) -> str:
        """Where the ranks work on a run: its directory, or one on the master's own disk."""
        mark = hashlib.sha256(f"{socket.gethostname()}:{run_dir}".encode()).hexdigest()[:12]
        return f"{self.folder}/{mark}/{os.path.basename(run_dir)}" if self.away else run_dir

    def sent_file(self, work: str, index: int) -> str:
        """How files begin that hold what was sent to the processes of a run on a host of this number."""
        mark = hashlib.sha256(work.encode(errors="surrogateescape")).hexdigest()[:12]
        return f"{self.folder}/{mark}.sent/{index}"

    @property
    def inherits(self) -> bool:
        """Whether all ranks run here, and so inherit the user's variables."""
        return not self.away and len(self.assignments) == 1

    @property
    def rank_hosts(self) -> tuple[str, ...]:
        """The host of each rank, as the hostfile names it."""
        return tuple(a.host.name for a in self.assignments for _ in range(a.ranks))


def find_entry(config: LaunchConfig, environ: Mapping[str, str]) -> registry.Entry | None:
    """The provisioned cluster that the run is for, by its name or its hostfile."""
    if config.cluster and config.hostfile:
        raise CpuftError("--cluster and --hostfile both say where to run: give one of them")
    if not config.cluster and not config.hostfile:
        return None
    roots = registry.search_roots(environ)
    if config.cluster:
        return registry.find_entry(roots, config.cluster)
    return registry.find_by_hostfile(roots, config.hostfile)


def read_hosts(config: LaunchConfig) -> tuple[Host, ...]:
    """Hosts of the cluster or hostfile, or this machine alone."""
    entry = find_entry(config, os.environ)
    hostfile = entry.hostfile if entry else config.hostfile
    return read_hostfile(hostfile) if hostfile else (LOCAL,)


def find_reach(config: LaunchConfig) -> Reach:
    """How the hosts of a run are reached: as the cluster was provisioned, or by the user's own ssh."""
    entry = find_entry(config, os.environ)
    if entry is None:
        return Reach(config.ssh_config)
    shares = entry.kind == "local" and not entry.options.get("image")
    own = config.ssh_config or entry.ssh_config
    return Reach(own, entry.python or sys.executable, entry.settings, shares, entry.ssh_config_there)


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
        f"{np} ranks do not fit: {counted(len(hosts), 'host')} with {counted(room, 'slot')}"
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
    hosts, reach = read_hosts(config), find_reach(config)
    _refuse_same_address(hosts)
    limit = min(len(hosts), config.np)
    wanted = hosts[:limit] if not any(host.slots for host in hosts) and not config.ppn else hosts
    found = dict(zip([host.name for host in wanted], gather_facts(wanted, reach)))
    _refuse_same_machine(wanted, found)
    cores = {name: len(host_facts.cores) for name, host_facts in found.items()}
    assignments = assign_ranks(wanted, config.np, config.ppn, cores)
    used = tuple(found[assignment.host.name] for assignment in assignments)
    # Hosts with disks of their own get their inputs in one way, wherever this machine is among them.
    own_disks = bool(reach.ssh_config_there) and len(used) > 1
    away = own_disks or not is_here(hosts[0], _resolve(hosts[0]))
    flavour = find_flavour_there(hosts[0], config.mpirun, reach) if away else find_flavour(config.mpirun)
    return Cluster(assignments, used, flavour, reach.mpirun_options, os.geteuid() == 0, reach, away, used[0].uid)


def is_here(host: Host, address: str) -> bool:
    """Whether a host at this address is this machine. With an ssh port of its own it is a container or a tunnel."""
    if host.port:
        return False
    return address.startswith("127.") or address in facts.read_interfaces().values()


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


def find_flavour_there(master: Host, wanted: str, reach: Reach) -> mpi.Flavour:
    """The mpirun of the master. Raises CpuftError when there is none."""
    # As on this machine, mpiexec.hydra itself rather than the script around it, which would not pass signals on.
    folder = os.path.dirname(reach.python)
    paths = (wanted,) if wanted else (f"{folder}/mpiexec.hydra", f"{folder}/mpirun")
    script = 'for path; do path=$(command -v "$path") && echo "$path" && exec "$path" --version; done; exit 1'
    answer = ssh.run(master, ssh.quote_command(("sh", "-c", script, "find", *paths), {}), config_path=reach.ssh_config)
    if answer.exit_code:
        raise CpuftError(
            f"there is no mpirun at {paths[-1]} on {master.name}: provision it with cpuft provision, or name its "
            f"mpirun with --mpirun"
        )
    path, _, version = answer.output.partition("\n")
    return mpi.parse_flavour(path, version + answer.errors)


def gather_facts(hosts: tuple[Host, ...], reach: Reach = Reach()) -> tuple[HostFacts, ...]:
    """Facts of every host, asked side by side. Raises CpuftError that names every host that failed."""
    addresses = [_resolve(host) for host in hosts]
    first_other = addresses[1] if len(hosts) > 1 else addresses[0]
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        answers = [
            pool.submit(_gather_one, host, is_here(host, address), addresses[0] if index else first_other, reach)
            for index, (host, address) in enumerate(zip(hosts, addresses))
        ]
    failures = [str(answer.exception()) for answer in answers if isinstance(answer.exception(), CpuftError)]
    if failures:
        raise CpuftError("; ".join(failures))
    return tuple(answer.result() for answer in answers)


def _gather_one(host: Host, is_local: bool, target: str, reach: Reach) -> HostFacts:
    if is_local:
        command = (sys.executable, facts.__file__, target)
        return parse_facts(execute.run_quietly(command, seconds=30).output, host.name)
    source = Path(facts.__file__).read_text(encoding="utf-8")
    # Where the environment is not at the same path, any Python tells at least what the host is.
    command_text = (
        f"$(command -v {shlex.quote(reach.python)} || echo python3) -c {shlex.quote(_FROM_STDIN)} {shlex.quote(target)}"
    )
    answer = ssh.run(host, command_text, stdin=source, config_path=reach.ssh_config)
    return parse_facts(answer.output or answer.errors, host.name)


def _resolve(host: Host) -> str:
    try:
        return socket.gethostbyname(host.name)
    except OSError as error:
        raise CpuftError(
            f"host {host.name} has no address ({error}): check its spelling in the hostfile, or write its address"
        ) from None
