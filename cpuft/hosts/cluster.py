"""The hosts of a run: which ones, how they are reached, how many ranks each has, and the facts that each reports."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpuft import transfer
from cpuft.argv import WITHOUT_WORKING_FOLDER
from cpuft.config import LaunchConfig
from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.execute import Answer
from cpuft.files import hash_text
from cpuft.hosts import facts, registry
from cpuft.hosts.hostfile import Host, find_job_hostfile, read_hostfile
from cpuft.hosts.mpi_implementations import MpiImplementation, find_mpi
from cpuft.hosts.topology import HostFacts, parse_facts
from cpuft.hosts.transport import SshTransport, Transport, map_hosts
from cpuft.plan import Plan, Step
from cpuft.serialization import load, parse_json

LOCAL = Host("localhost")
"""The only host of a run without cluster, hostfile or scheduler: this machine."""
JOB = "CPUFT_JOB"
"""Environment variable with the folder of the cluster entry that a node of an AWS Batch job wrote for its job."""
WORK_ROOT = "/var/tmp"
"""Where hosts with disks of their own keep the files of runs, in a folder cpuft-UID for each user."""
STATE_FILE = "state.json"
"""File with the run state (`cpuft.launch.state`), in the folder of a run here and on its hosts."""
FROM_STDIN = f"{WITHOUT_WORKING_FOLDER}; exec(sys.stdin.read())"
"""Argument of `python -c` on a host, to run a program that the launcher sends on standard input."""


@dataclass(frozen=True)
class Assignment:
    """A host and the number of ranks on it."""

    host: Host
    ranks: int
    """At least 1."""


@dataclass(frozen=True)
class Access:
    """How the hosts of a cluster are reached, and what is installed there. The default is the user's own ssh."""

    transport: Transport = SshTransport()
    entry: registry.Entry = registry.NO_CLUSTER
    """What the registry knows about the provisioned cluster; without a name for other hosts."""

    @property
    def python(self) -> str:
        """Python of the training environment, the same path on every host."""
        return self.entry.python or sys.executable

    def any_python(self, *arguments: str) -> tuple[str, ...]:
        """Return the argv that runs the environment's Python, or `python3` where that is missing, with `arguments`.

        It is a command of sh, which chooses on the host. Any Python can report at least the facts of its host.
        """
        script = 'python=$(command -v "$0" || echo python3); exec "$python" "$@"'
        return ("sh", "-c", script, self.python, *arguments)

    def transfer_command(self, *words: str) -> tuple[str, ...]:
        """Return the argv that starts the other side of a transfer (`transfer.connect`) on the host where it runs.

        Parameters
        ----------
        words: what it does there (`transfer.ROLES`), and the arguments of this.
        """
        return self.any_python("-IS", "-c", transfer.FROM_STREAM, *words)

    def run_transfer(self, host: Host, *words: str) -> Answer:
        """Run `cpuft.transfer` on a host where nothing has to be sent; return its answer."""
        program = Path(transfer.__file__).read_text(encoding="utf-8")
        return self.transport.run(host, self.any_python("-IS", "-c", FROM_STDIN, *words), program)

    @property
    def mpirun_options(self) -> tuple[str, ...]:
        """Options of the ssh commands by which mpirun starts its proxies: ("-F", path of ssh's client configuration).

        The path is the entry's on the head host's own disk, else that of the transport; the tuple is empty if both are
        empty.
        """
        path = self.entry.ssh_config_there or self.transport.config
        return ("-F", path) if path else ()


@dataclass(frozen=True)
class Cluster:
    """All that planning a launch needs to know about the hosts of a run."""

    assignments: tuple[Assignment, ...]
    """The hosts with ranks and their numbers of ranks. The head host, where mpirun runs, is the first."""
    facts: tuple[HostFacts, ...]
    """Of each assignment's host, in the same order."""
    mpi: MpiImplementation
    as_root: bool = False
    """Whether this process runs as root."""
    access: Access = Access()
    works_remotely: bool = False
    """Whether the ranks work in a folder on the head host's own disk, from which the results are fetched."""
    on_login_node: bool = False
    """Whether this machine is a login node with an allocation: not one of the hosts, but it sees the same files."""
    uid: int = 0
    """This user's id on the head host."""
    command_prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`Transport.command_prefix` by host name, such as ("ssh", ..., "node1"), where steps of the plan run on hosts
    (`works_remotely`); otherwise empty."""
    token: str = field(default_factory=partial(secrets.token_hex, 16), compare=False)
    """Makes the folders of new runs on hosts differ from those of all other launches, whatever their paths are here."""

    @property
    def python(self) -> str:
        """Python of the training environment on the hosts."""
        return self.access.python

    @property
    def is_simulated(self) -> bool:
        """Whether the hosts are parts of one machine."""
        is_one = len(self.facts) > 1 and len({one.boot_id for one in self.facts}) == 1
        return self.access.entry.kind == "local" or is_one

    @property
    def bootstrap(self) -> str:
        """How mpirun starts its proxies on other hosts: "slurm" in a Slurm job, "" for by ssh.

        Also "" where there are no proxies: all ranks are on one host, and this machine is not a login node.
        """
        return self.access.transport.bootstrap if len(self.assignments) > 1 or self.on_login_node else ""

    @property
    def folder(self) -> str:
        """This user's folder on hosts with disks of their own, /var/tmp/cpuft-UID on all; `files.PRIVATE` makes it."""
        return f"{WORK_ROOT}/cpuft-{self.uid}"

    @property
    def inputs(self) -> str:
        """Folder of the inputs that were sent to hosts, which are stored by checksum."""
        return f"{self.folder}/inputs"

    def work_dir(self, run_dir: str) -> str:
        """Return the folder in which the ranks of a run work: `run_dir`, or a folder on the head host's own disk.

        The latter if `works_remotely`. Nothing is made. It is the folder that `read_host_folder` finds, so that a run
        is resumed in its folder by whichever machine has its run folder, and for a new run a folder that no other has.
        """
        if not self.works_remotely:
            return run_dir
        return f"{self.folder}/{self.name_folder(run_dir)}"

    def name_folder(self, run_dir: str) -> str:
        """Return "ID/NAME" of the run in a folder on this machine. The id has 12 hexadecimal digits; that of a new run
        is made at random."""
        name = os.path.basename(run_dir).encode(errors="replace").decode()
        return read_host_folder(run_dir) or f"{hash_text(self.token + run_dir, 12)}/{name}"

    def command_on(self, host: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the argv with which this machine runs `argv` on a host.

        With `works_remotely`, that is the ssh or srun command of the host, followed by the shell line `exec ARGV`.
        `argv` comes back unchanged if the host is this machine, without `works_remotely`, and for a host that is not in
        the cluster. Never raises.

        Parameters
        ----------
        host: name of the host, as in the hostfile.
        """
        return Plan(command_prefixes=self.command_prefixes).as_local(Step("", argv, host=host)).command

    def transfer_on(self, host: str, *words: str) -> tuple[str, ...]:
        """Return the argv with which `transfer.connect` starts the other side on a host (`Access.transfer_command`)."""
        return self.command_on(host, self.access.transfer_command(*words))

    @property
    def addresses(self) -> dict[str, str]:
        """Each host's own address in the network over which it reaches the head host, or the head host another one.

        By name of the host, as in the hostfile. Empty for a host without a route to them; hosts whose facts are not
        known are missing.
        """
        pairs = zip(self.assignments, self.facts)
        return {assignment.host.name: next(iter(found.routes.values()), "") for assignment, found in pairs}

    @property
    def head(self) -> str:
        """Name of the head host, as in the hostfile."""
        return self.assignments[0].host.name

    @property
    def has_own_disks(self) -> bool:
        """Whether the files that a run reads must be sent to its hosts.

        True if the ranks work on the head host's own disk and the hosts do not see this machine's files.
        """
        return self.works_remotely and not self.access.entry.shares_files

    def sent_file(self, work: str, index: int) -> str:
        """Return the beginning of the paths of the files that were sent to a run's processes on one host.

        It is FOLDER/HASH.sent/INDEX, to which the caller adds "-NAME"; FOLDER is `folder`, HASH 12 hexadecimal digits
        of `work`.

        Parameters
        ----------
        work: the folder in which the run's ranks work, as `work_dir` returns it.
        index: place of the host in `assignments`, from 0.
        """
        mark = hash_text(work, 12)
        return f"{self.folder}/{mark}.sent/{index}"

    @property
    def inherits(self) -> bool:
        """Whether all ranks run on this machine and so inherit the user's environment variables."""
        return not self.works_remotely and not self.on_login_node and len(self.assignments) == 1

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts together."""
        return sum(one.ranks for one in self.assignments)

    @property
    def rank_hosts(self) -> tuple[str, ...]:
        """The host name of each rank, in the order of the ranks, as in the hostfile."""
        return tuple(a.host.name for a in self.assignments for _ in range(a.ranks))


def read_host_folder(run_dir: str) -> str:
    """Return the path of a run's folder on its hosts, "ID/NAME" below the user's folder; "" if it has none yet.

    The run state in the run's folder on this machine says it.
    """
    try:
        values = load(dict[str, Any], parse_json(Path(run_dir, STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ""
    name = f"{values.get('id')}/{values.get('name')}"
    return name if re.fullmatch(r"[0-9a-f]{12}/(?!\.\.?$)[^/\0]+", name) else ""


def find_entry(config: LaunchConfig, environ: Mapping[str, str]) -> registry.Entry | None:
    """Return the entry of a run's provisioned cluster in the registry; None for a run without one.

    With --cluster it is the cluster of that name, with --hostfile the one that has this hostfile (None if no cluster
    has it). With neither it is the cluster that a node of an AWS Batch job wrote (CPUFT_JOB); None if that is not set.

    Raises CpuftError: --cluster and --hostfile are both given; there is no cluster of that name, or CPUFT_JOB names
    none; or an entry that was read, or the registry, is damaged or other users may write to it.
    """
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
    """Return the hosts that `config` names, the head host first.

    These are the hosts of the provisioned cluster (`find_entry`), else of --hostfile, else of the hostfile of an MPIJob
    in whose launcher this runs, else of the Slurm job in which this runs (scontrol is asked); else LOCAL alone. Of
    these, --only-hosts chooses some.

    Raises CpuftError: the entry or the hostfile cannot be used, srun has started this process several times, Slurm does
    not answer, or --only-hosts names another host.
    """
    entry = find_entry(config, os.environ)
    hostfile = entry.hostfile if entry else config.hostfile or find_job_hostfile(os.environ)
    if hostfile:
        hosts = read_hostfile(hostfile)
    elif not find_slurm(os.environ):
        hosts = (LOCAL,)
    else:
        from cpuft.hosts import slurm

        hosts = slurm.read_hosts(os.environ)
    return _select_hosts(hosts, config.only_hosts) if config.only_hosts else hosts


def _select_hosts(hosts: Sequence[Host], names: str) -> tuple[Host, ...]:
    """Return the hosts that --only-hosts names, in its order.

    Raises CpuftError: there is no host of this name, or a name is there twice.
    """
    found, known = list[Host](), {host.name: host for host in hosts}
    for name in (part.strip() for part in names.split(",")):
        if name not in known:
            raise CpuftError(f"--only-hosts: there is no host {name!r:.80}: {suggest_names(name, tuple(known))}")
        if known[name] in found:
            raise CpuftError(f"--only-hosts has {name!r:.80} twice: leave out one of them")
        found.append(known[name])
    return tuple(found)


def find_slurm(environ: Mapping[str, str]) -> Transport | None:
    """Return the transport to the hosts of the Slurm job in which this process runs; None outside of a job.

    The module for Slurm is imported only in a job. Raises CpuftError: srun has started this process several times.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    from cpuft.hosts import slurm

    return slurm.find_transport(environ)


def find_access(config: LaunchConfig) -> Access:
    """Return how the hosts of a run are reached, and what is installed there.

    In this order: as the provisioned cluster's entry says (--ssh-config wins over its ssh configuration); in the
    launcher of an MPIJob, unless another --hostfile or an --ssh-config is given, with the job's key (this writes the
    job's ssh files, `mpijob.make_transport`); in a Slurm job without --hostfile by srun; else by ssh with --ssh-config
    or the user's own configuration.

    Raises CpuftError: the entry cannot be used (`find_entry`), the pod has no key of its MPIJob, or srun has started
    this process several times.
    """
    entry, of_job = find_entry(config, os.environ), find_job_hostfile(os.environ)
    if entry is None and of_job and config.hostfile in ("", of_job) and not config.ssh_config:
        from cpuft.hosts import mpijob

        return Access(mpijob.make_transport())
    if entry is None:
        in_job = None if config.hostfile else find_slurm(os.environ)
        transport = in_job or SshTransport(config.ssh_config)
        return Access(transport, replace(registry.NO_CLUSTER, shares_files=bool(in_job)))
    return Access(SshTransport(config.ssh_config or entry.ssh_config, entry.here or None), entry)


def assign_ranks(hosts: tuple[Host, ...], np: int, ppn: int, cores: Mapping[str, int]) -> tuple[Assignment, ...]:
    """Distribute `np` ranks over hosts, in the order of the hostfile; hosts that get none are left out.

    Without `ppn` every host gets the same number, np divided by the number of hosts and rounded up, or as many as it
    has slots, until none are left. If ranks remain and the slots of all hosts are known, every host is filled before
    the next one instead.

    Parameters
    ----------
    hosts: at least one.
    ppn: ranks on each host; 0 for as even as possible.
    cores: number of cores by host name, where known. They and `max_slots` limit the ranks of a host without
        `slots`. A host with none of these takes any number.

    Raises CpuftError: the ranks do not fit into the slots, or into the hosts at `ppn` ranks each.
    """
    limits = {host.name: (cores.get(host.name, 0), host.max_slots) for host in hosts}
    slots = {host.name: host.slots or min(filter(None, limits[host.name]), default=0) for host in hosts}
    share = ppn or max(1, -(-np // len(hosts)))
    # If even shares do not fit, because hosts differ in size, every host is filled before the next one.
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
    fitting = sum(min(share, slots[host.name] or share) for host in hosts)
    raise CpuftError(
        f"{np} ranks do not fit: {counted(len(hosts), 'host')} with {counted(fitting, 'slot')}"
        f"{f' at --ppn {ppn}' if ppn else ''}: lower --np, or add hosts or slots=N to the hostfile"
    )


def _assign_default(hosts: tuple[Host, ...], ppn: int, facts: Mapping[str, HostFacts]) -> tuple[Assignment, ...]:
    """Return the ranks without --np: one for each NUMA node of a host, or `ppn`, but no more than its slots."""
    if ppn:
        cores = {name: len(one.cores) for name, one in facts.items()}
        return assign_ranks(hosts, ppn * len(hosts), ppn, cores)
    limits = [host.slots or host.max_slots or facts[host.name].numa_nodes for host in hosts]
    return tuple(Assignment(host, min(limit, facts[host.name].numa_nodes)) for host, limit in zip(hosts, limits))


def _too_many(ranks: int, host: Host, slots: int) -> str:
    what = "slots" if slots in (host.slots, host.max_slots) else "cores"
    return f"{ranks} ranks on {host.name}, which has {slots} {what}: lower --np, or write slots={ranks} in a hostfile"


def gather_cluster(
    config: LaunchConfig, hosts: tuple[Host, ...] = (), access: Access | None = None, is_on_host_disk: bool = False
) -> Cluster:
    """Query all hosts that a run needs at the same time, distribute the ranks, and find mpirun.

    Each host runs a program that reports its facts, for at most 60 s, and the head host runs `mpirun --version`.
    Without slots and --ppn, only the first --np hosts are queried, if it is given.

    Parameters
    ----------
    hosts: the hosts to choose from, the head host first; without, all that `config` names (`read_hosts`).
    access: how they are reached; without, `find_access` finds out.
    is_on_host_disk: whether the run began in a folder on the disk of a host. It stays in such a folder, even if the
        remaining hosts alone would not need one: its checkpoints are there.

    Raises CpuftError: hosts did not answer (each is named, with its message) or the lease of the cluster has ended, two
    names are the same host, the ranks do not fit, there is no mpirun that can be used, or `read_hosts` or `find_access`
    fails.
    """
    hosts, access = hosts or read_hosts(config), access or find_access(config)
    access.transport.hosts.update({host.name: host for host in hosts})
    # Hosts that a small run leaves out are checked, too: the next run will need them.
    _refuse_twins(hosts, [access.transport.address(host) for host in hosts])
    has_own_count = any(host.slots for host in hosts) or config.ppn
    wanted = hosts[: config.np or None] if not has_own_count else hosts
    found = dict(zip([host.name for host in wanted], gather_facts(wanted, access)))
    _refuse_twins(wanted, [(one.boot_id, one.hostname, sorted(one.interfaces.items())) for one in found.values()])
    cores = {name: len(host_facts.cores) for name, host_facts in found.items()}
    if config.np:
        assignments = assign_ranks(wanted, config.np, config.ppn, cores)
    else:
        assignments = _assign_default(wanted, config.ppn, found)
    used = tuple(found[assignment.host.name] for assignment in assignments)
    head_is_here = access.transport.is_here(hosts[0])
    on_login_node = bool(access.transport.bootstrap) and not head_is_here
    # Hosts with disks of their own get their inputs in the same way, wherever this machine is among them, and also if
    # the launch was moved here, to the head host.
    is_moved = bool(access.transport.here)
    works_remotely = (
        is_moved
        or is_on_host_disk
        or (bool(access.entry.ssh_config_there) and len(used) > 1)
        or not (head_is_here or on_login_node)
    )
    return Cluster(
        assignments,
        used,
        mpi=find_mpi(hosts[0], config.mpirun, access.python, access.transport),
        as_root=os.geteuid() == 0,
        access=access,
        works_remotely=works_remotely,
        on_login_node=on_login_node,
        uid=used[0].uid,
        command_prefixes={a.host.name: access.transport.command_prefix(a.host) for a in assignments}
        if works_remotely
        else {},
        # The launcher elsewhere, which moved the command here, knows the folder of the run from its name alone.
        token="" if is_moved else secrets.token_hex(16),
    )


def _refuse_twins(hosts: tuple[Host, ...], identities: Sequence[object]) -> None:
    """Raise CpuftError when two names are the same host: their ranks would run on the same cores."""
    for host, identity in zip(hosts, identities):
        first = hosts[identities.index(identity)]
        if first is not host:
            raise CpuftError(
                f"{first.name} and {host.name} are the same host: keep one line, and write slots=N for several ranks"
            )


def gather_facts(hosts: tuple[Host, ...], access: Access) -> tuple[HostFacts, ...]:
    """Return the facts of every host, in the order of `hosts` (at least one); all are queried at the same time.

    Each host runs the program `cpuft.hosts.facts` for at most 60 s. It reports its route to the head host, the first of
    `hosts`; the head host reports its route to the second one, or to itself if it is alone.

    Raises CpuftError: names every host that failed, with its message, or the first one that has no address; or says
    that the lease of the cluster has ended.
    """
    addresses = [access.transport.address(host) for host in hosts]
    # Each host reports its route to the head host, and the head host its route to the first other host.
    targets = {host.name: addresses[0] for host in hosts[1:]} | {hosts[0].name: addresses[:2][-1]}
    source = Path(facts.__file__).read_text(encoding="utf-8")

    def gather(host: Host) -> HostFacts:
        answer = access.transport.run(host, access.any_python("-c", FROM_STDIN, targets[host.name]), source)
        return parse_facts(answer.output or answer.errors, host.name)

    try:
        return tuple(map_hosts(gather, hosts))
    except CpuftError as error:
        if not 0 < access.entry.until < time.time():
            raise
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(access.entry.until))
        raise CpuftError(
            f"the lease of cluster {access.entry.name} ended at {ended}, and its hosts shut down then: run cpuft "
            f"provision down {access.entry.name}, then rent the cluster again with cpuft provision aws ({error})"
        ) from None
