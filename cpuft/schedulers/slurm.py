"""Slurm: the script that sbatch takes, and Slurm's client programs. Where a job's hosts are: cpuft/hosts/slurm.py.

Sources: the manual pages of sbatch, scontrol and squeue.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from cpuft.config.fields import option
from cpuft.errors import CpuftError
from cpuft.files import read_raw
from cpuft.schedulers.base import JobLaunch, JobOptions, JobStatus, JobSweep, Scheduler, read_template, run_client

_UNQUOTED = re.compile(r"-[A-Za-z0-9_.,:;@%+=&|*()\[\]/~^!<>-]+")
"""Options that need no quotes in an #SBATCH line: sbatch reads quotes there in a way of its own."""
_FINAL_STATES = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"
_HOPELESS_REASONS = (
    "PartitionNodeLimit PartitionTimeLimit PartitionConfig PartitionInactive BadConstraints AssocMaxNodePerJobLimit "
    "QOSMaxNodePerJobLimit QOSMaxCpuPerJobLimit AccountNotAllowed QOSNotAllowed InvalidAccount InvalidQOS"
)
"""Reasons for which Slurm keeps a job waiting and that waiting does not remove (squeue(1), JOB REASON CODES)."""


@dataclass(frozen=True)
class SlurmOptions(JobOptions):
    """Options of `cpuft submit slurm`."""

    partition: str = option("", "Partition (default: the site's)", takes="NAME")
    account: str = option("", "Account that pays for the job", takes="NAME")
    constraint: str = option("", "Features that every host must have, such as amx", takes="LIST")
    time: str = option("", "Time limit, such as 8:00:00 (default: the partition's)", takes="TIME")
    array: str = option(
        "", "Submit several jobs, each with its number in $SLURM_ARRAY_TASK_ID, such as 0-3", takes="LIST"
    )
    extra: str = option("", "More options of sbatch, such as '--qos=high --mem=0'", takes="OPTIONS")


class Slurm(Scheduler[SlurmOptions]):
    """Slurm; the scope of jobs is their cluster, if there are several. Methods raise CpuftError if Slurm fails."""

    name = "slurm"
    options = SlurmOptions
    help = "Submit a launch or a sweep by sbatch: cpuft submit slurm -- launch --np 8 --task mrpc."
    has_submitters_files = True

    def render(self, options: SlurmOptions, launch: JobLaunch, program: str) -> str:
        """Return a job script that has its hosts for itself alone and requeues itself after an interruption. Raises
        CpuftError: --array is given with a sweep or --resume, `launch.count_hosts` refuses --nodes, or an option cannot
        stand in a script.
        """
        if options.array and isinstance(launch, JobSweep):
            raise CpuftError("a sweep trains its runs in one job, and --array submits several jobs: leave out --array")
        if options.array and launch.resume:
            raise CpuftError(f"all jobs of --array would resume {launch.resume}: submit a job for each run instead")
        if "/" in options.name:  # Slurm would end the job without a word
            raise CpuftError(f"--name {options.name!r}: the log of the job has this name, so leave out '/'")
        hosts, ranks = launch.count_hosts(options.nodes)
        directives = [f"--job-name={options.name}", f"--nodes={hosts}", f"--ntasks-per-node={ranks}"]
        for name in ("partition", "account", "constraint", "time", "array"):
            directives += [f"--{name}={value}"] if (value := getattr(options, name)) else []
        try:
            directives += shlex.split(options.extra)  # of two directives with the same name sbatch takes the last
        except ValueError as error:
            raise CpuftError(f"--extra cannot be read ({error}): write '--name=value --other=value'") from None
        for directive in directives:
            if not _UNQUOTED.fullmatch(directive):
                advice = "write --name=value, without spaces or quotes"
                raise CpuftError(f"{directive[:60]!r} cannot stand in a job script: {advice}")
        lines = launch.to_shell(options.name, "${SLURM_RESTART_COUNT#0}")
        head = "".join(f"#SBATCH {directive}\n" for directive in directives)
        lines = f"cpuft={shlex.quote(program)} retries={options.retries}\n{lines}"
        return read_template("slurm.sh").replace("#SBATCH DIRECTIVES\n", head).replace("# LAUNCH\n", lines)

    def submit(self, text: str) -> str:
        """Submit a script by sbatch; return "1234", or "CLUSTER/1234" if sbatch names one. CpuftError: sbatch fails."""
        number, _, cluster = run_client("sbatch", "--parsable", stdin=text).strip().partition(";")
        return f"{cluster}/{number}" if cluster else number

    def cancel(self, job: str) -> None:
        """End a job by scancel. CpuftError: scancel fails."""
        run_client("scancel", *self._cluster, job)

    def is_ours(self, job: str) -> bool:
        """Return whether the job has the comment of cpuft's scripts. CpuftError: no such job, or it ended long ago."""
        return bool(re.search(r"^ *Comment=cpuft *$", self._show(job), re.MULTILINE))

    def status(self, job: str) -> JobStatus:
        """Return the state of a job; of an array, all different states, the largest exit code and all logs.

        The exit code is None until all jobs of the array have ended; it is 128 + N after signal N, and 1 if Slurm has 0
        but the job was not completed, e.g. cancelled. The log is the files of standard output on this machine, "" if
        they are not there. CpuftError: scontrol fails, as for a job that is unknown or ended long ago.
        """
        text = self._show(job)
        found = re.findall(r"\bJobState=(\w+)(?: Reason=([\w,]+))?", text)
        hopeless = {reason: reason for _, reason in found if reason in _HOPELESS_REASONS.split()}
        states = list(dict.fromkeys(f"{state} ({reason})" if reason in hopeless else state for state, reason in found))
        # ExitCode=CODE:SIGNAL
        codes = [(int(code), int(number)) for code, number in re.findall(r"\bExitCode=(\d{1,3}):(\d{1,3})", text)]
        worst = max((code or (number and 128 + number) for code, number in codes), default=0)
        worst = worst or int(states != ["COMPLETED"])
        files = [Path(path) for path in re.findall(r"^ *StdOut=(.*)$", text, re.MULTILINE)]
        log = "".join(map(read_raw, files))  # a log may not be there yet, or not be readable from this machine
        ended = all(state in _FINAL_STATES.split() for state in states)
        return JobStatus(", ".join(states), worst if ended else None, log, next(iter(hopeless), ""))

    @property
    def _cluster(self) -> tuple[str, ...]:
        return (f"--clusters={self.scope}",) if self.scope else ()

    def _show(self, job: str) -> str:
        return run_client("scontrol", *self._cluster, "show", "job", job)
