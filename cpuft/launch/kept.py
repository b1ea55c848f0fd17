"""What hosts with disks of their own have of a run that broke off: who has it, and what stays there for its sequel."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.files import REMOVE, write_text
from cpuft.hosts.cluster import Access, Cluster, name_work
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import attempt
from cpuft.plan import Plan, RunPlan, Stages, Step

NOTE = "kept.txt"
"""In the run's folder here: the hosts that kept its checkpoints when it last broke off."""
ROWS = "data.npz"
"""Beside its record: what a run prepares before its ranks start."""
_SILENT = "silent"
"""Among a run's logs: the hosts that did not answer at its end. Nobody needs to ask them again."""
_HERE = Path(__file__)
_LOOK = _HERE.with_name("look.sh").read_text(encoding="utf-8")
_KEEP = REMOVE + _HERE.with_name("keep.sh").read_text(encoding="utf-8")
"""Takes the run away, but for checkpoints, and says the newest one's name. A host without the lock is no master: one
that has it all the same shares the master's disk, and what is there is the master's business."""
_SECONDS = 60.0


@dataclass(frozen=True)
class Kept:
    """What a host has of a run."""

    host: Host
    there: bool = False
    """Whether it has anything."""
    going: bool = False
    """Whether the run goes on there."""
    update: int = -1
    """Of the newest checkpoint; -1 for none."""
    steps: int = 0
    """Made, as far as that is known there."""
    header: str = ""
    """First line of a record; empty for none."""
    rows: bool = False
    """Whether the prepared rows are there."""
    finished: bool = False
    """Whether the run came to its end there: its results only have to be fetched."""


def gather_kept(hosts: Sequence[Host], access: Access, run_dir: str) -> tuple[tuple[Kept, ...], list[CpuftError]]:
    """What each host that answers has of a run of this machine's, asked side by side; and why others do not."""
    words = ("sh", "-c", _LOOK, "look", name_work(run_dir))
    answers = attempt(lambda host: parse_kept(access.transport.run(host, words).output, host), hosts)
    kept = tuple(answer for answer in answers if isinstance(answer, Kept))
    return kept, [answer for answer in answers if isinstance(answer, CpuftError)]


def parse_kept(said: str, host: Host) -> Kept:
    """What `look.sh` said on a host."""
    lines = said.splitlines()
    updates = [int(found[1]) for line in lines if (found := re.fullmatch(r"checkpoint ([0-9]{1,15})\.[0-9]+", line))]
    steps = [int(found[1]) for line in lines if (found := re.fullmatch(r"steps ([0-9]{1,15})", line))]
    header = next((line for line in lines if line.startswith("{")), "")
    update, made = max(updates, default=-1), max(steps, default=0)
    return Kept(host, "there" in lines, "going" in lines, update, made, header, "rows" in lines, "finished" in lines)


def plan_kept(cluster: Cluster, work: str) -> Stages:
    """Nothing of the run left on any host but its checkpoints; what may be secret goes first."""
    sent = os.path.dirname(cluster.sent_file(work, 0))
    words = ("sh", "-c", _KEEP, "keep", cluster.folder, sent, work)
    names = [assignment.host.name for assignment in cluster.assignments]
    return (
        tuple(
            Step(
                f"keep the run's checkpoints on {name}", (*words, "master" if name == cluster.master else ""), host=name
            )
            for name in names
        ),
    )


def keep_checkpoints(plan: RunPlan, run_dir: str, environ: Mapping[str, str], without: Collection[str] = ()) -> str:
    """Do that on all hosts but some; a line that says what is kept and where, empty for nothing. RUN notes it, too."""
    steps = [step for stage in plan.kept for step in stage if step.host not in without]
    ways = Plan(ways=plan.ways)
    try:
        answers = execute.run_stage([ways.here(step) for step in steps], environ, _SECONDS)
    except TimeoutError:
        return ""
    found = {step.host: _parse_updates(answer.output) for step, answer in zip(steps, answers)}
    keepers = [host for host, updates in found.items() if updates]
    if not keepers:
        return ""
    write_text(Path(run_dir, NOTE), "".join(f"{host}\n" for host in keepers))
    newest = max(found[host][-1] for host in keepers)
    told = f"checkpoints up to update {newest} are kept on {', '.join(keepers)}"
    return f"{told}: cpuft launch --resume {run_dir} goes on, with --cluster or --hostfile as before"


def _parse_updates(said: str) -> list[int]:
    return [int(name.partition(".")[0]) for name in re.findall(r"^[0-9]+\.[0-9]+$", said, re.MULTILINE)]


def read_note(run_dir: str) -> list[str]:
    """Hosts that kept checkpoints of the run when it last broke off, as far as that was noted here."""
    try:
        return Path(run_dir, NOTE).read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def check_kept(kept: Iterable[Kept], cluster: Cluster, run_dir: str) -> None:
    """Raises CpuftError when the newest checkpoint is on a host that this run leaves out, as far as is known."""
    used = {assignment.host.name for assignment in cluster.assignments if cluster.away}
    updates = {one.host.name: one.update for one in kept if one.update >= 0}
    newest = max(updates.values(), default=-1)
    owners = [name for name, update in updates.items() if update == newest]
    if updates and not used.intersection(owners):
        raise CpuftError(
            f"the newest checkpoint of {run_dir}, of update {newest}, is on {', '.join(owners)}, which would be left "
            "out: put it first in the hostfile, or raise --np"
        )
    if not updates and (noted := read_note(run_dir)):
        raise CpuftError(
            f"none of these hosts has a checkpoint of {run_dir}, but {', '.join(noted)} had: "
            "take that back among the hosts, or start a new run without --resume"
        )


def find_update(run_dir: str, kept: Iterable[Kept] = ()) -> int:
    """The last update of the newest checkpoint in the run's folder here or on hosts; 0 for none."""
    folder = Path(run_dir, "checkpoints")
    names = os.listdir(folder) if folder.is_dir() else []
    here = [int(name.split(".")[0]) for name in names if name.replace(".", "").isdecimal()]
    return max([0, *here, *(one.update for one in kept)])


def note_silent(logs: Path, silent: Collection[str]) -> None:
    """Note the hosts that did not answer at the end of a run, where there are any."""
    if silent:
        write_text(logs / _SILENT, "".join(f"{name}\n" for name in sorted(silent)))


def remove_empty_run(run_dir: str) -> None:
    """Remove the folder of a run that was not started again, and that holds nothing but the note of lost hosts."""
    logs = Path(run_dir, "logs")
    notes, plan = (_SILENT, "exit-code"), "plan.sh"
    with suppress(OSError):
        names, logged = ({path.name for path in folder.iterdir()} for folder in (Path(run_dir), logs))
        if names <= {"logs", plan} and logged <= {*notes}:
            for path in (*(logs / name for name in notes), Path(run_dir, plan)):
                path.unlink(missing_ok=True)
            logs.rmdir()
            Path(run_dir).rmdir()


def silent_at_the_end(run_dir: str) -> set[str]:
    """What was noted of that."""
    try:
        return set(Path(run_dir, "logs", _SILENT).read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return set()
