"""Find what earlier attempts of a run left on hosts and on this machine, and how the run can be resumed."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpuft.config.fields import format_flag, option_names
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import CHANGEABLE_ON_RESUME, TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import is_locked
from cpuft.hosts.cluster import (
    STATE_FILE,
    WORK_ROOT,
    Access,
    Cluster,
    find_access,
    read_host_folder,
    read_hosts,
)
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import try_hosts
from cpuft.launch.run_state import FINISHED, RunState, newest, parse_state, read_state
from cpuft.rank import describe_run
from cpuft.record import FILE_NAME, EarlierMeasurements, parse_record, read_measurements, read_record
from cpuft.serialization import load, parse_json

CHECKPOINTS, BEST = "checkpoints", "best"
"""Folder of checkpoints in the run folder, and the folder in it for the checkpoint of the best evaluation."""
_CHECKPOINT = re.compile(r"[0-9]{1,15}\.[0-9]{1,9}")
"""Name of a whole checkpoint: its update and the rank that wrote it."""
PREPARED_DATA = "data.npz"
"""File in the run folder with the tokenized examples, which are prepared before the ranks start."""


@dataclass(frozen=True)
class HostCopy:
    """What a host with a disk of its own has of a run."""

    host: Host
    exists: bool = False
    """Whether the host has any file of the run."""
    is_active: bool = False
    """Whether the run is still active on this host, or its results are being fetched."""
    checkpoint_update: int = -1
    """Update of the newest checkpoint; -1 for none."""
    steps: int = 0
    """Number of updates made, as far as this host knows."""
    header: str = ""
    """First line of the run record (JSON); empty for none."""
    has_data: bool = False
    """Whether the prepared examples are there."""
    state: RunState = RunState("")
    """The newest whole copy of the run state; without an id if there is none."""

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished on this host: it is never started again, only its results are to be fetched."""
        return self.exists and self.state.phase == FINISHED


@dataclass(frozen=True)
class ResumedRun:
    """An interrupted run that is to be continued."""

    run_dir: str
    """Absolute path of the run folder on this machine, without links."""
    train: TrainConfig = TrainConfig()
    np: int = 0
    """Recorded number of ranks; 0 if nothing was recorded."""
    updates: int = 0
    """Updates made before the interruption."""
    global_batch: int = 0
    """Examples per update; 0 if nothing was recorded."""
    host_copies: tuple[HostCopy, ...] = ()
    """What the hosts that answer have of the run, in the order of the hostfile."""
    unreachable: tuple[str, ...] = ()
    """For each host that does not answer, an error message that names it."""
    stopped_at: float = 0.0
    """For an automatic restart: since when the run made no progress, in seconds since 1970."""
    restart_reason: str = ""
    """Reason of an automatic restart; empty for a run that the user resumes."""
    fetched_from: str = ""
    """Name of the head host whose logs have already been fetched; empty for none."""
    owner: int = 0
    """The highest number of a start of the run that is known."""
    finished_on: str = ""
    """Name of the host on which the run finished and where its results still are; empty for none."""
    measured: EarlierMeasurements | None = field(default=None, compare=False)
    """What the first attempt measured about the network and the ranks' speed. It is valid between `hostnames`."""
    hostnames: frozenset[str] = field(default=frozenset(), compare=False)
    """Host names that the run's ranks reported."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that answered; empty if all hosts are this machine."""
        return tuple(copy.host for copy in self.host_copies)

    def take_over(
        self, config: LaunchConfig, train: TrainConfig, given: Collection[str]
    ) -> tuple[LaunchConfig, TrainConfig]:
        """Return `config`, with the recorded number of ranks unless "np" is `given`, and the recorded training options,
        with the values of `train` for changeable ones that are `given`, and for files that were sent to hosts. Raises
        CpuftError: another option is given with a new value, or `config` names a run folder.
        """
        if config.run_dir:
            raise CpuftError("--resume and --run-dir both name the folder of the run: leave --run-dir out")
        # Users name files on their own machine and cannot know the paths that these files have on the hosts.
        sent = [name for name, value in vars(self.train).items() if str(value).startswith(f"{WORK_ROOT}/cpuft-")]
        free = {*CHANGEABLE_ON_RESUME, *sent}
        for name in (name for name in option_names(TrainConfig) if name in given):
            old, new = getattr(self.train, name), getattr(train, name)
            if old != new and name not in free:
                flag = format_flag(name)
                raise CpuftError(f"{self.run_dir} was started with {flag} {old}, not {new}: leave {flag} out")
        config = config if "np" in given or not self.np else replace(config, np=self.np)
        return config, replace(self.train, **{name: getattr(train, name) for name in free if name in given})


def gather_resumed_run(run: str, config: LaunchConfig, is_script: bool = False) -> ResumedRun:
    """Return what is known about a run here and on the hosts that `config` names, unless all are this machine. Errors
    of hosts that do not answer are in `unreachable`. Raises CpuftError: the run cannot be resumed (`read_resumed_run`),
    or only such hosts may have a record.
    """
    hosts, access = read_hosts(config), find_access(config)
    if all(access.transport.is_here(host) for host in hosts):
        return read_resumed_run(run, is_script)
    copies, errors = gather_host_copies(hosts, access, os.path.realpath(run))
    try:
        resumed = read_resumed_run(run, is_script, copies)
    except CpuftError:
        if not errors or any(copy.exists for copy in copies) or Path(run, FILE_NAME).exists():
            raise
        why = "; ".join(map(str, errors))
        raise CpuftError(f"what run {run} has recorded is not here, and {why}: try again when they answer") from None
    return replace(resumed, host_copies=copies, unreachable=tuple(map(str, errors)))


def read_resumed_run(run: str, is_script: bool = False, host_copies: Sequence[HostCopy] = ()) -> ResumedRun:
    """Return what is known about a run from its record, in the run folder, of the first host that has one, or in the
    newest checkpoint here; a script has none. Asks no host, and `host_copies` of the result stays empty.

    `updates` is the largest number that anything knows. If the results of the finished run are still on a host, only
    `run_dir` and `finished_on` are set. Raises CpuftError: the run is active, finished, unknown, of the other kind
    (`is_script`) or otherwise cannot be resumed.
    """
    path = Path(os.path.realpath(run))
    is_active = any(copy.is_active for copy in host_copies)
    finished = [copy.host.name for copy in host_copies if copy.is_finished]
    if finished and not is_active:  # else another launcher is fetching it
        return ResumedRun(str(path), finished_on=finished[0])
    state = newest(one for one in (read_state(run), *(copy.state for copy in host_copies)) if one and one.id)
    owner = state.owner if state else 0
    if state and state.phase == FINISHED and not is_active:
        if places := [copy.host.name for copy in host_copies if copy.state.phase == FINISHED]:  # in a detached run
            raise CpuftError(
                f"run {run} is finished, and its results are on {places[0]}: fetch them with cpuft attach {run}"
            )
        raise CpuftError(f"run {run} is finished, and there is nothing to resume: start a new run without --resume")
    headers = [(copy.host.name, copy.header) for copy in host_copies if copy.header]
    has_record, checkpoint = (path / FILE_NAME).exists(), find_checkpoint_here(str(path))
    exists = (path / "logs").is_dir() or any(copy.exists for copy in host_copies) or checkpoint is not None
    has_copied_record = checkpoint is not None and (checkpoint / FILE_NAME).exists()
    if is_active or is_locked(path / FILE_NAME):
        raise CpuftError(f"run {run} is still active: wait until it ends, or stop it first")
    if not (has_record or headers or has_copied_record) and (state or exists):
        if is_script and exists:
            return ResumedRun(str(path), np=state.ranks if state else 0, owner=owner)
        script = "" if is_script else "name its script if it has one, else "
        raise CpuftError(f"run {run} has recorded no update: {script}start it again in a new folder")
    if headers and not has_record:
        record = parse_record(headers[0][1], f"the record of {run} on {headers[0][0]}")
    else:
        # A checkpoint holds the record up to its update. If the head host was lost, this machine has no other record.
        record = read_record(str(checkpoint if has_copied_record and not has_record else path))
    if is_script:
        raise CpuftError(f"run {run} is cpuft's own training and has no script: leave the script out")
    if record.header.independent:
        raise CpuftError(f"run {run} measured independent ranks, and cannot be resumed: start a new run")
    header = record.header
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
    except ValueError as error:
        raise CpuftError(f"run {run} cannot be resumed, because {error}: start a new run without --resume") from None
    known = [max(copy.steps, copy.checkpoint_update) for copy in host_copies]
    updates = max([len(record.steps), find_newest_update(run), *known])
    ranks = header.ranks + [rank for line in record.resumptions for rank in line.ranks]
    return ResumedRun(
        str(path),
        train,
        header.world_size,
        updates,
        header.global_batch,
        owner=owner,
        measured=read_measurements(header),
        hostnames=frozenset(rank.host for rank in ranks),
    )


def gather_host_copies(
    hosts: Sequence[Host], access: Access, run_dir: str
) -> tuple[tuple[HostCopy, ...], list[CpuftError]]:
    """Return what hosts have of the run whose folder here is `run_dir`, and errors of those that do not answer."""
    folder = read_host_folder(run_dir)

    def ask(host: Host) -> HostCopy:
        answer = access.run_module(host, describe_run, folder) if folder else access.transport.run(host, ("echo", "{}"))
        return parse_host_copy(answer.output, host, answer.errors)

    answers = try_hosts(ask, hosts)
    copies = tuple(answer for answer in answers if isinstance(answer, HostCopy))
    return copies, [answer for answer in answers if isinstance(answer, CpuftError)]


def parse_host_copy(output: str, host: Host, errors: str = "") -> HostCopy:
    """Return what `describe_run` printed, with its newest whole state; CpuftError, with `errors` in it: other text."""
    try:
        values = load(dict[str, Any], parse_json(output))
        texts = load(list[str], values.pop("states", []))
        copy = load(HostCopy, values | {"host": asdict(host), "state": {"id": ""}})
    except ValueError as error:
        reason = " ".join(errors.split())[-200:] or str(error)
        raise CpuftError(f"host {host.name} cannot list its files of the run ({reason}): check its disk") from None
    states = list[RunState]()
    for text in texts:
        with suppress(CpuftError):
            states.append(parse_state(text, f"on host {host.name}"))
    return replace(copy, state=newest(states) or copy.state)


def check_newest_checkpoint(host_copies: Iterable[HostCopy], cluster: Cluster, run_dir: str) -> None:
    """Raise CpuftError if the newest checkpoint in `host_copies` is neither on the cluster's hosts nor, if these work
    on their own disks, here; and if there is none, but the run state names hosts that had one. Asks no host.
    """
    used = set(cluster.hosts if cluster.works_remotely else ())
    here = find_newest_update(run_dir) if cluster.works_remotely else 0
    updates = {copy.host.name: copy.checkpoint_update for copy in host_copies if copy.checkpoint_update >= 0}
    newest = max(updates.values(), default=-1)
    owners = [name for name, update in updates.items() if update == newest]
    if updates and here < newest and not used.intersection(owners):
        raise CpuftError(
            f"the newest checkpoint of {run_dir}, of update {newest}, is on {', '.join(owners)}, which would not be "
            "used: put that host first in the hostfile, or raise --np"
        )
    state = read_state(run_dir)
    if not updates and not here and (owners := list(state.checkpoints if state else ())):
        names, away = ", ".join(owners), ", ".join(name for name in owners if name not in used)
        advice = f"add {away} to the hosts again, or start" if away else "it was removed there, so start"
        raise CpuftError(
            f"none of these hosts has a checkpoint of {run_dir}, but {names} had one: {advice} a new run without "
            "--resume"
        )


def find_newest_update(run_dir: str, host_copies: Iterable[HostCopy] = ()) -> int:
    """Return the update of the newest checkpoint in the run folder here or on a host; 0 if there is none."""
    here = find_checkpoint_here(run_dir)
    updates = [int(here.stem)] if here else []
    return max([0, *updates, *(copy.checkpoint_update for copy in host_copies)])


def find_checkpoint_here(run_dir: str, part: str = "") -> Path | None:
    """Return the folder of the newest checkpoint here, damaged or not; of the best with "best"; None without one."""
    folder = Path(run_dir, CHECKPOINTS, part)
    names = os.listdir(folder) if folder.is_dir() else []
    found = [name for name in names if _CHECKPOINT.fullmatch(name)]
    return folder / max(found, key=lambda name: int(name.partition(".")[0])) if found else None


def has_begun(run_dir: str) -> bool:
    """Return whether the run folder on this machine has more than the run state; False if there is no such folder."""
    return any(path.name != STATE_FILE for path in Path(run_dir).glob("*"))


def remove_empty_run(run_dir: str) -> None:
    """Remove a run folder that holds nothing but plan.sh, the run state and an empty folder logs, unless a host has
    checkpoints of the run, and leave any other folder as it is. Never raises OSError.
    """
    logs, own = Path(run_dir, "logs"), ("plan.sh", STATE_FILE)
    with suppress(OSError, CpuftError):
        names, state = {path.name for path in Path(run_dir).glob("*")}, read_state(run_dir)
        if names <= {"logs", *own} and not any(logs.glob("*")) and not (state and state.checkpoints):
            for name in own:
                Path(run_dir, name).unlink(missing_ok=True)
            if logs.is_dir():
                logs.rmdir()
            Path(run_dir).rmdir()
