"""Slurm's side of a run: the hosts that a job was given, and the way to them by srun. No ssh, and no hostfile.

Sources: the manual pages of sbatch and srun, section on environment variables.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cpuft import execute
from cpuft.argv import parse_slurm_counts
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport

_SECONDS = 20.0
"""Within which Slurm's controller answers."""
_SRUN = ("srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none")
"""One process on a host that others use at the same time, on all cores that the job has there."""
_ENDED = re.compile(r"^srun: error: \S+: task 0: ", re.MULTILINE)
"""What srun says of a command that failed by itself."""


@dataclass(frozen=True)
class SlurmTransport(Transport):
    """The way to the hosts of a job, from one of them or from where it was asked for."""

    own: str = ""
    """What Slurm calls this host; empty on a login node that has an allocation."""
    bootstrap: ClassVar[str] = "slurm"

    def is_here(self, host: Host) -> bool:
        """Whether it is the one where the job's script runs."""
        return host.name in (self.own, "localhost")

    def address(self, host: Host) -> str:
        """As its name resolves here, else as Slurm itself reaches it. Raises CpuftError: neither."""
        try:
            return socket.gethostbyname(host.name)
        except OSError:
            told = _ask(("scontrol", "--oneliner", "show", "node", host.name))
        found = re.search(r"\bNodeAddr=(\S+)", told)
        try:
            return socket.gethostbyname(found[1] if found else "")
        except OSError:
            raise CpuftError(f"host {host.name} has no address: scontrol show node {host.name} tells none") from None

    def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 60.0) -> Answer:
        """Run a command on a host, give it `stdin`, wait `seconds` at most.

        Raises CpuftError: srun cannot start it there, or it takes longer.
        """
        if self.is_here(host):
            return execute.run_quietly(argv, seconds, stdin)
        answer = execute.run_quietly([*self._srun(host), *argv], seconds, stdin)
        if answer.exit_code and not _ENDED.search(answer.errors):
            said = (answer.errors.strip().splitlines() or ["no answer"])[-1]
            error = CpuftError(f"host {host.name} cannot be used by srun ({said[-200:]}): sinfo tells its state")
            error.passes = True
            raise error
        return answer

    def _greet(self, host: Host, seconds: float) -> object:
        """By srun: Slurm itself learns minutes later that a host is gone."""
        return self.run(host, ("true",), seconds=seconds)

    def way(self, host: Host) -> tuple[str, ...]:
        """The words before a shell line that take it to a host by srun; none where it is this one."""
        return () if self.is_here(host) else (*self._srun(host), "sh", "-c")

    def _srun(self, host: Host) -> tuple[str, ...]:
        return (*_SRUN, f"--nodelist={host.name}")


def find_slurm_transport(environ: Mapping[str, str]) -> SlurmTransport | None:
    """The way to the hosts of the job that this process runs in; None where it is in none.

    Raises CpuftError: srun has started this process several times.
    """
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_JOB_NODELIST"):
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environ else "1"
    if tasks != "1":
        raise CpuftError(
            f"srun starts cpuft launch {tasks} times: write it into the job's script without srun, "
            f"and say how many ranks there are with --np"
        )
    return SlurmTransport(own=environ.get("SLURMD_NODENAME", ""))


def read_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Hosts of the job that this process runs in, this one first. Where it asked for tasks, these bound the ranks.

    Raises CpuftError: Slurm does not tell them.
    """
    names = _ask(("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"])).split()
    asked = {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environ.keys()
    counts = parse_slurm_counts(environ.get("SLURM_TASKS_PER_NODE", "")) if asked else ()
    slots = counts if len(counts) == len(names) else (0,) * len(names)
    hosts = [Host(name, count) for name, count in zip(names, slots)]
    own = environ.get("SLURMD_NODENAME", "")
    return tuple(sorted(hosts, key=lambda host: host.name != own))


def _ask(command: Sequence[str]) -> str:
    answer = execute.run_quietly(command, _SECONDS)
    if answer.exit_code:
        said = (answer.said.strip().splitlines() or ["nothing"])[-1]
        raise CpuftError(f"Slurm does not tell its hosts ({said[:200]}): check that {command[0]} works in the job")
    return answer.output
