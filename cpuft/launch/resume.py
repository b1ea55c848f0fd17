"""Find what earlier attempts of a run left on hosts and on this machine, and how the run can be resumed."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpuft import execute
from cpuft.config import FREE_ON_RESUME, LaunchConfig, TrainConfig, option_names
from cpuft.errors import CpuftError
from cpuft.files import REMOVE, write_text
from cpuft.hosts.cluster import WORK_ROOT, Access, Cluster, find_access, name_work, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import attempt
from cpuft.plan import Plan, RunPlan, Stages, Step
from cpuft.rank.measured import Measured, list_measured
from cpuft.record import FILE_NAME, parse_record, read_record
from cpuft.serialization import load


@dataclass(frozen=True)
class ResumedRun:
    """A run that broke off."""

    run_dir: str
    train: TrainConfig = TrainConfig()
    """Its options, as recorded."""
    np: int = 0
    """Its ranks; 0 where nothing recorded them."""
    updates: int = 0
    """Recorded until it broke off."""
    global_batch: int = 0
    kept: tuple[HostCopy, ...] = ()
    """What hosts with disks of their own have of it, those that answer."""
    silent: tuple[str, ...] = ()
    """Why other hosts do not."""
    since: float = 0.0
    """When it broke off, in seconds since 1970, if it goes on by itself."""
    because: str = ""
    """And why."""
    fetched: str = ""
    """Host whose logs of it are here."""
    finished_on: str = ""
    """Host on which the run came to its end and where its results still are; empty for none."""
    measured: Measured | None = field(default=None, compare=False)
    places: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the hosts that it has run on, as they call themselves: between these `measured` holds."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts that answer, in the order of the hostfile."""
        return tuple(one.host for one in self.kept)

    def take_over(
        self, config: LaunchConfig, train: TrainConfig, given: Collection[str]
    ) -> tuple[LaunchConfig, TrainConfig]:
        """The options of the run, with those of now that may differ; `given` names those that are not defaults.

        Raises
        ------
        CpuftError: an option was given with another value than the run has.
        """
        if config.run_dir:
            raise CpuftError("--resume and --run-dir both name the folder of the run: leave --run-dir out")
        # Where a file or folder was sent to, nobody can be expected to know.
        sent = [name for name, value in vars(self.train).items() if str(value).startswith(f"{WORK_ROOT}/cpuft-")]
        free = {*FREE_ON_RESUME, *sent}
        for name in (name for name in option_names(TrainConfig) if name in given):
            was, now = getattr(self.train, name), getattr(train, name)
            if was != now and name not in free:
                flag = "--" + name.replace("_", "-")
                raise CpuftError(f"{self.run_dir} was started with {flag} {was}, not {now}: leave {flag} out")
        config = config if "np" in given or not self.np else replace(config, np=self.np)
        return config, replace(self.train, **{name: getattr(train, name) for name in free if name in given})


def gather_resumed_run(run: str, config: LaunchConfig, is_script: bool = False) -> ResumedRun:
    """What is known of a run to go on with, here and on the hosts that `config` names.

    Raises CpuftError: as `read_resumed_run`.
    """
    hosts, access = read_hosts(config), find_access(config)
    if all(access.transport.is_here(host) for host in hosts):
        return read_resumed_run(run, is_script)
    kept, silent = gather_host_copies(hosts, access, str(Path(run).absolute()))
    return replace(read_resumed_run(run, is_script, kept), kept=kept, silent=tuple(map(str, silent)))


def read_resumed_run(run: str, is_script: bool = False, kept: Sequence[HostCopy] = ()) -> ResumedRun:
    """What is known of a run to go on with: of a script's, only where it is. `kept`: what hosts have of it.

    Raises
    ------
    CpuftError: no run of ours is there, it came to its end, it is still going on, or its ranks trained apart.
    """
    path = Path(run).absolute()
    going = [one.host.name for one in kept if one.going]
    if finished := [one.host.name for one in kept if one.finished and not one.going]:
        return ResumedRun(str(path), finished_on=finished[0])
    headers = [(one.host.name, one.header) for one in kept if one.header]
    here = (path / FILE_NAME).exists()
    if is_script and ((path / "logs").is_dir() or any(one.there for one in kept)) and not (here or headers or going):
        return ResumedRun(str(path))
    if here or not headers:
        record = read_record(str(path))
    else:
        record = parse_record(headers[0][1], f"the record of {run} on {headers[0][0]}")
    if is_script:
        raise CpuftError(f"run {run} is cpuft's own training, and no script's: leave the script out")
    if record.footer:
        raise CpuftError(f"run {run} is finished, and there is nothing to resume: start a new one without --resume")
    if record.header.apart:
        raise CpuftError(f"run {run} measured ranks that train apart, and cannot go on: start it anew")
    if going or (here and _is_locked(path / FILE_NAME)):
        raise CpuftError(f"run {run} is still going on: wait for its end, or stop it first")
    header = record.header
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
    except ValueError as error:
        raise CpuftError(f"run {run} cannot go on, because {error}: start it anew") from None
    updates = max([len(record.steps), *(max(one.steps, one.update) for one in kept)])
    known = ResumedRun(str(path), train, header.world_size, updates, header.global_batch)
    ranks = header.ranks + [rank for line in record.resumptions for rank in line.ranks]
    return replace(known, measured=list_measured(header), places=frozenset(rank.host for rank in ranks))


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


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
class HostCopy:
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


def gather_host_copies(
    hosts: Sequence[Host], access: Access, run_dir: str
) -> tuple[tuple[HostCopy, ...], list[CpuftError]]:
    """What each host that answers has of a run of this machine's, asked side by side; and why others do not."""
    words = ("sh", "-c", _LOOK, "look", name_work(run_dir))
    answers = attempt(lambda host: parse_host_copy(access.transport.run(host, words).output, host), hosts)
    kept = tuple(answer for answer in answers if isinstance(answer, HostCopy))
    return kept, [answer for answer in answers if isinstance(answer, CpuftError)]


def parse_host_copy(said: str, host: Host) -> HostCopy:
    """What `look.sh` said on a host."""
    lines = said.splitlines()
    updates = [int(found[1]) for line in lines if (found := re.fullmatch(r"checkpoint ([0-9]{1,15})\.[0-9]+", line))]
    steps = [int(found[1]) for line in lines if (found := re.fullmatch(r"steps ([0-9]{1,15})", line))]
    header = next((line for line in lines if line.startswith("{")), "")
    update, made = max(updates, default=-1), max(steps, default=0)
    return HostCopy(
        host, "there" in lines, "going" in lines, update, made, header, "rows" in lines, "finished" in lines
    )


def plan_partial_cleanup(cluster: Cluster, work: str) -> Stages:
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


def remove_all_but_checkpoints(
    plan: RunPlan, run_dir: str, environ: Mapping[str, str], without: Collection[str] = ()
) -> str:
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


def check_newest_checkpoint(kept: Iterable[HostCopy], cluster: Cluster, run_dir: str) -> None:
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


def find_newest_checkpoint(run_dir: str, kept: Iterable[HostCopy] = ()) -> int:
    """The last update of the newest checkpoint in the run's folder here or on hosts; 0 for none."""
    folder = Path(run_dir, "checkpoints")
    names = os.listdir(folder) if folder.is_dir() else []
    here = [int(name.split(".")[0]) for name in names if name.replace(".", "").isdecimal()]
    return max([0, *here, *(one.update for one in kept)])


def write_lost_hosts(logs: Path, silent: Collection[str]) -> None:
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


def read_lost_hosts(run_dir: str) -> set[str]:
    """What was noted of that."""
    try:
        return set(Path(run_dir, "logs", _SILENT).read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return set()
