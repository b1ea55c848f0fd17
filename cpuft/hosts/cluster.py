"""The hosts of a run: which ones, how they are reached, their ranks and facts, and which of them are refused."""

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
from types import ModuleType
from typing import Any

from cpuft import transfer
from cpuft.argv import WITHOUT_WORKING_FOLDER
from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError, suggest_names
from cpuft.execute import Answer
from cpuft.files import hash_text
from cpuft.hosts import facts, registry, slurm
from cpuft.hosts.hostfile import Host, find_job_hostfile, read_hostfile
from cpuft.hosts.mpi_implementations import MpiImplementation, find_mpi
from cpuft.hosts.rank_counts import Assignment, choose_ranks
from cpuft.hosts.topology import HostFacts, parse_facts
from cpuft.hosts.transport import SshTransport, Transport, map_hosts
from cpuft.plans import Plan, Setting, Step
from cpuft.serialization import load, parse_json

LOCAL = Host("localhost")
JOB = "CPUFT_JOB"
"""Environment variable with the folder of the cluster entry that a node of an AWS Batch job wrote for its job."""
WORK_ROOT = "/var/tmp"
"""Where hosts with disks of their own keep the files of runs, in a folder cpuft-UID for each user."""
DETACHED = "detached"
"""Folder in that one of the detached runs, ID, whose results are first in ID/run/NAME (`detached_head`)."""
STATE_FILE = "state.json"
"""File with the run state (`cpuft.launch.run_state`), in the folder of a run here and on its hosts."""
FROM_STDIN = f"{WITHOUT_WORKING_FOLDER}; exec(sys.stdin.read())"
"""Argument of `python -c` on a host, to run a program that the launcher sends on standard input."""


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

    @property
    def settings(self) -> tuple[Setting, ...]:
        """`entry.settings`, for the steps of plans."""
        reason = "cpuft's own commands need it on the hosts of this cluster"
        return tuple(Setting(name, value, reason) for name, value in self.entry.settings.items())

    def with_settings(self, *command: str) -> tuple[str, ...]:
        """Return the argv that runs a command with `entry.settings` in its environment; without any, `command`."""
        settings = [f"{name}={value}" for name, value in self.entry.settings.items()]
        return ("env", *settings, *command) if settings else command

    def any_python(self, *arguments: str) -> tuple[str, ...]:
        """Return the argv that runs `arguments` in the environment's Python, or in `python3` where that is missing."""
        script = 'python=$(command -v "$0" || echo python3); exec "$python" "$@"'
        return ("sh", "-c", script, self.python, *arguments)

    def transfer_command(self, *words: str) -> tuple[str, ...]:
        """Return the argv with which a host is the other side of `transfer.connect`. `words` are a role in
        `transfer.ROLES` and its arguments, such as ("send-run", FOLDER, LEFT_OUT).
        """
        return self.any_python("-IS", "-c", transfer.FROM_STREAM, *words)

    def run_module(self, host: Host, module: ModuleType, *words: str, seconds: float = 60.0) -> Answer:
        """Run a module that imports the standard library alone on a host, which needs no cpuft, with `words` as its
        arguments, for at most `seconds`, and return its answer, whatever the exit code is. Raises as `Transport.run`.
        """
        program = Path(str(module.__file__)).read_text(encoding="utf-8")
        return self.transport.run(host, self.any_python("-IS", "-c", FROM_STDIN, *words), program, seconds)

    @property
    def mpirun_options(self) -> tuple[str, ...]:
        """Options of the ssh by which mpirun starts its proxies: ("-F", PATH), or () for the user's own ssh."""
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
    access: Access = Access()
    works_remotely: bool = False
    """Whether the ranks work in a folder on the head host's own disk, from which the results are fetched."""
    on_login_node: bool = False
    """Whether this machine is a login node with an allocation: not one of the hosts, but it sees the same files."""
    uid: int = 0
    """This user's id on the head host."""
    most_cores: int = 0
    """Largest number of cores that a rank uses; 0 for no limit."""
    command_prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`Transport.command_prefix` by host name; empty unless steps of the plan run on hosts (`works_remotely`)."""
    token: str = field(default_factory=partial(secrets.token_hex, 16), compare=False)
    """Makes the folders of new runs on hosts differ from those of all other launches, whatever their paths are here."""

    @property
    def python(self) -> str:
        """Python of the training environment on the hosts."""
        return self.access.python

    @property
    def is_simulated(self) -> bool:
        """Whether the hosts are parts of one machine: of a `local` cluster, or several with the same boot id."""
        is_one = len(self.facts) > 1 and len({one.boot_id for one in self.facts}) == 1
        return self.access.entry.kind == "local" or is_one

    @property
    def cores_per_rank(self) -> int:
        """Number of cores of the rank that has fewest, at most `most_cores`; 0 if ranks share cores."""
        fewest = min(len(facts.cores) // one.ranks for one, facts in zip(self.assignments, self.facts))
        return min(fewest, self.most_cores or fewest)

    @property
    def bootstrap(self) -> str:
        """How mpirun starts its proxies: "slurm", or "" for ssh and where there are none (one host, no login node)."""
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
        """Return the folder of the ranks: `folder`/`name_folder(run_dir)` if `works_remotely`, else `run_dir`."""
        if not self.works_remotely:
            return run_dir
        # Whichever machine has the run folder resumes the run in its folder there; that of a new run is no other run's.
        return f"{self.folder}/{self.name_folder(run_dir)}"

    def name_folder(self, run_dir: str) -> str:
        """Return "ID/NAME", a run's folder below `folder` on its hosts: as the run state in `run_dir` says, else a new
        one with 12 hexadecimal digits and the name of `run_dir`, which stays the same for this cluster.
        """
        name = os.path.basename(run_dir).encode(errors="replace").decode()
        # The launcher elsewhere, which moved the command here, has chosen the id.
        places = "|".join(map(re.escape, (self.folder, os.path.realpath(self.folder))))
        moved = re.match(rf"(?:{places})/{DETACHED}/([0-9a-f]{{12}})/run/[^/]+$", run_dir)
        return read_host_folder(run_dir) or f"{moved[1] if moved else hash_text(self.token + run_dir, 12)}/{name}"

    def list_folders(self, run_dir: str) -> tuple[str, ...]:
        """Return what hosts may have of a run that was started before: its folder, `folder`/ID, and, unless `run_dir`
        is in it, that of a detached command's results, `folder`/detached/ID/run.
        """
        folder = os.path.dirname(self.work_dir(run_dir))
        moved = f"{self.folder}/{DETACHED}/{os.path.basename(folder)}/run"
        return (folder,) if run_dir.startswith(f"{moved}/") else (folder, moved)

    def command_on(self, host: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the argv that runs `argv` on the host of this name: by ssh or srun if `works_remotely`, or itself."""
        return Plan(command_prefixes=self.command_prefixes).as_local(Step("", argv, host=host)).command

    def transfer_on(self, host: str, *words: str) -> tuple[str, ...]:
        """Return the argv by which `transfer.connect` starts the other side on a host, as `Access.transfer_command`."""
        return self.command_on(host, self.access.transfer_command(*words))

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts with ranks by name, the head host first."""
        return {one.host.name: one.host for one in self.assignments}

    @property
    def head(self) -> str:
        """Name of the head host, as in the hostfile."""
        return self.assignments[0].host.name

    @property
    def has_own_disks(self) -> bool:
        """Whether the files that a run reads must be sent to its hosts, which do not see this machine's."""
        return self.works_remotely and not self.access.entry.shares_files

    def sent_file(self, work: str, index: int) -> str:
        """Return the beginning of the path, before "-NAME", of each secret file for a process on the host of
        `assignments[index]`; `work` is the run folder there.
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
        """The host name of each rank, in the order of the ranks."""
        return tuple(a.host.name for a in self.assignments for _ in range(a.ranks))


def read_host_folder(run_dir: str) -> str:
    """Return "ID/NAME" of a run's folder on its hosts, by the run state in `run_dir` here; "" if that is unusable."""
    try:
        values = load(dict[str, Any], parse_json(Path(run_dir, STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ""
    name = f"{values.get('id')}/{values.get('name')}"
    return name if re.fullmatch(r"[0-9a-f]{12}/(?!\.\.?$)[^/\0]+", name) else ""


def _find_entry(config: LaunchConfig, environ: Mapping[str, str]) -> registry.Entry | None:
    """Return the entry of a run's provisioned cluster, by --cluster, --hostfile or CPUFT_JOB; None for other hosts."""
    if config.cluster and config.hostfile:
        raise CpuftError("--cluster and --hostfile both say where to run: give one of them")
    if not config.cluster and not config.hostfile:
        job = Path(environ[JOB]) if JOB in environ else None
        return registry.read_entry(job.parent, job.name) if job else None
    roots = registry.search_roots(environ)
    if config.cluster:
        return registry.find_by_name(roots, config.cluster)
    return registry.find_by_hostfile(roots, config.hostfile)


def read_hosts(config: LaunchConfig) -> tuple[Host, ...]:
    """Return the hosts of the cluster, hostfile, MPIJob or Slurm job of the run, the head host first, else LOCAL alone.
    Raises CpuftError: they cannot be read or found, or --only-hosts does not fit them.
    """
    entry = _find_entry(config, os.environ)
    hostfile = entry.hostfile if entry else config.hostfile or find_job_hostfile(os.environ)
    if hostfile:
        hosts = read_hostfile(hostfile)
    else:
        hosts = slurm.read_job_hosts(os.environ) if slurm.find_transport(os.environ) else (LOCAL,)
    return _select_hosts(hosts, config.only_hosts) if config.only_hosts else hosts


def _select_hosts(hosts: Sequence[Host], names: str) -> tuple[Host, ...]:
    wanted, known = [part.strip() for part in names.split(",")], {host.name: host for host in hosts}
    for name in wanted:
        if name not in known:
            raise CpuftError(f"--only-hosts: there is no host {name!r:.80}: {suggest_names(name, tuple(known))}")
        if wanted.count(name) > 1:
            raise CpuftError(f"--only-hosts has {name!r:.80} twice: leave out one of them")
    return tuple(known[name] for name in wanted)


def find_access(config: LaunchConfig) -> Access:
    """Return how the hosts are reached, and what is installed there: by the cluster's entry, else as the MPIJob or the
    Slurm job in `os.environ` says, else by the user's own ssh. In an MPIJob, its ssh files are written.
    Raises CpuftError: both --cluster and --hostfile are given, or --ssh-config, entry or job cannot be used.
    """
    entry, of_job = _find_entry(config, os.environ), find_job_hostfile(os.environ)
    # The head host, which may see this file, works in another folder.
    ssh_config = config.ssh_config and os.path.abspath(os.path.expanduser(config.ssh_config))
    if ssh_config and not os.path.exists(ssh_config):
        raise CpuftError(f"there is no file {ssh_config}, which --ssh-config names: give ssh's configuration file")
    if entry is None and of_job and config.hostfile in ("", of_job) and not ssh_config:
        from cpuft.hosts import mpijob  # only its pods need it

        return Access(mpijob.make_transport())  # this writes the job's ssh files
    if entry is None:
        in_job = None if config.hostfile else slurm.find_transport(os.environ)
        transport = in_job or SshTransport(ssh_config)
        return Access(transport, replace(registry.NO_CLUSTER, shares_files=bool(in_job)))
    return Access(SshTransport(ssh_config or entry.ssh_config, entry.here or None), entry)


def gather_cluster(
    config: LaunchConfig, hosts: tuple[Host, ...] = (), access: Access | None = None, is_on_host_disk: bool = False
) -> Cluster:
    """Query all hosts that a run needs at the same time, distribute the ranks, and find mpirun.

    `hosts` are those to choose from, the head host first. A run that began on the disk of a host (`is_on_host_disk`)
    stays there, even if the remaining hosts alone would not need that. Raises CpuftError: a host cannot be used or is
    named twice, the ranks do not fit, or there is no mpirun.
    """
    hosts, access = hosts or read_hosts(config), access or find_access(config)
    access.transport.hosts.update({host.name: host for host in hosts})
    # Hosts that a small run leaves out are checked, too: the next run will need them.
    _refuse_twins(hosts, access.transport.addresses(hosts))
    has_own_count = any(host.slots for host in hosts) or config.ppn
    wanted = hosts[: config.np or None] if not has_own_count else hosts
    found = dict(zip([host.name for host in wanted], gather_facts(wanted, access)))
    _refuse_twins(wanted, [(one.boot_id, one.hostname, sorted(one.interfaces.items())) for one in found.values()])
    refuse_both_architectures({name: one.machine for name, one in found.items()})
    if any(one.system != "linux" for one in found.values()):
        _check_macos(wanted, config, access)
    assignments = choose_ranks(wanted, config.np, config.ppn, found)
    used = tuple(found[assignment.host.name] for assignment in assignments)
    head_is_here = access.transport.is_here(hosts[0])
    on_login_node = bool(access.transport.bootstrap) and not head_is_here
    # Hosts with disks of their own get their inputs in the same way, wherever this machine is among them, and also if
    # the launch was moved here, to the head host.
    works_remotely = (
        bool(access.transport.here)
        or is_on_host_disk
        or (bool(access.entry.ssh_config_there) and len(used) > 1)
        or not (head_is_here or on_login_node)
    )
    return Cluster(
        assignments,
        used,
        mpi=find_mpi(hosts[0], config.mpirun, access.python, access.transport),
        as_root=used[0].uid == 0,
        access=access,
        works_remotely=works_remotely,
        on_login_node=on_login_node,
        uid=used[0].uid,
        command_prefixes={a.host.name: access.transport.command_prefix(a.host) for a in assignments if works_remotely},
    )


def _refuse_twins(hosts: tuple[Host, ...], identities: Sequence[object]) -> None:
    for host, identity in zip(hosts, identities):
        first = hosts[identities.index(identity)]
        if first is not host:
            raise CpuftError(f"{first.name} and {host.name} are the same host: keep one line, with slots=N for N ranks")


def refuse_both_architectures(machines: Mapping[str, str]) -> None:
    """Raise CpuftError if hosts (name -> architecture, not {}) differ: their MPI and kernels do not work together."""
    first, own = next(iter(machines.items()))
    for name, machine in machines.items():
        if machine != own:
            raise CpuftError(
                f"{first} is {own} and {name} is {machine}, and the ranks of a run need hosts of one architecture: "
                "name them with --only-hosts"
            )


def _check_macos(hosts: Sequence[Host], config: LaunchConfig, access: Access) -> None:
    """Raise CpuftError for hosts of which at least one has macOS, if they are not this machine alone, or if the run has
    an option for which macOS lacks something.
    """
    if len(hosts) > 1 or not access.transport.is_here(hosts[0]):
        raise CpuftError(
            "one of the hosts has macOS, and a Mac trains only by itself and to try it out: name Linux hosts"
        )
    if config.interruption_notice:
        raise CpuftError("--interruption-notice does not work on macOS: leave it out, because nobody takes a Mac away")


def gather_facts(hosts: tuple[Host, ...], access: Access) -> tuple[HostFacts, ...]:
    """Return the facts of every host, in the order of `hosts`; all are queried at the same time, for at most 60 s.
    Raises CpuftError: a host does not report its facts.
    """
    addresses = access.transport.addresses(hosts)
    # Each host reports its route to the head host, and the head host its route to the first other host.
    targets = {host.name: addresses[0] for host in hosts[1:]} | {hosts[0].name: addresses[:2][-1]}

    def gather(host: Host) -> HostFacts:
        answer = access.run_module(host, facts, targets[host.name])
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
