"""Where the runs of a sweep train: groups of hosts, or parts of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cpuft.config.fields import parse_arguments
from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError, counted
from cpuft.hosts.cluster import LOCAL, Access, find_access, gather_facts, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import LOGIN_REFUSED, try_hosts

_ANSWER_SECONDS = 15.0
"""A host that does not answer for so long after a failed run is lost."""
SILENT, REFUSES = "does not answer", "refuses the login"


@dataclass(frozen=True)
class Place:
    """Where one run at a time trains: one or more hosts, or some cores of this machine."""

    name: str
    options: tuple[str, ...] = ()
    """Options of `cpuft launch` that choose these hosts."""
    prefix: tuple[str, ...] = ()
    """Command before that of the launch, which limits it to some cores."""
    hosts: tuple[Host, ...] = ()
    """Hosts that can be lost; empty for this machine."""


def plan_places(config: LaunchConfig, hosts_per_run: int, parallel: int) -> list[Place]:
    """Return the places of a sweep's runs: groups of hosts, or parts of this machine if it is the only host.

    `parallel` is 0 for as many places as there are groups, or one on this machine. Hosts that do not fill a group are
    left out. Raises CpuftError: there are not enough hosts or cores.
    """
    hosts = read_hosts(config)
    if hosts == (LOCAL,):
        if hosts_per_run > 1:
            raise CpuftError(f"--hosts-per-run {hosts_per_run} needs hosts: name them with --hostfile or --cluster")
        (facts,) = gather_facts(hosts, Access())
        return divide_machine(max(1, parallel), [core.threads for core in facts.cores], facts.cpu_quota)
    groups = [hosts[i : i + hosts_per_run] for i in range(0, len(hosts) - hosts_per_run + 1, hosts_per_run)]
    if not groups:
        raise CpuftError(f"--hosts-per-run {hosts_per_run} is too many for {counted(len(hosts), 'host')}: give fewer")
    if parallel > len(groups):
        raise CpuftError(
            f"--parallel {parallel} is more than the {counted(len(groups), 'group')} of {hosts_per_run}: give "
            "fewer (several runs at a time on one host are only possible on this machine)"
        )
    transport, made = find_access(config).transport, list[Place]()
    for group in groups:
        name = ",".join(host.name for host in group)
        far = tuple(host for host in group if not transport.is_here(host))
        made.append(Place(name, (f"--only-hosts={name}",), hosts=far))
    return made[: parallel or len(made)]


def divide_machine(parallel: int, cores: Sequence[tuple[int, ...]], quota: float = 0.0) -> list[Place]:
    """Return equal parts of this machine ("CPUs 0,1"; "this machine" for one), from the hardware threads of each core
    and the number of cores that the control group allows (0: no limit). Raises CpuftError: there are not enough cores.
    """
    if parallel == 1:
        return [Place("this machine")]
    threads = [(cpu,) for core in cores for cpu in core]
    if len(cores) < parallel <= len(threads):
        cores = threads  # two runs then share a core, which is better than nothing where a core is all that there is
    if parallel > len(cores):
        raise CpuftError(f"--parallel {parallel} is too many for {counted(len(cores), 'core')}: give fewer")
    places = list[Place]()
    for begin, end in pairwise(number * len(cores) // parallel for number in range(parallel + 1)):
        name = ",".join(map(str, sorted(cpu for core in cores[begin:end] for cpu in core)))
        # A run that took the whole quota for its own would record a wrong number of cores.
        part = quota * (end - begin) / len(cores) if sys.platform == "linux" else end - begin
        share = ("env", f"CPUFT_CPU_QUOTA={part!r}") if part else ()
        pinned = ("taskset", "--cpu-list", name) if sys.platform == "linux" else ()
        places.append(Place(f"CPUs {name}", prefix=(*share, *pinned)))
    return places


def find_lost_hosts(place: Place, options: Sequence[str]) -> dict[str, str]:
    """Return "does not answer" (for 15 s) or "refuses the login" by name of each unusable host of a place; {} for none.

    `options` are those of its launches, such as "--cluster=office".
    """
    if not place.hosts:
        return {}
    transport, lost = find_access(make_launch_config(options)).transport, dict[str, str]()
    answers = try_hosts(lambda host: transport.run(host, ("true",), seconds=_ANSWER_SECONDS), place.hosts)
    for host, answer in zip(place.hosts, answers):
        if isinstance(answer, CpuftError) or answer.exit_code:
            lost[host.name] = REFUSES if getattr(answer, "kind", "") == LOGIN_REFUSED else SILENT
    return lost


def make_launch_config(options: Sequence[str]) -> LaunchConfig:
    """Return the configuration of options "--name=value"; others are ignored. CpuftError: a name or value is wrong."""
    return parse_arguments(LaunchConfig, [option for option in options if option.startswith("--") and "=" in option])
