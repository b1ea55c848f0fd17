"""The hosts of a run: which ones, how many ranks on each, and what they say of themselves."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpuft.argv import WITHOUT_WORKING_FOLDER
from cpuft.config import LaunchConfig
from cpuft.errors import CpuftError, counted
from cpuft.files import hash_text
from cpuft.hosts import facts, registry
from cpuft.hosts.hostfile import Host, find_job_hostfile, read_hostfile
from cpuft.hosts.mpi_implementations import Flavour, find_flavour
from cpuft.hosts.topology import HostFacts, parse_facts
from cpuft.hosts.transport import Transport, side_by_side
from cpuft.plan import Plan, Step

LOCAL = Host("localhost")
JOB = "CPUFT_JOB"
"""Folder of the cluster that a scheduler's job is, where that starts launches on its hosts itself."""
WORK_ROOT = "/var/tmp"
"""Where hosts with disks of their own keep, in a folder of each user's, what was sent for runs, and runs' own files."""
FROM_STDIN = f"{WITHOUT_WORKING_FOLDER}; exec(sys.stdin.read())"
"""What `python -c` runs on a host to execute a program that the launcher sends on standard input."""


@dataclass(frozen=True)
class Assignment:
    """A host and how many ranks run on it."""

    host: Host
    ranks: int


@dataclass(frozen=True)
class Access:
    """How the hosts of a cluster are reached, and what runs there."""

    transport: Transport = Transport()
    python: str = sys.executable
    """Python of the training environment, the same path on every host."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables of cpuft's own commands on the hosts."""
    shares_files: bool = False
    """Whether the hosts see this machine's files under the same paths."""
    config_there: str = ""
    """ssh's client configuration on the master's own disk, for mpirun; empty where it sees the transport's."""
    notice: str = ""
    renewal: str = ""
    """Both as in the cluster's entry."""
    cluster: str = ""
    """Name of the provisioned cluster; empty for none."""
    until: int = 0
    """When the hosts' lease ends, as in the cluster's entry."""

    def any_python(self, *words: str) -> tuple[str, ...]:
        """A command of the environment's Python; where that is missing, any Python tells at least what the host is."""
        return ("sh", "-c", 'python=$(command -v "$0" || echo python3); exec "$python" "$@"', self.python, *words)

    @property
    def mpirun_options(self) -> tuple[str, ...]:
        """ssh's options on the hosts themselves."""
        path = self.config_there or self.transport.config
        return ("-F", path) if path else ()


@dataclass(frozen=True)
class Cluster:
    """All that planning a launch needs to know of the world outside."""

    assignments: tuple[Assignment, ...]
    facts: tuple[HostFacts, ...]
    flavour: Flavour
    as_root: bool = False
    access: Access = Access()
    away: bool = False
    """Whether the run has a directory on the master's own disk, and results are fetched from there."""
    outside: bool = False
    """Whether this machine is none of the hosts but sees the same files: a login node that has an allocation."""
    uid: int = 0
    """Of this user on the master."""
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """As `cpuft.plan.Plan.ways`, of hosts that this machine's commands go to."""

    @property
    def python(self) -> str:
        """Python of the training environment on the hosts."""
        return self.access.python

    @property
    def bootstrap(self) -> str:
        """How mpirun starts its proxies on other hosts, where that is not by ssh."""
        return self.access.transport.bootstrap if len(self.assignments) > 1 or self.outside else ""

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
        return f"{self.folder}/{name_work(run_dir)}" if self.away else run_dir

    def command_on(self, host: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """A command of a host as one of this machine."""
        return Plan(ways=self.ways).here(Step("", argv, host=host)).command

    @property
    def master(self) -> str:
        """The first host, as the hostfile names it."""
        return self.assignments[0].host.name

    @property
    def has_own_disks(self) -> bool:
        """Whether what a run reads must be sent to its hosts."""
        return self.away and not self.access.shares_files

    def sent_file(self, work: str, index: int) -> str:
        """How files begin that hold what was sent to the processes of a run on a host of this number."""
        mark = hash_text(work, 12)
        return f"{self.folder}/{mark}.sent/{index}"

    @property
    def inherits(self) -> bool:
        """Whether all ranks run here, and so inherit the user's variables."""
        return not self.away and not self.outside and len(self.assignments) == 1

    @property
    def rank_hosts(self) -> tuple[str, ...]:
        """The host of each rank, as the hostfile names it."""
        return tuple(a.host.name for a in self.assignments for _ in range(a.ranks))


def name_work(run_dir: str) -> str:
    """Where a run of this machine's works on other hosts, below the user's folder there."""
    return f"{hash_text(f'{socket.gethostname()}:{run_dir}', 12)}/{os.path.basename(run_dir)}"


def find_entry(config: LaunchConfig, environ: Mapping[str, str]) -> registry.Entry | None:
    """The provisioned cluster that the run is for, by its name or its hostfile, else by the job that we run in."""
    if config.cluster and config.hostfile:
        raise CpuftError("--cluster and --hostfile both say where to run: give one of them")
    if not config.cluster and not config.hostfile:
        job = Path(environ[JOB]) if JOB in environ else None
        return registry.read_entry(job.parent, job.name) if job else None
    roots = registry.search_roots(environ)
    if config.cluster:
        return registry.find_entry(roots, config.cluster)
    return registry.find_by_hostfile(roots, config.hostfile)


def read_hosts(config: LaunchConfig) -> tuple[Host, ...]:
    """Hosts of the cluster or hostfile, else of the scheduler's job that we run in, else this machine alone."""
    entry = find_entry(config, os.environ)
    hostfile = entry.hostfile if entry else config.hostfile or find_job_hostfile(os.environ)
    if hostfile:
        return read_hostfile(hostfile)
    if not find_slurm(os.environ):
        return (LOCAL,)
    from cpuft.hosts import slurm

    return slurm.read_hosts(os.environ)


def find_slurm(environ: Mapping[str, str]) -> Transport | None:
    """The way to the hosts of the job of Slurm's that this process runs in; None, and nothing imported, for no job.

    Raises CpuftError: srun has started this process several times.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    from cpuft.hosts import slurm

    return slurm.find_slurm_transport(environ)


def find_access(config: LaunchConfig) -> Access:
    """How the hosts of a run are reached: as the cluster was provisioned, as the job that we run in has it, or by the
    user's own ssh."""
    entry, of_job = find_entry(config, os.environ), find_job_hostfile(os.environ)
    if entry is None and of_job and config.hostfile in ("", of_job) and not config.ssh_config:
        from cpuft.hosts import mpijob

        return Access(mpijob.open_mpijob_transport())
    if entry is None:
        in_job = None if config.hostfile else find_slurm(os.environ)
        return Access(in_job or Transport(config.ssh_config), shares_files=bool(in_job))
    transport = Transport(config.ssh_config or entry.ssh_config)
    python = entry.python or sys.executable
    there = entry.ssh_config_there
    known = Access(transport, python, entry.settings, entry.shares_files, there, entry.notice, entry.renewal)
    return replace(known, cluster=entry.name, until=entry.until)


def assign_ranks(hosts: tuple[Host, ...], np: int, ppn: int, cores: Mapping[str, int]) -> tuple[Assignment, ...]:
    """Ranks host by host, in the order of the hostfile, `ppn` on each (0: as even as can be).

    A host's slots bound its ranks; `cores` bounds those of a host whose line gives no slots, where it is known.

    Raises CpuftError: more ranks than slots.
    """
    slots = {host.name: host.slots or cores.get(host.name, 0) for host in hosts}
    share = ppn or max(1, -(-np // len(hosts)))
    # Hosts of unequal size: all slots of a host before the next, the last takes the rest.
    for most in (share, np) if not ppn and all(slots.values()) else (share,):
        assignments, left = [], np
        for host in hosts:
            count = min(most, left)
            if slots[host.name] and count > slots[host.name]:
                if ppn or len(hosts) == 1:
                    raise CpuftError(_too_many(count, host, slots[host.name]))
                count = slots[host.name]
            assignments += [Assignment(host, count)] if count else []
            left -= count
        if not left:
            return tuple(assignments)
    room = sum(min(share, slots[host.name] or share) for host in hosts)
    raise CpuftError(
        f"{np} ranks do not fit: {counted(len(hosts), 'host')} with {counted(room, 'slot')}"
        f"{f' at --ppn {ppn}' if ppn else ''}: lower --np, or add hosts or slots=N to the hostfile"
    )


def _too_many(ranks: int, host: Host, slots: int) -> str:
    what = "slots" if host.slots else "cores"
    return f"{ranks} ranks on {host.name}, which has {slots} {what}: lower --np, or say slots={ranks} in a hostfile"


def gather_cluster(config: LaunchConfig, hosts: tuple[Host, ...] = (), access: Access | None = None) -> Cluster:
    """Ask all hosts that the run needs, side by side, and find mpirun.

    `hosts`: those to choose from, the master first; without, all that the configuration names. `access`: the way to
    them, where it is known already.

    Raises CpuftError: naming every host that did not answer, with what it said.
    """
    hosts, access = hosts or read_hosts(config), access or find_access(config)
    # The hosts that a small run leaves out are looked at, too: the next one will need them.
    _refuse_twins(hosts, [access.transport.address(host) for host in hosts])
    limit = min(len(hosts), config.np)
    wanted = hosts[:limit] if not any(host.slots for host in hosts) and not config.ppn else hosts
    found = dict(zip([host.name for host in wanted], gather_facts(wanted, access)))
    _refuse_twins(wanted, [(one.boot_id, one.hostname, sorted(one.interfaces.items())) for one in found.values()])
    cores = {name: len(host_facts.cores) for name, host_facts in found.items()}
    assignments = assign_ranks(wanted, config.np, config.ppn, cores)
    used = tuple(found[assignment.host.name] for assignment in assignments)
    # Hosts with disks of their own get their inputs in one way, wherever this machine is among them.
    here = access.transport.is_here(hosts[0])
    outside = bool(access.transport.bootstrap) and not here
    away = (bool(access.config_there) and len(used) > 1) or not (here or outside)
    flavour = find_flavour(hosts[0], config.mpirun, access.python, access.transport)
    ways = {a.host.name: access.transport.way(a.host) for a in assignments} if away else {}
    uid = used[0].uid
    return Cluster(assignments, used, flavour, os.geteuid() == 0, access, away, outside, uid, ways)


def _refuse_twins(hosts: tuple[Host, ...], identities: Sequence[object]) -> None:
    """Two names of one host would put two hosts' ranks on the same cores."""
    for host, identity in zip(hosts, identities):
        first = hosts[identities.index(identity)]
        if first is not host:
            raise CpuftError(
                f"{first.name} and {host.name} are the same host: keep one line, and say slots=N for several ranks"
            )


def gather_facts(hosts: tuple[Host, ...], access: Access) -> tuple[HostFacts, ...]:
    """Facts of every host, asked side by side.

    Raises CpuftError that names every host that failed; and says so when the hosts' lease has ended.
    """
    addresses = [access.transport.address(host) for host in hosts]
    # The master's way to the first other host, and everyone else's way to the master.
    targets = {host.name: addresses[0] for host in hosts[1:]} | {hosts[0].name: addresses[:2][-1]}
    source = Path(facts.__file__).read_text(encoding="utf-8")

    def gather(host: Host) -> HostFacts:
        answer = access.transport.run(host, access.any_python("-c", FROM_STDIN, targets[host.name]), source)
        return parse_facts(answer.output or answer.errors, host.name)

    try:
        return tuple(side_by_side(gather, hosts))
    except CpuftError as error:
        if not 0 < access.until < time.time():
            raise
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(access.until))
        raise CpuftError(
            f"the lease of cluster {access.cluster} ended at {ended}, and its hosts end themselves then: run cpuft "
            f"provision down {access.cluster}, then rent the cluster again with cpuft provision aws ({error})"
        ) from None
