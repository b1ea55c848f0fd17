"""A job of Slurm's: the script that sbatch takes."""

from __future__ import annotations

import re
import shlex

from cpuft.errors import CpuftError
from cpuft.schedulers.options import JobConfig
from cpuft.schedulers.work import HERE, Work

_PLAIN = re.compile(r"-[A-Za-z0-9_.,:;@%+=&|*()\[\]/~^!<>-]+")
"""Options that no line of #SBATCH needs quotes for: how it reads those is not as any shell does."""
_SITE = ("partition", "account", "constraint", "time", "array")
_HEAD, _, _BODY = (HERE / "slurm.sh").read_text(encoding="utf-8").partition("\n\n")
_REQUEUE = (HERE / "requeue.sh").read_text(encoding="utf-8")


def format_job(config: JobConfig, work: Work, cpuft: str) -> str:
    """A job's script: hosts for itself alone, and where it was interrupted it goes on. `cpuft`: the program there.

    Raises CpuftError: an option that no line of #SBATCH can hold.
    """
    hosts, ranks = work.spread(config.nodes)
    own = {"job-name": config.name, "nodes": hosts, "ntasks-per-node": ranks}
    own |= {name: value for name in _SITE if (value := getattr(config, name))}
    try:
        options = [*(f"--{name}={value}" for name, value in own.items()), *shlex.split(config.extra)]
    except ValueError as error:
        raise CpuftError(f"--extra cannot be read ({error}): write '--name=value --other=value'") from None
    if odd := next((one for one in options if not _PLAIN.fullmatch(one)), ""):
        raise CpuftError(f"{odd[:60]!r} cannot stand in a job's script: write --name=value, without blanks or quotes")
    directives = "".join(f"\n#SBATCH {option}" for option in options)  # the last of a name wins
    lines = work.format(config.name, "${SLURM_RESTART_COUNT#0}")
    return f"{_HEAD}{directives}\n\n{_BODY}cpuft={shlex.quote(cpuft)} retries={config.retries}\n{lines}{_REQUEUE}"
