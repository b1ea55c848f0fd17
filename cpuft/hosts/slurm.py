"""Where the hosts of a Slurm job are, and how they are reached: by srun, without ssh and without a hostfile.

Sources: the manual pages of sbatch and srun, sections on environment variables.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cpuft import execute
from cpuft.argv import parse_slurm_counts
from cpuft.errors import CpuftError, TransientError, last_line
from cpuft.execute import Answer
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport

_ANSWER_SECONDS = 20.0
"""Time limit for an answer of Slurm's controller."""
_SRUN = ("srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none")
"""One process on a host beside the job's other processes (--overlap), on all cores that the job has there."""
_COMMAND_FAILED = re.compile(r"^srun: error: \S+: task 0: ", re.MULTILINE)
"""srun's message when the command itself has failed. All other messages are about srun."""


@dataclass(frozen=True)
class SlurmTransport(Transport):
    """The hosts of a Slurm job, reached by srun from one of them or from the login node that has the allocation."""

    own: str = ""
    """Slurm's name for this host; empty on a login node."""
    bootstrap: ClassVar[str] = "slurm"

    def is_here(self, host: Host) -> bool:
        """Return whether a host is the one where the job's script runs, or is called "localhost"."""
        return host.name in (self.own, "localhost")

    def address(self, host: Host) -> str:
        """Return the IPv4 address to which a host's name or NodeAddr resolves here. Raises CpuftError: neither does."""
        try:
            return socket.gethostbyname(host.name)
        except OSError:
            node = _query_slurm(("scontrol", "--oneliner", "show", "node", host.name))
        found = re.search(r"\bNodeAddr=(\S+)", node)
        try:
            return socket.gethostbyname(found[1] if found else "")
        except OSError:
            raise CpuftError(
                f"host {host.name} has no address: scontrol show node {host.name} shows no NodeAddr that resolves"
            ) from None

    def command_prefix(self, host: Host) -> tuple[str, ...]:
        """Return the argv ("srun", ..., "sh", "-c") that a shell line is appended to; () where the host is this one."""
        return () if self.is_here(host) else (*self._srun(host), "sh", "-c")

    def _run_remotely(self, host: Host, argv: Sequence[str], stdin: str, seconds: float) -> Answer:
        answer = execute.run_command([*self._srun(host), *argv], seconds, stdin)
        if answer.exit_code and not _COMMAND_FAILED.search(answer.errors):
            message = last_line(answer.errors, "no answer")
            raise TransientError(f"srun cannot use host {host.name} ({message[-200:]}): sinfo shows the host's state")
        return answer

    def _srun(self, host: Host) -> tuple[str, ...]:
        return (*_SRUN, f"--nodelist={host.name}")


def find_transport(environ: Mapping[str, str]) -> SlurmTransport | None:
    """Return the transport to the hosts of the Slurm job in which this process runs; None outside of a job or without
    SLURM_JOB_NODELIST. Raises CpuftError: srun has started this process several times.
    """
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_JOB_NODELIST"):
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in environ else "1"
    if tasks != "1":
        raise CpuftError(
            f"srun starts cpuft launch {tasks} times: write cpuft launch into the job's script without srun, "
            f"and give the number of ranks by --np"
        )
    return SlurmTransport(own=environ.get("SLURMD_NODENAME", ""))


def read_job_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the Slurm job in which this process runs, this one first and then in Slurm's order, with the
    job's tasks as slots if it asked for any, else 0. Raises CpuftError: scontrol fails; KeyError: this is no job.
    """
    names = _query_slurm(("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"])).split()
    has_tasks = {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environ.keys()
    counts = parse_slurm_counts(environ.get("SLURM_TASKS_PER_NODE", "")) if has_tasks else ()
    slots = counts if len(counts) == len(names) else (0,) * len(names)
    hosts = [Host(name, count) for name, count in zip(names, slots)]
    own = environ.get("SLURMD_NODENAME", "")
    return tuple(sorted(hosts, key=lambda host: host.name != own))


def _query_slurm(command: Sequence[str]) -> str:
    answer = execute.run_command(command, _ANSWER_SECONDS)
    if answer.exit_code:
        message = last_line(answer.text, "no output")
        raise CpuftError(
            f"Slurm does not name the job's hosts ({message[:200]}): check that {command[0]} works in the job"
        )
    return answer.output
